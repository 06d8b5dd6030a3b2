"""Storing rows in XLA: one scatter per pool, in place where the pool is donated."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


@jax.jit
def kv_write(
    pools: tuple[Shaped[Array, "slots ..."], ...],
    rows: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int32[Array, " tokens"],
) -> tuple[Shaped[Array, "slots ..."], ...]:
    """Stores row t of each of `rows` in slot `slots[t]` of its pool; a slot past the end stores nothing.

    Args:
      pools: keys, values, and where tokens have scales of their own, those of keys and of values.
      rows: what is stored in each, of the pool's dtype.
      slots: in `[0, slots]`.

    Returns:
      The pools.
    """
    return tuple(_write(pool, new, slots) for pool, new in zip(pools, rows, strict=True))


def _write(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    in_place_on_cpu = not jnp.issubdtype(pool.dtype, jnp.floating) or pool.dtype in (jnp.float32, jnp.float16)
    if in_place_on_cpu:
        return _scatter(pool, new, slots)
    return jax.lax.platform_dependent(pool, new, slots, cpu=_select, default=_scatter)


def _scatter(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    return pool.at[slots].set(new, mode="drop")


def _select(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """The same write, slot by slot: XLA on a CPU scatters into these dtypes by way of a float32 copy of the pool.

    Compared and chosen as bits the pool is updated in place, and a slot that keeps its value is not even stored.
    """
    bits = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    tokens = new.shape[0]
    writer = jnp.full(pool.shape[0], tokens, jnp.int32).at[slots].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    written = jax.lax.bitcast_convert_type(new, bits).at[writer].get(mode="clip")
    kept = jax.lax.bitcast_convert_type(pool, bits)
    chosen = jnp.expand_dims(writer < tokens, tuple(range(1, pool.ndim)))
    return jax.lax.bitcast_convert_type(jnp.where(chosen, written, kept), pool.dtype)
