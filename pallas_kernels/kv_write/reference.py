"""Writing keys and values in XLA: one scatter per pool, in place where the pool is donated."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@jax.jit
def kv_write(
    k_pool: Float[Array, "slots kv_heads head_dim"],
    v_pool: Float[Array, "slots kv_heads head_dim"],
    k_new: Float[Array, "tokens kv_heads head_dim"],
    v_new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
) -> tuple[Float[Array, "slots kv_heads head_dim"], Float[Array, "slots kv_heads head_dim"]]:
    """See `pallas_kernels.kv_write.kv_write`."""
    # A negative index would count from the end of the pool.
    slots = jnp.where(slots < 0, k_pool.shape[0], slots)
    return _write(k_pool, k_new, slots), _write(v_pool, v_new, slots)


def _write(
    pool: Float[Array, "slots kv_heads head_dim"],
    new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
) -> Float[Array, "slots kv_heads head_dim"]:
    new = new.astype(pool.dtype)
    if pool.dtype in (jnp.float32, jnp.float16):
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
    return jax.lax.bitcast_convert_type(jnp.where((writer < tokens)[:, None, None], written, kept), pool.dtype)
