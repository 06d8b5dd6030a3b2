"""Blocks of a whole cache: every layer, keys and values alike, and no byte besides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.calibration import Calibration
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import block_bytes, copy_blocks, copy_blocks_between, fill_blocks
from paxkv.kv_format import scheme
from tests.paxkv.oracles.caches import cache_of, keys_and_values
from tests.paxkv.oracles.lockstep import ints

LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 3, 4, 2, 5


def random_cache(seed, num_blocks, dtype="float32"):
    """A cache of which every array differs from every other, among NaN."""
    rng = np.random.default_rng(seed)
    shape = (num_blocks * BLOCK_SIZE, KV_HEADS, HEAD_DIM)

    def pool():
        values = rng.integers(-8, 8, shape).astype(dtype)
        return jnp.asarray(np.where(rng.random(shape) < 0.3, np.array(np.nan, dtype), values))

    return cache_of(*([pool() for _ in range(LAYERS)] for _ in range(2)))


def blocks(cache):
    """Of each layer's keys, then of each layer's values: numbers[num_blocks, block_size, kv_heads, head_dim]."""
    return [
        np.asarray(pool).astype(np.float64).reshape(-1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        for pool in keys_and_values(cache)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_reaches_keys_and_values_of_every_layer(dtype):
    cache = random_cache(0, 7, dtype)
    out = copy_blocks(cache, ints([0, 2, 7, 3]), ints([2, 5, 1, 7]), BLOCK_SIZE)
    for before, after in zip(blocks(cache), blocks(out), strict=True):
        np.testing.assert_array_equal(after, before[[0, 1, 0, 3, 4, 2, 6]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_leave_for_a_larger_pool_and_come_back_elsewhere_are_the_same(dtype):
    device, host = random_cache(0, 5, dtype), random_cache(1, 9, dtype)
    swapped = copy_blocks_between(device, host, ints([4, 0, 5]), ints([8, 6, 1]), BLOCK_SIZE)
    for source, before, after in zip(blocks(device), blocks(host), blocks(swapped), strict=True):
        np.testing.assert_array_equal(after, np.stack([*before[:6], source[0], before[7], source[4]]))
    emptied = fill_blocks(device, ints([4, 0, 5]), np.nan, BLOCK_SIZE)
    back = copy_blocks_between(swapped, emptied, ints([8, 9, 6]), ints([1, 2, 4]), BLOCK_SIZE)
    for source, after in zip(blocks(device), blocks(back), strict=True):
        expected = np.stack([np.full_like(source[0], np.nan), source[4], source[2], source[3], source[0]])
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("value", [0, np.nan])
def test_a_fill_reaches_every_layer_and_no_other_block(value):
    cache = random_cache(0, 5)
    out = fill_blocks(cache, ints([3, 5, 1, -1]), value, BLOCK_SIZE)
    for before, after in zip(blocks(cache), blocks(out), strict=True):
        before[[1, 3]] = value
        np.testing.assert_array_equal(after, before)


def test_all_layers_are_copied_in_place_and_the_list_is_laid_out_once():
    cache = jax.eval_shape(lambda: init_kv_cache(LAYERS, 512 * BLOCK_SIZE, KV_HEADS, HEAD_DIM, scheme("f32")))

    def steps(cache, src, dst):
        return jax.lax.scan(lambda cache, _: (copy_blocks(cache, src, dst, BLOCK_SIZE), None), cache, length=3)[0]

    ids = jax.ShapeDtypeStruct((8,), "int32")
    memory = jax.jit(steps, donate_argnums=0).lower(cache, ids, ids).compile().memory_analysis()
    cache_bytes = sum(pool.size * 4 for pool in keys_and_values(cache))
    assert memory.alias_size_in_bytes == cache_bytes + 4 * LAYERS  # and the counts of what was clipped
    assert memory.temp_size_in_bytes < cache_bytes / 50


@pytest.mark.parametrize(
    "name", ["bf16", "f32", "e4m3_none", "int8_token_head", "e4m3_block_head", "int4_token_head_k", "int8_head_v"]
)
def test_a_block_takes_the_bytes_that_capacity_counts(name):
    """32 layers of 8 heads of 128 numbers, keys and values: 131,072 bytes a token in bfloat16, 2 MiB a block of 16."""
    fmt = dataclasses.replace(scheme(name), precise_layers=(3, 5))
    calibration = Calibration(*(np.ones((32, 8, 128), np.float32) for _ in range(2)), 1, rotated=False)
    cache = jax.eval_shape(lambda: init_kv_cache(32, 160, 8, 128, fmt, block_size=16, calibration=calibration))
    assert block_bytes(cache, 16) == fmt.shape(32, 8, 128).block_bytes(16)
    if name in ("bf16", "f32"):
        assert block_bytes(jax.eval_shape(lambda: init_kv_cache(32, 160, 8, 128, scheme("bf16"))), 16) == 2_097_152
