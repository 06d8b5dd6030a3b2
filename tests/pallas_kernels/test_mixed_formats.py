"""Keys and values of different dtypes and scales: attention equals that over what they stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.int4 import pack_int4, unpack_int4
from pallas_kernels.paged_attention import paged_attention

BLOCKS, BLOCK, HEADS, WIDTH, GROUP = 6, 16, 2, 32, 2
TABLES = np.array([[4, 1, 0], [2, 5, 3]], np.int32)
KV_LENS, CU_Q_LENS = np.array([37, 20], np.int32), np.array([0, 1, 6], np.int32)
BATCH = TABLES, KV_LENS, CU_Q_LENS
SCALES = {
    "none": None,
    "layer": (),
    "head": (HEADS,),
    "block": (BLOCKS, HEADS),
    "token": (BLOCKS, BLOCK, HEADS),
}
# Dtype and scales of keys, then of values.
FORMATS = [
    ("float8_e4m3fn", "block", "float32", "none"),
    ("int8", "token", "float8_e5m2", "layer"),
    ("bfloat16", "none", "int8", "block"),
    ("uint8", "token", "uint8", "head"),
    ("float8_e4m3fn", "head", "uint8", "block"),
]


@functools.cache
def queries():
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, HEADS * GROUP, WIDTH)), jnp.float32)


def stored(dtype, scales, scale_dtype, seed):
    """A pool, its scales, and in float64 what they stand for."""
    rng = np.random.default_rng(seed)
    whole = dtype in ("int8", "uint8")
    values = (
        rng.integers(-7, 8, (BLOCKS, BLOCK, HEADS, WIDTH)) * (18 if dtype == "int8" else 1)
        if whole
        else 4 * rng.normal(size=(BLOCKS, BLOCK, HEADS, WIDTH))
    )
    data = (
        pack_int4(jnp.asarray(values, jnp.int8)) if dtype == "uint8" else jnp.asarray(values, jnp.float32).astype(dtype)
    )
    means = np.asarray(unpack_int4(data) if dtype == "uint8" else data).astype(np.float64)
    shape = SCALES[scales]
    if shape is None:
        return data, None, np.asarray(means)
    # Powers of two, which every dtype of scales holds.
    scale = 2.0 ** rng.integers(-5, -1, shape) if dtype == "int8" else 2.0 ** rng.integers(-3, 1, shape)
    by_slot = scale[:, None] if scales == "block" else scale
    return (
        data,
        jnp.asarray(scale, jnp.float32).astype(scale_dtype),
        np.asarray(means) * np.broadcast_to(by_slot, means.shape[:-1])[..., None],
    )


def expected(k, v):
    """Full attention of each query in float64."""
    out = []
    for row, table in enumerate(TABLES):
        keys, values = (x[table].reshape(-1, HEADS, WIDTH) for x in (k, v))
        count = CU_Q_LENS[row + 1] - CU_Q_LENS[row]
        for i, q in enumerate(np.asarray(queries(), np.float64)[CU_Q_LENS[row] : CU_Q_LENS[row + 1]]):
            seen = KV_LENS[row] - count + i + 1
            for head, vector in enumerate(q):
                scores = keys[:seen, head // GROUP] @ vector * WIDTH**-0.5
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ values[:seen, head // GROUP])
    return np.array(out).reshape(-1, HEADS * GROUP, WIDTH)


@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize(("k_dtype", "k_scales", "v_dtype", "v_scales"), FORMATS)
def test_every_tensor_has_its_own_dtype_and_scales(k_dtype, k_scales, v_dtype, v_scales, scale_dtype):
    (k, k_scale, keys), (v, v_scale, values) = (
        stored(dtype, scales, scale_dtype, seed)
        for seed, (dtype, scales) in enumerate([(k_dtype, k_scales), (v_dtype, v_scales)])
    )
    backends = ["xla"] if "uint8" in (k_dtype, v_dtype) else ["xla", "triton_interpret"]
    for backend in backends:
        out = paged_attention(
            queries(), k, v, *map(jnp.asarray, BATCH), k_scale=k_scale, v_scale=v_scale, max_q_len=5, backend=backend
        )
        np.testing.assert_allclose(out, expected(keys, values), rtol=0, atol=3e-5 * np.abs(values).max())


def test_ranges_read_them_too():
    (k, k_scale, keys), (v, v_scale, values) = (
        stored("uint8", "token", "bfloat16", 0),
        stored("int8", "head", "float32", 1),
    )
    in_order = [np.asarray(x)[TABLES].reshape(-1, *x.shape[2:]) for x in (k, v, k_scale)]
    out = contiguous_attention(
        queries(),
        *map(jnp.asarray, in_order[:2]),
        jnp.array([0, 3 * BLOCK], jnp.int32),
        *map(jnp.asarray, BATCH[1:]),
        k_scale=jnp.asarray(in_order[2]),
        v_scale=v_scale,
        backend="xla",
    )
    np.testing.assert_allclose(out, expected(keys, values), rtol=0, atol=3e-5 * np.abs(values).max())


@pytest.mark.parametrize("backend", ["triton_interpret", "mosaic_tpu_interpret"])
def test_kernels_that_read_no_packed_integers_say_so(backend):
    (k, k_scale, _), (v, v_scale, _) = stored("uint8", "token", "float32", 0), stored("uint8", "head", "float32", 1)
    with pytest.raises(NotImplementedError, match="packed 4-bit integers"):
        paged_attention(queries(), k, v, *map(jnp.asarray, BATCH), k_scale=k_scale, v_scale=v_scale, backend=backend)


def test_keys_and_values_of_two_dtypes_are_refused_on_a_tpu():
    (k, k_scale, _), (v, v_scale, _) = stored("int8", "head", "float32", 0), stored("bfloat16", "none", "float32", 1)
    with pytest.raises(NotImplementedError, match="keys and values of one dtype"):
        paged_attention(
            queries(),
            k,
            v,
            *map(jnp.asarray, BATCH),
            k_scale=k_scale,
            v_scale=v_scale,
            backend="mosaic_tpu_interpret",
        )


def test_packing_keeps_every_integer():
    values = jnp.asarray(np.stack(np.meshgrid(*[np.arange(-8, 8)] * 2, indexing="ij"), -1).reshape(-1, 2), jnp.int8)
    packed = jax.jit(pack_int4)(values)
    assert packed.shape == (256, 1)
    assert len(np.unique(packed)) == 256
    np.testing.assert_array_equal(unpack_int4(packed), values)
