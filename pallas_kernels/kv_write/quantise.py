"""New keys and values in the form in which a quantised cache holds them: what is stored times its scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num


class Quantised(NamedTuple):
    """Rows ready to be stored."""

    stored: Num[Array, "tokens kv_heads head_dim"]  # of the pool's dtype
    scale: Float32[Array, "tokens kv_heads"] | None  # to be stored beside them, or None where it was given
    clipped: Int32[Array, " tokens"]  # values of each token past the largest that is stored, if by one rounding


def largest(dtype: jnp.dtype) -> float:
    """The largest value of a stored dtype: 448 for e4m3fn, 57,344 for e5m2, 127 for int8, which is kept symmetric."""
    return float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else float(jnp.iinfo(dtype).max)


def quantise(
    new: Float[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype, scale: Float32[Array, "..."]
) -> Quantised:
    """Divides by a given scale, [] or [kv_heads]; see `kv_write` for what becomes of values that do not fit."""
    scaled = new.astype(jnp.float32) / jnp.broadcast_to(scale, new.shape[1:2])[None, :, None]
    lost = ~(jnp.abs(scaled) <= largest(dtype))
    return Quantised(_round(scaled, dtype), None, jnp.sum(lost, axis=(1, 2), dtype=jnp.int32))


def quantise_by_token(new: Float[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype) -> Quantised:
    """Divides each token and head by a scale of its own, so that its largest value becomes the dtype's largest."""
    new = new.astype(jnp.float32)
    lost = ~jnp.isfinite(new)
    scale = jnp.max(jnp.abs(new), axis=2) / largest(dtype)
    # Below the smallest normal number a device may divide by 0 instead.
    zero = scale < jnp.finfo(jnp.float32).tiny
    scaled = jnp.where(zero[..., None], 0, new / jnp.where(zero, 1, scale)[..., None])
    scale = jnp.where(jnp.any(lost, axis=2), jnp.nan, jnp.where(zero, 0, scale))
    return Quantised(_round(scaled, dtype), scale, jnp.sum(lost, axis=(1, 2), dtype=jnp.int32))


def _round(scaled: Float32[Array, "*shape"], dtype: jnp.dtype) -> Num[Array, "*shape"]:
    """To the nearest stored value, ties to even, and never past the largest."""
    bound = largest(dtype)
    scaled = jnp.clip(scaled, -bound, bound)
    if jnp.issubdtype(dtype, jnp.floating):
        return scaled.astype(dtype)
    return jnp.where(jnp.isnan(scaled), 0, jax.lax.round(scaled, jax.lax.RoundingMethod.TO_NEAREST_EVEN)).astype(dtype)
