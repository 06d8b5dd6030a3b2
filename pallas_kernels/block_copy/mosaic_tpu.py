"""Copying blocks on a TPU: one DMA for each pair, within HBM."""

# ruff: noqa: ANN001, ANN202 (what a kernel is handed are refs, for which there is no public type)

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped


@jax.jit(static_argnames=("block_size", "interpret"))
def block_copy(
    pool: Shaped[Array, " slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, " slots *item"]:
    """See `pallas_kernels.block_copy.block_copy`.

    A block may be read by one pair and written by another: what is read goes by way of a buffer of as many blocks as
    there are pairs.

    Raises:
      NotImplementedError: a block is less than the tiles that a DMA can move.
    """
    if src.size == 0:
        return pool
    places = jnp.arange(src.shape[0], dtype=jnp.int32)
    num_blocks = pool.shape[0] // block_size
    real = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
    buffer = jnp.zeros((src.shape[0] * block_size, *pool.shape[1:]), pool.dtype)
    read = _copy(pool, buffer, src, places, real, block_size, interpret)
    return _copy(read, pool, places, dst, real & _is_last(dst, real), block_size, interpret)


@jax.jit(static_argnames=("block_size", "interpret"))
def block_copy_between(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, " dst_slots *item"]:
    """See `pallas_kernels.block_copy.block_copy_between`.

    Raises:
      NotImplementedError: a block is less than the tiles that a DMA can move.
    """
    if src.size == 0:
        return dst_pool
    real = (src >= 0) & (src < src_pool.shape[0] // block_size)
    real &= (dst >= 0) & (dst < dst_pool.shape[0] // block_size)
    return _copy(src_pool, dst_pool, src, dst, real & _is_last(dst, real), block_size, interpret)


def _is_last(dst: Int32[Array, " pairs"], real: Array) -> Array:
    """Whether no later real pair has the same destination: DMAs under way at once finish in any order."""
    same_later = (dst[:, None] == dst[None]) & real[None] & ~jnp.tri(dst.shape[0], dtype=bool)
    return ~jnp.any(same_later, axis=1)


def _copy(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    real: Array,
    block_size: int,
    interpret: bool | pltpu.InterpretParams,
) -> Shaped[Array, " dst_slots *item"]:
    """Real pairs copied from one pool to another, in place; their destinations differ."""
    if dst_pool.ndim < 3 and not (dst_pool.ndim == 2 and block_size % 8 == 0):
        raise NotImplementedError(
            f"a TPU copies blocks of whole tiles: pool must be [slots, kv_heads, head_dim], or [slots, kv_heads] in "
            f"blocks of a multiple of 8 slots, got shape {dst_pool.shape} and block_size {block_size}"
        )
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    blocks = [pool.reshape(-1, block_size, *pool.shape[1:]) for pool in (src_pool, dst_pool)]
    copied = pl.pallas_call(
        _copy_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(blocks[1].shape, dst_pool.dtype),
        input_output_aliases={4: 0},
        interpret=interpret,
        name="block_copy",
    )(src, dst, real.astype(jnp.int32), *blocks)
    return copied.reshape(dst_pool.shape)


def _copy_kernel(src, dst, real, src_blocks, _, dst_blocks, done):
    """All copies are under way before the first is waited for."""

    def each_copy(act):
        def of_pair(i, _):
            @pl.when(real[i] != 0)
            def _():
                act(pltpu.make_async_copy(src_blocks.at[src[i]], dst_blocks.at[dst[i]], done))

        lax.fori_loop(0, src.shape[0], of_pair, None)

    each_copy(lambda copy: copy.start())
    each_copy(lambda copy: copy.wait())


block_copy_interpreted = functools.partial(block_copy, interpret=pltpu.InterpretParams())
block_copy_between_interpreted = functools.partial(block_copy_between, interpret=pltpu.InterpretParams())
