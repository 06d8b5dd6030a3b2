"""Signature, checks and choice of backend of writing keys and values."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._ragged import MAX_INT32, check_array, require
from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_write import reference

BACKENDS: Mapping[str, Callable[..., tuple[jax.Array, jax.Array]]] = {"xla": reference.kv_write}


def kv_write(
    k_pool: Float[Array, "slots kv_heads head_dim"],
    v_pool: Float[Array, "slots kv_heads head_dim"],
    k_new: Float[Array, "tokens kv_heads head_dim"],
    v_new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "slots kv_heads head_dim"], Float[Array, "slots kv_heads head_dim"]]:
    """Stores each token's key and value in its slot and leaves every other slot as it is, bit for bit.

    Inside a jitted function whose pools are donated the write is in place. A token whose slot is negative or not
    below `slots` is not stored, never clamped or wrapped to another: padded tokens carry the number of slots. Two
    tokens of one call must not share a slot, as either may win.

    A pool keeps its dtype. Values of another one are converted if the pool is at least 16 bits wide and reaches as
    far: to float32 exactly, to bfloat16 rounded to nearest even. Conversions that could overflow (bfloat16 or
    float32 into float16) and those into 8 bits, which need a scale, are refused; 8-bit values go into a pool of
    their own dtype.

    Args:
      k_pool: keys of one layer; blocks and ranges alike are runs of its slots.
      v_pool: values, of k_pool's shape.
      k_new: new keys, after RoPE.
      v_new: new values.
      slots: where each token goes.
      backend: None for what suits the platform, a backend's name, or names to try in turn. Static under jit.

    Returns:
      The two pools.

    Raises:
      ValueError: a shape or dtype is wrong or a conversion is refused; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    check_array("slots", slots, ("tokens",), ("int32",))
    num_slots, *head_shape = k_pool.shape
    pools, news = {"k_pool": k_pool, "v_pool": v_pool}, {"k_new": k_new, "v_new": v_new}
    for (pool_name, pool), (new_name, new) in zip(pools.items(), news.items(), strict=True):
        check_array(pool_name, pool, ("slots", "kv_heads", "head_dim"), (pool.dtype.name,))
        require(pool.shape == k_pool.shape, pool_name, f"of k_pool's shape {k_pool.shape}", f"shape {pool.shape}")
        expected = (slots.shape[0], *head_shape)
        require(new.shape == expected, new_name, f"of shape [tokens, kv_heads, head_dim] = {expected}", new.shape)
        require(
            _converts(new.dtype, pool.dtype),
            new_name,
            f"of a dtype that {pool.dtype.name} slots can take (the same, or one whose range 16 bits or more cover; "
            f"quantise or cast it before)",
            new.dtype.name,
        )
    require(num_slots <= MAX_INT32, "k_pool", f"of at most {MAX_INT32} slots, since slot ids are int32", num_slots)
    return dispatch("kv_write", BACKENDS, backend, k_pool, v_pool, k_new, v_new, slots)


def _converts(new: jnp.dtype, pool: jnp.dtype) -> bool:
    """Whether values of dtype `new` may be stored as `pool`: see `kv_write`."""
    if new == pool:
        return True
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(pool, jnp.floating)):
        return False
    return pool.itemsize >= 2 and jnp.finfo(pool).maxexp >= jnp.finfo(new).maxexp
