"""Signature, checks and choice of backend of writing keys and values."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Num, Shaped

from pallas_kernels._ragged import CACHED, FLOATS, MAX_INT32, check_array, check_scales, require
from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_write import mosaic_tpu, reference, triton
from pallas_kernels.kv_write.quantise import Quantised, quantise, quantise_by_token

BACKENDS: Mapping[str, Callable[..., tuple[jax.Array, ...]]] = {
    "mosaic_tpu": mosaic_tpu.kv_write,
    "mosaic_tpu_interpret": mosaic_tpu.kv_write_interpreted,
    "triton": triton.kv_write,
    "triton_interpret": functools.partial(triton.kv_write, interpret=True),
    "xla": reference.kv_write,
}


class Written(NamedTuple):
    """The pools of one layer after a write, and what was lost in it."""

    k: Num[Array, "slots kv_heads head_dim"]
    v: Num[Array, "slots kv_heads head_dim"]
    k_scale: Shaped[Array, "..."] | None  # as given, or with the scales of the tokens that were stored
    v_scale: Shaped[Array, "..."] | None
    clipped: Int32[Array, ""]  # values of stored tokens more than half a step past the largest, or no numbers
    dropped: Int32[Array, ""]  # tokens that were not stored and are not padding


def kv_write(
    k_pool: Num[Array, "slots kv_heads head_dim"],
    v_pool: Num[Array, "slots kv_heads head_dim"],
    k_new: Num[Array, "tokens kv_heads head_dim"],
    v_new: Num[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    k_scale: Shaped[Array, "..."] | None = None,
    v_scale: Shaped[Array, "..."] | None = None,
    backend: str | Sequence[str] | None = None,
) -> Written:
    """Stores each token's key and value in its slot and leaves every other slot as it is, bit for bit.

    Inside a jitted function whose pools are donated the write is in place. A padded token carries the number of slots
    and is not stored. Nor is one with any other slot that is negative or not below `slots`, never clamped or
    wrapped to another; it is counted. Two tokens of one call must not share a slot, as either may win.

    Without scales a pool takes values of its own dtype, bit for bit, and converts others if it is at least 16 bits wide
    and reaches as far: to float32 exactly, to bfloat16 rounded to nearest even.

    With scales a pool holds what, times its scale, is nearest to the new values, ties to even. A value past the
    dtype's largest (448 for e4m3fn, 57,344 for e5m2, 127 for int8) is stored as that, with its sign, and counted if it
    lies past it by more than half a step.

    - Given scales, for the layer or for each head, are divided by. A NaN is counted; float pools hold it, int8 holds 0.
    - Scales of each slot and head are written: the largest absolute value over the dtype's largest, so that nothing is
      clipped. They are 0 where all values are 0 (or so small that the scale would be no normal number), which
      reads as 0. A head with a NaN or an infinity, which is counted, gets the scale NaN, so that whoever reads it sees.

    Args:
      k_pool: keys of one layer, f32, bf16, f16, f8e4m3fn, f8e5m2 or int8; blocks and ranges are runs of its slots.
      v_pool: values, of k_pool's shape.
      k_new: new keys, after RoPE.
      v_new: new values.
      slots: where each token goes.
      k_scale: scale of stored keys, f32, bf16 or f8e8m0fnu (which has no 0, and 2**-126 in its place): [] for the layer
        and [kv_heads], which are given, or [slots, kv_heads], which are written.
      v_scale: that of stored values, of k_scale's shape.
      backend: None for what suits the platform; `xla`, `triton` (GPU), `mosaic_tpu`, or `interpret` for their kernels
        on a CPU; or names to try in turn. Static under jit.

    Returns:
      The pools, the scales, and the counts.

    Raises:
      ValueError: a shape or dtype is wrong or a conversion is refused; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    check_array("slots", slots, ("tokens",), ("int32",))
    num_slots, *head_shape = k_pool.shape
    pools, news = {"k_pool": k_pool, "v_pool": v_pool}, {"k_new": k_new, "v_new": v_new}
    for (pool_name, pool), (new_name, new) in zip(pools.items(), news.items(), strict=True):
        check_array(pool_name, pool, ("slots", "kv_heads", "head_dim"), CACHED)
        require(pool.shape == k_pool.shape, pool_name, f"of k_pool's shape {k_pool.shape}", f"shape {pool.shape}")
        expected = (slots.shape[0], *head_shape)
        require(new.shape == expected, new_name, f"of shape [tokens, kv_heads, head_dim] = {expected}", new.shape)
        if k_scale is None:
            require(
                _converts(new.dtype, pool.dtype),
                new_name,
                f"of a dtype that {pool.dtype.name} slots can take without a scale (the same, or one whose range 16 "
                f"bits or more cover)",
                new.dtype.name,
            )
        else:
            check_array(new_name, new, ("tokens", "kv_heads", "head_dim"), FLOATS)
    require(num_slots <= MAX_INT32, "k_pool", f"of at most {MAX_INT32} slots, since slot ids are int32", num_slots)
    check_scales("k_scale", k_scale, k_pool.shape[:-1])
    check_scales("v_scale", v_scale, k_pool.shape[:-1])
    shapes = [None if scales is None else tuple(scales.shape) for scales in (k_scale, v_scale)]
    require(shapes[0] == shapes[1], "v_scale", f"of k_scale's shape {shapes[0]}", shapes[1])

    pools = (k_pool, v_pool)
    if k_scale is not None and v_scale is not None and k_scale.ndim == 2:
        pools = (*pools, k_scale, v_scale)
    rows, places, clipped, dropped = _prepare(k_pool, v_pool, k_new, v_new, slots, k_scale, v_scale)
    stored = store_rows(pools, rows, places, backend=backend)
    if len(stored) == 4:
        k_scale, v_scale = stored[2:]
    return Written(stored[0], stored[1], k_scale, v_scale, clipped, dropped)


