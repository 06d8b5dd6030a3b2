"""Rotary position embeddings, and the ways to slow them down for longer contexts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from models.config import RopeScaling


def rope(
    x: Float[Array, "tokens heads head_dim"],
    positions: Int32[Array, " tokens"],
    theta: float,
    scaling: RopeScaling | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Turns the pairs (i, i + head_dim/2) of every head by `position * frequency[i]` radians, in float32.

    The half-split order of pairs, as Hugging Face's Llama has it (Su et al., arXiv:2104.09864, section 3.4).

    Args:
      x: queries or keys.
      positions: of the tokens, in their own sequences.
      theta: base of the frequencies.
      scaling: how they are slowed down; None for not at all.

    Returns:
      `x` turned, in its own dtype.
    """
    frequencies = jnp.asarray(rope_frequencies(x.shape[-1], theta, scaling), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float64[np.ndarray, " half_head_dim"]:
    """Radians per position of each pair: `theta^(-2i/head_dim)`, slowed down as `scaling` says."""
    half = head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_len * frequencies / (2 * math.pi)  # over the context of the first training
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
