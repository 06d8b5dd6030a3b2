"""New keys and values in the form in which a quantised cache holds them: what is stored times its scale."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num, Shaped

from pallas_kernels.int4 import pack_int4

FLOAT32 = jnp.dtype("float32")


class Quantised(NamedTuple):
    """Rows ready to be stored."""

    stored: Num[Array, "tokens kv_heads width"]  # of the pool's dtype; 4-bit integers packed, half as wide
    scale: Shaped[Array, "tokens kv_heads"] | None  # to be stored beside them, or None where it was given
    clipped: Int32[Array, " tokens"]  # values of each token that were too large, or no numbers


def largest(dtype: jnp.dtype) -> float:
    """The largest value of a stored dtype: 448 for e4m3fn, 57,344 for e5m2, 127 for int8, which is kept symmetric."""
    return float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else float(jnp.iinfo(dtype).max)


def clip_limit(dtype: jnp.dtype) -> float:
    """The largest absolute value that is rounded to the largest and not clipped: half a step past it.

    464 for e4m3fn, 61,440 for e5m2, 127.5 for int8. A head's largest value over its own scale may come out a rounding
    step past the largest; nothing is lost there that rounding would not lose anywhere else.
    """
    top = largest(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return top + 0.5
    half_step = 2.0 ** (math.floor(math.log2(top)) - jnp.finfo(dtype).nmant - 1)
    return min(top + half_step, float(jnp.finfo(jnp.float32).max))


def quantise(
    new: Float[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype, scale: Float32[Array, "..."]
) -> Quantised:
    """Divides by a given scale; see `kv_write` for what becomes of values that do not fit.

    Args:
      new: keys or values.
      dtype: of what is stored.
      scale: [], [kv_heads], [tokens, kv_heads], or [kv_heads, head_dim] as [1, kv_heads, head_dim].
    """
    if scale.ndim < 3:
        scale = jnp.broadcast_to(scale, new.shape[:2])[..., None]
    scaled = new.astype(jnp.float32) / scale
    lost = ~(jnp.abs(scaled) <= clip_limit(dtype))
    return Quantised(_round(scaled, dtype), None, jnp.sum(lost, axis=(1, 2), dtype=jnp.int32))


def quantise_by_token(
    new: Float[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype, scale_dtype: jnp.dtype = FLOAT32
) -> Quantised:
    """Divides each token and head by a scale of its own, so that its largest value becomes the dtype's largest."""
    new = new.astype(jnp.float32)
    lost = ~jnp.isfinite(new)
    scale = scale_up(jnp.max(jnp.abs(new), axis=2) / largest(dtype), scale_dtype)
    wide = scale.astype(jnp.float32)
    # Below the smallest normal number a device may divide by 0 instead.
    zero = wide < jnp.finfo(jnp.float32).tiny
    scaled = jnp.where(zero[..., None], 0, new / jnp.where(zero, 1, wide)[..., None])
    scale = jnp.where(jnp.any(lost, axis=2), jnp.asarray(jnp.nan, scale_dtype), scale)
    return Quantised(_round(scaled, dtype), scale, jnp.sum(lost, axis=(1, 2), dtype=jnp.int32))


def scale_up(scale: Float32[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """The least number of `dtype` that is not below a scale, so that rounding a scale never clips what it scales.

    0 where float32 holds no normal number of that size; powers of two (f8e8m0fnu) have no 0 and give 2**-126.
    """
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)
    if dtype == jnp.float32:
        return scale
    if dtype == jnp.float8_e8m0fnu:
        scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    dropped = {"bfloat16": 16, "float8_e8m0fnu": 23}[dtype.name]  # bits of a float32's mantissa
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    bits = (bits + jnp.uint32(2**dropped - 1)) >> dropped << dropped
    return jnp.where(jnp.isfinite(scale), jax.lax.bitcast_convert_type(bits, jnp.float32), scale).astype(dtype)


def _round(scaled: Float32[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype) -> Num[Array, "tokens kv_heads width"]:
    """To the nearest stored value, ties to even, and never past the largest."""
    bound = largest(dtype)
    scaled = jnp.clip(scaled, -bound, bound)
    if jnp.issubdtype(dtype, jnp.floating):
        return scaled.astype(dtype)
    whole = jnp.where(jnp.isnan(scaled), 0, jax.lax.round(scaled, jax.lax.RoundingMethod.TO_NEAREST_EVEN))
    return pack_int4(whole.astype(jnp.int8)) if dtype == jnp.int4 else whole.astype(dtype)