def store_rows(
    pools: tuple[Shaped[Array, "slots ..."], ...],
    rows: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int32[Array, " tokens"],
    *,
    backend: str | Sequence[str] | None = None,
) -> tuple[Shaped[Array, "slots ..."], ...]:
    """Stores row t of each of `rows` in slot `slots[t]` of its pool, bit for bit, as `kv_write` does once it quantised.

    Args:
      pools: what slots hold: keys, values, scales of slots.
      rows: what is stored in each, of the pool's dtype.
      slots: from 0; the number of slots stores nothing. No two tokens may share one.
      backend: as for `kv_write`.

    Returns:
      The pools, in place where they are donated.

    Raises:
      ValueError: a shape or dtype is wrong; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    check_array("slots", slots, ("tokens",), ("int32",))
    for i, (pool, row) in enumerate(zip(pools, rows, strict=True)):
        expected = (slots.shape[0], *pool.shape[1:])
        require(tuple(row.shape) == expected, f"rows[{i}]", f"of shape {expected}", tuple(row.shape))
        require(row.dtype == pool.dtype, f"rows[{i}]", f"of its pool's dtype {pool.dtype.name}", row.dtype.name)
        require(pool.shape[0] == pools[0].shape[0], f"pools[{i}]", f"of {pools[0].shape[0]} slots", pool.shape[0])
    return dispatch("kv_write", BACKENDS, backend, pools, rows, slots)


@jax.jit
def _prepare(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    slots: Int32[Array, " tokens"],
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], Int32[Array, " tokens"], Int32[Array, ""], Int32[Array, ""]]:
    """What is stored in each pool, in which slots (one past the end: nowhere), and the counts of what is lost."""
    num_slots = k_pool.shape[0]
    stores = (slots >= 0) & (slots < num_slots)
    places = jnp.where(stores, slots, num_slots)
    dropped = jnp.sum(~stores & (slots != num_slots), dtype=jnp.int32)
    if k_scale is None or v_scale is None:
        return (k_new.astype(k_pool.dtype), v_new.astype(v_pool.dtype)), places, jnp.int32(0), dropped
    k = _quantise(k_new, k_pool.dtype, k_scale)
    v = _quantise(v_new, v_pool.dtype, v_scale)
    scales = () if k.scale is None or v.scale is None else (k.scale, v.scale)
    clipped = jnp.sum(jnp.where(stores, k.clipped + v.clipped, 0), dtype=jnp.int32)
    return (k.stored, v.stored, *scales), places, clipped, dropped


def _quantise(new: jax.Array, dtype: jnp.dtype, scale: jax.Array) -> Quantised:
    if scale.ndim == 2:
        return quantise_by_token(new, dtype, scale.dtype)
    return quantise(new, dtype, scale.astype(jnp.float32))


def _converts(new: jnp.dtype, pool: jnp.dtype) -> bool:
    """Whether values of dtype `new` may be stored as `pool` without a scale: see `kv_write`."""
    if new == pool:
        return True
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(pool, jnp.floating)):
        return False
    return pool.itemsize >= 2 and jnp.finfo(pool).maxexp >= jnp.finfo(new).maxexp
