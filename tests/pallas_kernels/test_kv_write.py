"""Writes against plain Python, bit for bit."""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import BACKENDS
from pallas_kernels.kv_write.shapes import CASES, WriteCase

DROPPED = (-1, -96, -97, 96, 97, 2**30, 2**31 - 1, -(2**31))


def random_bits(rng, shape, dtype):
    """Any bits at all: NaN payloads, infinities and denormals are data to a write."""
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def make_write(case: WriteCase, seed: int):
    rng = np.random.default_rng(seed)
    pool_dtype, new_dtype = jnp.dtype(case.pool_dtype), jnp.dtype(case.new_dtype)
    pools = [random_bits(rng, (case.slots, case.kv_heads, case.head_dim), pool_dtype) for _ in range(2)]
    shape = (case.tokens, case.kv_heads, case.head_dim)
    news = [(8 * rng.standard_normal(shape)).astype(new_dtype) for _ in range(2)]
    if pool_dtype == new_dtype:
        news = [random_bits(rng, shape, new_dtype) for _ in range(2)]
    slots = rng.permutation(case.slots)[: case.tokens].astype(np.int32)
    slots[0], slots[1] = 0, case.slots - 1
    dropped = rng.permutation(np.arange(2, case.tokens))[: len(DROPPED)]
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_the_named_slots_and_no_other_bit(case, backend):
    pools, news, slots = make_write(case, 0)
    out = kv_write(*map(jnp.asarray, (*pools, *news, slots)), backend=backend)
    for pool, new, result in zip(pools, news, out, strict=True):
        assert result.dtype == case.pool_dtype
        np.testing.assert_array_equal(bits(result), bits(written(pool, new, slots)))


def test_nothing_is_written_when_every_slot_is_out_of_range():
    case = CASES[0]
    pools, news, slots = make_write(case, 1)
    slots[:] = np.resize(np.array(DROPPED), case.tokens)
    out = kv_write(*map(jnp.asarray, (*pools, *news, slots)))
    for pool, result in zip(pools, out, strict=True):
        np.testing.assert_array_equal(bits(result), bits(pool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_donated_pool_is_written_in_place(dtype):
    pool = jax.ShapeDtypeStruct((8192, 2, 32), dtype)
    new = jax.ShapeDtypeStruct((4, 2, 32), dtype)
    slots = jax.ShapeDtypeStruct((4,), "int32")
    compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(pool, pool, new, new, slots).compile()
    memory, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


def test_float32_is_rounded_to_nearest_even_in_bfloat16():
    half = 2.0**-8  # half a unit in the last place of bfloat16 at 1
    values = np.array([1 + half, 1 + 3 * half, 1 + half * 1.001, 1 - half / 2], np.float32)
    new = jnp.asarray(values.reshape(4, 1, 1))
    pool = jnp.zeros((4, 1, 1), jnp.bfloat16)
    k, _ = kv_write(pool, pool, new, new, jnp.arange(4, dtype=jnp.int32))
    expected = np.array([1, 1 + 4 * half, 1 + 2 * half, 1], np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(k)[:, 0, 0], expected)


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("pool", "new"),
    [
        ("float16", "float32"),
        ("float16", "bfloat16"),
        ("float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("int8", "float32"),
        ("float32", "int32"),
    ],
)
def test_a_conversion_that_could_overflow_or_needs_a_scale_is_refused(pool, new):
    pools, news = array(4, 1, 8, dtype=pool), array(2, 1, 8, dtype=new)
    with pytest.raises(ValueError, match=rf"k_new must be of a dtype that {pool} slots can take .* got {new}"):
        inspect.unwrap(kv_write)(pools, pools, news, news, array(2, dtype=jnp.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pool": array(4, 8)}, r"k_pool must be \[slots, kv_heads, head_dim\], got shape \(4, 8\)"),
        ({"v_pool": array(5, 1, 8)}, r"v_pool must be of k_pool's shape \(4, 1, 8\), got shape \(5, 1, 8\)"),
        ({"k_new": array(3, 1, 8)}, r"k_new must be of shape .*\(2, 1, 8\), got \(3, 1, 8\)"),
        ({"v_new": array(2, 2, 8)}, r"v_new must be of shape .*\(2, 1, 8\), got \(2, 2, 8\)"),
        ({"slots": array(2)}, r"slots must be of dtype int32, got float32"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(change, message):
    right = {"k_pool": array(4, 1, 8), "v_pool": array(4, 1, 8), "k_new": array(2, 1, 8), "v_new": array(2, 1, 8)}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(kv_write)(**(right | {"slots": array(2, dtype=jnp.int32)} | change))
