"""Signed 4-bit integers, two in a byte: element i of the first half of a row beside element i of its second half.

Halves rather than neighbours, so that unpacking is a concatenation and not an interleaving.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8, UInt8


def pack_int4(values: Int8[Array, "*rows width"]) -> UInt8[Array, "*rows half_width"]:
    """Packs integers of -8 to 7; `width` must be even."""
    first, second = jnp.split(jax.lax.bitcast_convert_type(values, jnp.uint8) & 15, 2, axis=-1)
    return first | (second << 4)


def unpack_int4(packed: UInt8[Array, "*rows half_width"]) -> Int8[Array, "*rows width"]:
    """The integers that `pack_int4` packed."""
    shifted = jnp.concatenate([packed << 4, packed & 0xF0], axis=-1)
    return jax.lax.bitcast_convert_type(shifted, jnp.int8) >> 4
