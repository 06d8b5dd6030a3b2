"""Copying blocks on a GPU: one program per pair and piece of a block, into the pool as it lies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels._triton_attention import check_offsets
from pallas_kernels.kv_write.triton import as_bits

PIECE_BYTES = 8192  # that one program of four warps moves, in four 16-byte accesses of each thread


@jax.jit(static_argnames=("block_size", "interpret"))
def block_copy(
    pool: Shaped[Array, " slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    interpret: bool = False,
) -> Shaped[Array, " slots *item"]:
    """See `pallas_kernels.block_copy.block_copy`.

    A block may be read by one pair and written by another, and programs run in no order: what is read goes by way of
    a buffer of as many blocks as there are pairs.

    Raises:
      ValueError: the pool is of a size whose offsets the backend would compute wrongly.
    """
    if src.size == 0:
        return pool
    places = jnp.arange(src.shape[0], dtype=jnp.int32)
    num_blocks = pool.shape[0] // block_size
    real = _is_block(src, num_blocks) & _is_block(dst, num_blocks)
    buffer = jnp.empty((src.shape[0] * block_size, *pool.shape[1:]), pool.dtype)
    read = _copy(pool, buffer, jnp.where(real, src, -1), places, block_size, interpret)
    return _copy(read, pool, jnp.where(real, places, -1), dst, block_size, interpret)


@jax.jit(static_argnames=("block_size", "interpret"))
def block_copy_between(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    interpret: bool = False,
) -> Shaped[Array, " dst_slots *item"]:
    """See `pallas_kernels.block_copy.block_copy_between`.

    Raises:
      ValueError: a pool is of a size whose offsets the backend would compute wrongly.
    """
    return dst_pool if src.size == 0 else _copy(src_pool, dst_pool, src, dst, block_size, interpret)


def _copy(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    block_size: int,
    interpret: bool,
) -> Shaped[Array, " dst_slots *item"]:
    """Blocks of one pool into another, in place; of several pairs with one destination only the last is copied."""
    check_offsets("src_pool", src_pool)
    check_offsets("dst_pool", dst_pool)
    src_blocks, dst_blocks = (as_bits(pool).reshape(pool.shape[0] // block_size, -1) for pool in (src_pool, dst_pool))
    real = _is_block(src, src_blocks.shape[0]) & _is_block(dst, dst_blocks.shape[0])
    places = jnp.arange(src.shape[0], dtype=jnp.int32)
    later = real[None] & (dst[None] == dst[:, None]) & (places[None] > places[:, None])
    dst = jnp.where(real & ~jnp.any(later, axis=1), dst, -1)
    width = dst_blocks.shape[1]
    piece = min(pl.next_power_of_2(width), PIECE_BYTES // src_pool.dtype.itemsize)
    copied = pl.pallas_call(
        functools.partial(copy_kernel, piece=piece),
        grid=(src.shape[0], pl.cdiv(width, piece)),
        out_shape=jax.ShapeDtypeStruct(dst_blocks.shape, dst_blocks.dtype),
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="block_copy",
    )(src_blocks, dst_blocks, src, dst)
    return jax.lax.bitcast_convert_type(copied.reshape(dst_pool.shape), dst_pool.dtype)


def copy_kernel(src_blocks: Any, dst_blocks: Any, src: Any, dst: Any, copied: Any, *, piece: int) -> None:
    """One piece of one pair's block; a destination of -1 is none."""
    del dst_blocks  # aliased by `copied`
    pair = pl.program_id(0)
    lanes = pl.program_id(1) * piece + jnp.arange(piece, dtype=jnp.int32)
    real = (lanes < copied.shape[1]) & (dst[pair] >= 0)
    values = plgpu.load(src_blocks.at[src[pair], lanes], mask=real, other=jnp.zeros((), src_blocks.dtype))
    plgpu.store(copied.at[dst[pair], lanes], values, mask=real)


def _is_block(ids: Int32[Array, " ids"], num_blocks: int) -> Array:
    return (ids >= 0) & (ids < num_blocks)
