"""Signatures, checks and choice of backend of copying and filling whole blocks."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from pallas_kernels._ragged import MAX_INT32, require
from pallas_kernels.block_copy import mosaic_tpu, reference, triton
from pallas_kernels.dispatch import dispatch

COPY_BACKENDS: Mapping[str, Callable[..., jax.Array]] = {
    "mosaic_tpu": mosaic_tpu.block_copy,
    "mosaic_tpu_interpret": mosaic_tpu.block_copy_interpreted,
    "triton": triton.block_copy,
    "triton_interpret": functools.partial(triton.block_copy, interpret=True),
    "xla": reference.block_copy,
}
COPY_BETWEEN_BACKENDS: Mapping[str, Callable[..., jax.Array]] = {
    "mosaic_tpu": mosaic_tpu.block_copy_between,
    "mosaic_tpu_interpret": mosaic_tpu.block_copy_between_interpreted,
    "triton": triton.block_copy_between,
    "triton_interpret": functools.partial(triton.block_copy_between, interpret=True),
    "xla": reference.block_copy_between,
}
FILL_BACKENDS: Mapping[str, Callable[..., jax.Array]] = {"xla": reference.fill_blocks}


def block_copy(
    pool: Shaped[Array, " slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    backend: str | Sequence[str] | None = None,
) -> Shaped[Array, " slots *item"]:
    """Copies block `src[i]` over block `dst[i]` for all i at once and leaves every other block as it is, bit for bit.

    Block b is the slots `[b * block_size, (b + 1) * block_size)`. All sources are read before anything is written, so
    a block may be a source and a destination in one call: chains move along and cycles rotate. A block may be
    copied to many; of several pairs with one destination the last is stored. A pair of which either id is negative
    or not below `slots / block_size` copies nothing: empty places carry the number of blocks.

    Inside a jitted function whose pool is donated the copy is in place. A call without a real pair moves no data.

    Args:
      pool: what slots hold, integers or floats: keys or values of one layer `[slots, kv_heads, head_dim]`, their scales
        `[slots, kv_heads]`, or with a block_size of 1 an array that has one entry for each block.
      src: the blocks that are read.
      dst: the blocks that are overwritten.
      block_size: slots in a block.
      backend: None for what suits the platform; `xla`, `triton` (GPU), `mosaic_tpu`, or `interpret` for their kernels
        on a CPU; or names to try in turn. Static under jit.

    Returns:
      The pool.

    Raises:
      ValueError: a shape, dtype or size is wrong; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    _check_pool("pool", pool, block_size)
    _check_pairs(src, dst)
    return dispatch("block_copy", COPY_BACKENDS, backend, pool, src, dst, block_size=block_size)


def block_copy_between(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
    backend: str | Sequence[str] | None = None,
) -> Shaped[Array, " dst_slots *item"]:
    """Copies block `src[i]` of one pool over block `dst[i]` of another, as `block_copy` does within one.

    The pools may differ in their number of slots and in nothing else. A pair copies nothing unless `src[i]` is a
    block of `src_pool` and `dst[i]` one of `dst_pool`; each pool has its own sentinel, its number of blocks.

    Args:
      src_pool: the pool that is read.
      dst_pool: the pool that is written, in place where it is donated.
      src: blocks of `src_pool`.
      dst: blocks of `dst_pool`.
      block_size: slots in a block, of both pools.
      backend: as for `block_copy`.

    Returns:
      `dst_pool` with the copies.

    Raises:
      ValueError: a shape, dtype or size is wrong or the pools differ; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    _check_pool("src_pool", src_pool, block_size)
    _check_pool("dst_pool", dst_pool, block_size)
    item, other = tuple(src_pool.shape[1:]), tuple(dst_pool.shape[1:])
    require(other == item, "dst_pool", f"of src_pool's shape after the slots {item}", other)
    require(dst_pool.dtype == src_pool.dtype, "dst_pool", f"of src_pool's dtype {src_pool.dtype.name}", dst_pool.dtype)
    _check_pairs(src, dst)
    return dispatch(
        "block_copy_between", COPY_BETWEEN_BACKENDS, backend, src_pool, dst_pool, src, dst, block_size=block_size
    )


def fill_blocks(
    pool: Shaped[Array, " slots *item"],
    ids: Int32[Array, " ids"],
    value: float | int,
    *,
    block_size: int,
    backend: str | Sequence[str] | None = None,
) -> Shaped[Array, " slots *item"]:
    """Writes one value all over the blocks `ids` and leaves every other block as it is, bit for bit.

    Zero keeps what a freed block held from whoever gets it next; NaN shows at once whoever reads a freed block.
    Ids may repeat. An id that is negative or not below `slots / block_size` fills nothing.

    Args:
      pool: as for `block_copy`.
      ids: the blocks to fill.
      value: a number that the pool's dtype holds exactly, or NaN where it has one. Static under jit.
      block_size: slots in a block.
      backend: as for `block_copy`.

    Returns:
      The pool, in place where it is donated.

    Raises:
      ValueError: a shape, dtype or size is wrong, or the pool cannot hold `value`; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    _check_pool("pool", pool, block_size)
    _check_ids("ids", ids)
    with np.errstate(all="ignore"):  # what does not fit is told below, by name
        stored = np.asarray(value, np.float64).astype(pool.dtype)
    exact = np.array_equal(stored.astype(np.float64), np.float64(value), equal_nan=True)
    require(exact, "value", f"a number that {pool.dtype.name} holds exactly", value)
    return dispatch("fill_blocks", FILL_BACKENDS, backend, pool, ids, jnp.asarray(stored), block_size=block_size)


def _check_pool(argument: str, pool: jax.Array, block_size: int) -> None:
    require(block_size >= 1, "block_size", "at least 1", block_size)
    require(pool.ndim >= 1 and pool.size > 0, argument, "[slots, ...] with no empty axis", f"shape {pool.shape}")
    real = jnp.issubdtype(pool.dtype, jnp.integer) or jnp.issubdtype(pool.dtype, jnp.floating)
    require(real, argument, "of integers or floats", pool.dtype.name)
    slots = pool.shape[0]
    require(slots <= MAX_INT32, argument, f"of at most {MAX_INT32} slots, since slot ids are int32", slots)
    require(slots % block_size == 0, argument, f"of whole blocks of {block_size} slots", f"{slots} slots")


def _check_pairs(src: jax.Array, dst: jax.Array) -> None:
    _check_ids("src", src)
    _check_ids("dst", dst)
    require(dst.shape == src.shape, "dst", f"of src's length {src.shape[0]}", dst.shape[0])


def _check_ids(argument: str, ids: jax.Array) -> None:
    require(ids.ndim == 1, argument, "a list of block ids", f"shape {tuple(ids.shape)}")
    require(ids.dtype == jnp.int32, argument, "of dtype int32", ids.dtype.name)
