"""Writes against plain Python, bit for bit."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import BACKENDS
from pallas_kernels.kv_write.shapes import CASES
from tests.pallas_kernels.ways import ways
from tests.pallas_kernels.write_oracle import DROPPED, bits, check_plain, check_quantised, make_write

PLAIN = tuple(case for case in CASES if case.scales == "none" and not case.offline)
QUANTISED = tuple(case for case in CASES if case.scales != "none" and not case.offline)


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def ints(*values):
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("way", ways(BACKENDS))
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_writes_the_named_slots_and_no_other_bit(case, way):
    with way.open():
        check_plain(functools.partial(kv_write, backend=way.backend), case)


def test_nothing_is_written_when_every_slot_is_out_of_range():
    case = CASES[0]
    pools, news, slots = make_write(case, 1)
    slots[:] = np.resize(np.array(DROPPED), case.tokens)
    out = kv_write(*map(jnp.asarray, (*pools, *news, slots)))
    for pool, result in zip(pools, out[:2], strict=True):
        np.testing.assert_array_equal(bits(result), bits(pool))


@pytest.mark.parametrize("way", ways(BACKENDS))
@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: case.name)
def test_quantised_values_are_the_nearest_and_no_other_bit_changes(case, way):
    with way.open():
        check_quantised(functools.partial(kv_write, backend=way.backend), case)


@pytest.mark.parametrize(
    ("dtype", "values", "expected", "clipped"),
    [
        # The cast alone would make NaN of 465 and of -1e9 in e4m3fn, and infinity of 70,000 in e5m2.
        ("float8_e4m3fn", [448, 449, 464, 465, -1e9, np.inf, 447], [448, 448, 448, 448, -448, 448, 448], 3),
        ("float8_e5m2", [57344, 57345, 70000, -70000, -np.inf], [57344, 57344, 57344, -57344, -57344], 3),
        # Symmetric, and ties to even.
        ("int8", [127, 127.5, -127.5, -128, 0.5, 1.5, -2.5, 126.5], [127, 127, -127, -127, 0, 2, -2, 126], 1),
        ("float8_e4m3fn", [17, 19, 2.0**-10, 3 * 2.0**-10, -(2.0**-9)], [16, 20, 0, 2.0**-8, -(2.0**-9)], 0),
    ],
)
def test_values_saturate_round_to_even_and_are_counted(dtype, values, expected, clipped):
    values = np.array(values, np.float32).reshape(1, 1, -1)
    pool, one = jnp.zeros(values.shape, dtype), jnp.ones((), jnp.float32)
    written = kv_write(pool, pool, jnp.asarray(values), jnp.zeros_like(values), ints(0), k_scale=one, v_scale=one)
    np.testing.assert_array_equal(np.asarray(written.k).astype(np.float64).ravel(), expected)
    assert int(written.clipped) == clipped


def test_values_of_tokens_that_are_not_stored_are_not_counted():
    pool, one = jnp.zeros((4, 1, 2), jnp.int8), jnp.ones(1, jnp.float32)
    new = jnp.full((3, 1, 2), 1000.0)
    written = kv_write(pool, pool, new, new, ints(4, -1, 2), k_scale=one, v_scale=one)
    assert (int(written.clipped), int(written.dropped)) == (4, 1)


def test_a_token_of_zeros_has_scale_zero_and_reads_zero():
    pool, scales = jnp.ones((2, 2, 4), jnp.int8), jnp.ones((2, 2), jnp.float32)
    new = jnp.stack([jnp.zeros((1, 4)), jnp.full((1, 4), 1e-38)], axis=1)  # 1e-38 / 127 is no normal number
    written = kv_write(pool, pool, new, new, ints(1), k_scale=scales, v_scale=scales)
    np.testing.assert_array_equal(written.k[1], 0)
    np.testing.assert_array_equal(written.k_scale, [[1, 1], [0, 0]])
    assert int(written.clipped) == 0


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_head_alone(dtype, bad):
    pool, scales = jnp.ones((2, 2, 4), dtype), jnp.ones((2, 2), jnp.float32)
    new = np.ones((1, 2, 4), np.float32)
    new[0, 1, 2] = bad
    written = kv_write(pool, pool, jnp.asarray(new), jnp.ones_like(new), ints(1), k_scale=scales, v_scale=scales)
    np.testing.assert_array_equal(np.isnan(written.k_scale), [[False, False], [False, True]])
    assert np.all(np.isfinite(written.v_scale))
    assert int(written.clipped) == 1


def test_nan_under_a_given_scale_stays_in_a_float_pool_and_is_counted():
    new, one = jnp.full((1, 1, 2), jnp.nan), jnp.ones((), jnp.float32)
    for dtype, expected in (("float8_e4m3fn", np.nan), ("float8_e5m2", np.nan), ("int8", 0.0)):
        pool = jnp.zeros((1, 1, 2), dtype)
        written = kv_write(pool, pool, new, new, ints(0), k_scale=one, v_scale=one)
        np.testing.assert_array_equal(np.asarray(written.k).astype(np.float64).ravel(), [expected] * 2)
        assert int(written.clipped) == 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_donated_pools_and_scales_are_written_in_place(dtype):
    pool, scale = jax.ShapeDtypeStruct((8192, 2, 32), dtype), jax.ShapeDtypeStruct((8192, 2), "float32")
    new, slots = jax.ShapeDtypeStruct((4, 2, 32), "float32"), jax.ShapeDtypeStruct((4,), "int32")

    def step(k, v, k_scale, v_scale, k_new, v_new, slots):
        return kv_write(k, v, k_new, v_new, slots, k_scale=k_scale, v_scale=v_scale)

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    memory = jitted.lower(pool, pool, scale, scale, new, new, slots).compile().memory_analysis()
    pool_bytes, scale_bytes = pool.size, 4 * scale.size
    assert memory.alias_size_in_bytes == 2 * (pool_bytes + scale_bytes)
    assert memory.temp_size_in_bytes < pool_bytes / 8


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
    k, *_ = kv_write(pool, pool, new, new, jnp.arange(4, dtype=jnp.int32))
    expected = np.array([1, 1 + 4 * half, 1 + 2 * half, 1], np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(k)[:, 0, 0], expected)


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
        ({"k_pool": array(4, 1, 8, dtype=jnp.int32)}, r"k_pool must be of dtype float32 .* or int8, got int32"),
        ({"k_scale": array()}, r"v_scale must be of k_scale's shape \(\), got None"),
        ({"k_scale": array(3)}, r"k_scale must be of shape \(\) \(per layer\), \(1,\) .* or \(4, 1\) .*, got \(3,\)"),
        ({"k_scale": array(), "k_new": array(2, 1, 8, dtype=jnp.int8)}, r"k_new must be of dtype float32 .*, got int8"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(change, message):
    right = {"k_pool": array(4, 1, 8), "v_pool": array(4, 1, 8), "k_new": array(2, 1, 8), "v_new": array(2, 1, 8)}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(kv_write)(**(right | {"slots": array(2, dtype=jnp.int32)} | change))


@pytest.mark.parametrize(("dtype", "heads"), [("bfloat16", 1), ("float8_e4m3fn", 2)])
def test_the_tpu_kernel_leaves_slots_that_share_a_word_to_xla(dtype, heads):
    pool, new = array(8, heads, 128, dtype=dtype), jnp.ones((3, heads, 128), dtype)
    with pytest.raises(NotImplementedError, match=f"slots of whole 32-bit words, .* of {dtype}, got {heads}"):
        kv_write(pool, pool, new, new, ints(1, 8, 3), backend="mosaic_tpu")
    out = kv_write(pool, pool, new, new, ints(1, 8, 3), backend=("mosaic_tpu", "xla"))
    assert np.flatnonzero(np.asarray(out.k, np.float32).any(axis=(1, 2))).tolist() == [1, 3]
