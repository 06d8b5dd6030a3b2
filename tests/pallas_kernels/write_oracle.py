"""Writes of keys and values in plain Python, and what a write must agree with it in, bit for bit."""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.shapes import WriteCase

DROPPED = (-1, -96, -97, 96, 97, 2**30, 2**31 - 1, -(2**31))
LIMIT = {"float8_e4m3fn": 464.0, "float8_e5m2": 61440.0, "int8": 127.5, "bfloat16": 3.3961775292304957e38}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0, "bfloat16": float(jnp.finfo("bfloat16").max)}


def random_bits(rng, shape, dtype):
    """Any bits at all: NaN payloads, infinities and denormals are data to a write."""
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def make_write(case: WriteCase, seed: int):
    """Pools, new rows, and slots of which the first and the last are among those stored."""
    rng = np.random.default_rng(seed)
    pool_dtype, new_dtype = jnp.dtype(case.pool_dtype), jnp.dtype(case.new_dtype)
    pools = [random_bits(rng, (case.slots, case.kv_heads, case.head_dim), pool_dtype) for _ in range(2)]
    shape = (case.tokens, case.kv_heads, case.head_dim)
    news = [(8 * rng.standard_normal(shape)).astype(new_dtype) for _ in range(2)]
    if pool_dtype == new_dtype:
        news = [random_bits(rng, shape, new_dtype) for _ in range(2)]
    slots = np.array([0, case.slots - 1, *rng.permutation(np.arange(1, case.slots - 1))], np.int32)[: case.tokens]
    dropped = rng.permutation(np.arange(2, case.tokens - 1))[: len(DROPPED)]  # neither the first nor the last
    slots[dropped] = DROPPED
    return pools, news, slots


def written(pool, new, slots):
    pool = pool.copy()
    for token, slot in enumerate(slots):
        if 0 <= slot < len(pool):
            pool[slot] = new[token].astype(pool.dtype)
    return pool


def bits(array):
    return np.asarray(array).view(np.uint8)


def check_plain(write, case):
    """A write without scales stores the named slots and no other bit."""
    pools, news, slots = make_write(case, 0)
    out = write(*map(jnp.asarray, (*pools, *news, slots)))
    assert int(out.dropped) == len(DROPPED) - 1  # one of them is the mark of padding
    assert int(out.clipped) == 0
    assert out.k_scale is out.v_scale is None
    for pool, new, result in zip(pools, news, out[:2], strict=True):
        assert result.dtype == case.pool_dtype
        np.testing.assert_array_equal(bits(result), bits(written(pool, new, slots)))


@functools.cache
def stored_values(dtype):
    """Every finite value of a dtype from the least to the greatest, as float64, and its bits."""
    itemsize = np.dtype(dtype).itemsize
    bits = np.arange(2 ** (8 * itemsize), dtype=f"uint{8 * itemsize}")
    with np.errstate(invalid="ignore"):  # those that are NaN
        values = bits.view(dtype).astype(np.float64)
    kept = np.isfinite(values) & (np.abs(values) <= LARGEST[dtype]) & ~((values == 0) & np.signbit(values))
    order = np.argsort(values[kept])
    return values[kept][order], bits[kept][order]


def nearest(scaled, dtype):
    """The nearest stored values, found among all of them: ties to even, the largest past the end."""
    values, bits = stored_values(dtype)
    above = np.clip(np.searchsorted(values, scaled), 1, len(values) - 1)
    low, high = scaled - values[above - 1], values[above] - scaled
    upper = (high < low) | ((high == low) & (bits[above] % 2 == 0))
    return values[np.where(upper, above, above - 1)]


def with_scales(case, seed):
    pools, news, slots = make_write(case, seed)
    rng = np.random.default_rng(seed)
    shape = {"layer": (), "head": (case.kv_heads,), "token": (case.slots, case.kv_heads)}[case.scales]
    # New values have a deviation of 8, so some of them lie past the largest.
    bound = min(LARGEST[case.pool_dtype], 1e30)
    scales = [np.asarray(rng.uniform(8, 20, shape) / bound, np.float32) for _ in range(2)]
    return pools, news, slots, scales


def check_quantised(write, case):
    """A write with scales stores the nearest values, counts those that do not fit, and changes no other bit."""
    pools, news, slots, scales = with_scales(case, 0)
    kept = [t for t, slot in enumerate(slots) if 0 <= slot < case.slots]
    k_scale, v_scale = map(jnp.asarray, scales)
    out = write(*map(jnp.asarray, (*pools, *news, slots)), k_scale=k_scale, v_scale=v_scale)
    clipped = 0
    for pool, new, scale, result, result_scale in zip(pools, news, scales, out[:2], out[2:4], strict=True):
        new, result, result_scale = new.astype(np.float32), np.asarray(result), np.asarray(result_scale)
        assert result.dtype == case.pool_dtype
        np.testing.assert_array_equal(bits(np.delete(result, slots[kept], 0)), bits(np.delete(pool, slots[kept], 0)))
        if case.scales == "token":
            np.testing.assert_array_equal(np.delete(result_scale, slots[kept], 0), np.delete(scale, slots[kept], 0))
            expected_scale = np.abs(new[kept]).max(axis=2) / np.float32(LARGEST[case.pool_dtype])
            np.testing.assert_allclose(result_scale[slots[kept]], expected_scale, rtol=1e-6)
            used = result_scale[slots[kept]][..., None]
        else:
            np.testing.assert_array_equal(result_scale, scale)
            used = np.broadcast_to(scale, case.kv_heads)[:, None]
        scaled = (new[kept] / used).astype(np.float64)
        # Compilers divide by a quotient in one way or another, so what lies between two values may go to either.
        either = [nearest(scaled * (1 + sign * 3e-7), case.pool_dtype) for sign in (-1, 1)]
        stored = result[slots[kept]].astype(np.float64)
        assert np.all((stored == either[0]) | (stored == either[1]))
        clipped += int(np.sum(np.abs(scaled) > LIMIT[case.pool_dtype])) if case.scales != "token" else 0
    assert int(out.clipped) == clipped
    assert clipped > 0 or case.scales == "token" or case.pool_dtype == "bfloat16"
    assert int(out.dropped) == len(DROPPED) - 1
