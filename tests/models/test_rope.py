"""Angles by hand, and the scalings by other formulas than the implementation's."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeScaling
from models.rope import rope, rope_frequencies
from tests.models.decoder_oracle import frequency


def turned(x, position, theta=1e4, scaling=None):
    return np.asarray(rope(jnp.asarray(x)[None, None], jnp.array([position], jnp.int32), theta, scaling))[0, 0]


def test_pairs_are_half_a_head_apart_and_angles_exact_at_the_last_trained_position():
    # theta^(-2i/head_dim) by hand: 1, 1/10, 1/100, 1/1000.
    angles = np.array([1023, 102.3, 10.23, 1.023])
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    np.testing.assert_allclose(turned([*ones, *zeros], 1023), [*np.cos(angles), *np.sin(angles)], atol=1e-5)
    np.testing.assert_allclose(turned([*zeros, *ones], 1023), [*-np.sin(angles), *np.cos(angles)], atol=1e-5)


def test_linear_scaling_is_a_slower_position():
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)
    np.testing.assert_allclose(turned(x, 56, scaling=RopeScaling("linear", 8.0)), turned(x, 7), atol=1e-6)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama3_scaling_slows_long_waves_only(head_dim, factor):
    """The two published scalings, against the rule in wavelengths as the release states it."""
    theta, scaling = 500_000.0, RopeScaling("llama3", factor)
    found = rope_frequencies(head_dim, theta, scaling)
    np.testing.assert_allclose(
        found, [frequency(head_dim, i, theta, scaling) for i in range(head_dim // 2)], rtol=1e-12
    )
    slower = rope_frequencies(head_dim, theta) / found
    wavelengths = 2 * np.pi / rope_frequencies(head_dim, theta)
    kept, slowed = wavelengths < 8192 / 4, wavelengths > 8192
    assert min(kept.sum(), slowed.sum(), (~kept & ~slowed).sum()) >= 3
    np.testing.assert_allclose(slower[kept], 1, rtol=1e-12)
    np.testing.assert_allclose(slower[slowed], factor, rtol=1e-12)
    between = slower[~kept & ~slowed]
    assert (np.diff([1, *between, factor]) > 0).all()


def test_angles_are_float32_whatever_is_turned():
    # At position 1023 an angle in bfloat16 would be off by radians.
    x = jnp.asarray(np.random.default_rng(0).normal(size=16), jnp.bfloat16)
    short, full = turned(x, 1023), turned(np.asarray(x, np.float32), 1023)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_array_equal(short, full.astype(jnp.bfloat16))
