"""Copying and filling blocks in XLA, in place where the pool is donated and for next to nothing if no id is real.

XLA on a CPU scatters bfloat16 and the 8-bit floats by way of a wider copy of the pool. These are chosen as bits
instead, slot by slot, in one pass over the pool that needs no room. Everything else costs what the list is long.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped


@jax.jit(static_argnames="block_size")
def block_copy(
    pool: Shaped[Array, " slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
) -> Shaped[Array, " slots *item"]:
    """See `pallas_kernels.block_copy.block_copy`."""
    return block_copy_between(pool, pool, src, dst, block_size=block_size)


@jax.jit(static_argnames="block_size")
def block_copy_between(
    src_pool: Shaped[Array, " src_slots *item"],
    dst_pool: Shaped[Array, " dst_slots *item"],
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    *,
    block_size: int,
) -> Shaped[Array, " dst_slots *item"]:
    """See `pallas_kernels.block_copy.block_copy_between`."""
    if src.size == 0:
        return dst_pool
    num_blocks = dst_pool.shape[0] // block_size
    real = _is_block(src, src_pool.shape[0] // block_size) & _is_block(dst, num_blocks)
    dst = jnp.where(real, dst, num_blocks)

    def copy(dst_pool: jax.Array) -> jax.Array:
        return _store(dst_pool, _read(src_pool, src, block_size), dst)

    return jax.lax.cond(jnp.any(real), copy, _keep, dst_pool)


@jax.jit(static_argnames="block_size")
def fill_blocks(
    pool: Shaped[Array, " slots *item"],
    ids: Int32[Array, " ids"],
    value: Shaped[Array, ""],
    *,
    block_size: int,
) -> Shaped[Array, " slots *item"]:
    """See `pallas_kernels.block_copy.fill_blocks`; `value` has the pool's dtype."""
    num_blocks = pool.shape[0] // block_size
    real = _is_block(ids, num_blocks)
    ids = jnp.where(real, ids, num_blocks)
    block = jnp.full((block_size, *pool.shape[1:]), value)

    def at_once(pool: jax.Array) -> jax.Array:
        return _as_blocks(pool, block_size).at[ids].set(block, mode="drop").reshape(pool.shape)

    def one_by_one(pool: jax.Array) -> jax.Array:
        """A scatter on a CPU would lay out one block of values for each place of the list, real or not."""
        places = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, ids.size)
        listed = jnp.zeros_like(ids).at[places].set(ids, mode="drop")

        def fill(i: jax.Array, pool: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(pool, block, listed[i] * block_size, axis=0)

        return jax.lax.fori_loop(0, jnp.sum(real, dtype=jnp.int32), fill, pool)

    def select(pool: jax.Array) -> jax.Array:
        filled = jnp.zeros(num_blocks, jnp.bool).at[ids].set(True, mode="drop")
        return _choose(jnp.repeat(filled, block_size), _bits(value), pool)

    def write(pool: jax.Array) -> jax.Array:
        cpu = one_by_one if _scatters_in_place(pool.dtype) else select
        return jax.lax.platform_dependent(pool, cpu=cpu, default=at_once)

    return jax.lax.cond(jnp.any(real), write, _keep, pool)


def _store(
    pool: Shaped[Array, " slots *item"],
    bits: Shaped[Array, "pairs block_size *item"],
    dst: Int32[Array, " pairs"],
) -> Shaped[Array, " slots *item"]:
    """The blocks `bits` into the blocks `dst`; of several with one destination the last is stored."""
    pairs, block_size = bits.shape[:2]
    num_blocks = pool.shape[0] // block_size
    places = jnp.arange(pairs, dtype=jnp.int32)
    # The greatest place is the last one on every platform, while a scatter of blocks lets any of them win.
    writer = jnp.full(num_blocks, -1, jnp.int32).at[dst].max(places, mode="drop")

    def scatter(pool: jax.Array) -> jax.Array:
        last = writer.at[dst].get(mode="fill", fill_value=-1) == places
        blocks = jax.lax.bitcast_convert_type(bits, pool.dtype)
        stored = _as_blocks(pool, block_size).at[jnp.where(last, dst, num_blocks)].set(blocks, mode="drop")
        return stored.reshape(pool.shape)

    def select(pool: jax.Array) -> jax.Array:
        slot_writer = jnp.repeat(writer, block_size)
        offset = jnp.arange(pool.shape[0], dtype=jnp.int32) % block_size
        written = bits.at[slot_writer, offset].get(mode="clip")
        return _choose(slot_writer >= 0, written, pool)

    def select_apart(pool: jax.Array) -> jax.Array:
        # A branch of its own, though one of them is real: XLA would fuse the reading of the blocks into the write
        # that overwrites them, and copy the pool so as to read it still.
        return jax.lax.cond(jnp.any(dst < num_blocks), select, _keep, pool)

    if _scatters_in_place(pool.dtype):
        return scatter(pool)
    return jax.lax.platform_dependent(pool, cpu=select_apart, default=scatter)


def _read(
    pool: Shaped[Array, " slots *item"], src: Int32[Array, " pairs"], block_size: int
) -> Shaped[Array, "pairs block_size *item"]:
    """The bits of the blocks `src`; those of any block where an id is out of range, as nobody stores them."""
    return _as_blocks(_bits(pool), block_size).at[src].get(mode="clip")


def _choose(
    where: Bool[Array, " slots"], bits: Shaped[Array, "..."], pool: Shaped[Array, " slots *item"]
) -> Shaped[Array, " slots *item"]:
    where = where.reshape(-1, *(1,) * (pool.ndim - 1))
    return jax.lax.bitcast_convert_type(jnp.where(where, bits, _bits(pool)), pool.dtype)


def _scatters_in_place(dtype: jnp.dtype) -> bool:
    """Whether XLA on a CPU does."""
    return not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4 or dtype == jnp.float16


def _bits(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def _as_blocks(pool: Shaped[Array, " slots *item"], block_size: int) -> Shaped[Array, "num_blocks block_size *item"]:
    return pool.reshape(-1, block_size, *pool.shape[1:])


def _is_block(ids: Int32[Array, " ids"], num_blocks: int) -> Bool[Array, " ids"]:
    return (ids >= 0) & (ids < num_blocks)


def _keep(pool: Shaped[Array, " slots *item"]) -> Shaped[Array, " slots *item"]:
    return pool
