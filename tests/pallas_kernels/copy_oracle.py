"""Copies and fills of blocks in plain NumPy, and what an operation must agree with it in, bit for bit."""

import math

import jax.numpy as jnp
import numpy as np

OUT_OF_RANGE = (-1, -(2**31), 2**30, 2**31 - 1)
EXTRA_BLOCKS = 5  # of the other pool, so that ids of one pool are none of the other's


def random_bits(rng, case, num_blocks):
    """Any bits at all: NaN payloads, infinities and denormals are data to a copy."""
    shape = (num_blocks * case.block_size, *case.item, np.dtype(case.dtype).itemsize)
    return rng.integers(0, 256, shape, np.uint8).view(case.dtype)[..., 0]


def random_numbers(rng, case, num_blocks):
    return rng.integers(-8, 8, (num_blocks * case.block_size, *case.item)).astype(case.dtype)


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same_bits(result, expected):
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(bits(np.asarray(result)), bits(expected))


def copied(src_pool, dst_pool, src, dst, block_size):
    """Each pair in turn, all of them reading the blocks of before."""
    out = dst_pool.copy()
    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
        if 0 <= s < len(src_pool) // block_size and 0 <= d < len(dst_pool) // block_size:
            out[d * block_size : (d + 1) * block_size] = src_pool[s * block_size : (s + 1) * block_size]
    return out


def filled(pool, ids, value, block_size):
    out = pool.copy()
    for block in ids.tolist():
        if 0 <= block < len(pool) // block_size:
            out[block * block_size : (block + 1) * block_size] = np.asarray(value).astype(pool.dtype)
    return out


def hard_pairs(case):
    """A chain, a cycle, a block onto itself, one to many, many to one, the first and last block, and empty places.

    One of these comes last for a destination, which is written all the same.
    """
    last, sentinel = case.num_blocks - 1, case.num_blocks
    pairs = [(0, 1), (1, 2), (sentinel, 0), (4, 5), (5, 4), (0, sentinel), (3, 3), (0, last), (3, last)]
    pairs += [(sentinel, last), (-1, 6), (6, -1), *zip(OUT_OF_RANGE, OUT_OF_RANGE[::-1], strict=True)]
    return np.array(pairs, np.int32).T


def hard_lists(case):
    """Those pairs both ways, a shuffle of all blocks, a list that is nearly empty and one that is."""
    src, dst = hard_pairs(case)
    shuffled = np.resize(np.random.default_rng(0).permutation(case.num_blocks), src.size).astype(np.int32)
    nobody = np.full_like(src, case.num_blocks + EXTRA_BLOCKS)
    far = nobody.copy()
    far[[2, 4, 6]] = (case.num_blocks, 1, case.num_blocks + EXTRA_BLOCKS - 1)
    return (src, dst), (shuffled, np.roll(shuffled, 1)), (far, far), (nobody, nobody), (dst, src)


def check_copies(copy, between, case, pool_of=random_bits):
    """Copies within a pool and between two, of one case."""
    rng = np.random.default_rng(0)
    pool, larger = (pool_of(rng, case, case.num_blocks + extra) for extra in (0, EXTRA_BLOCKS))
    for src, dst in hard_lists(case):
        pairs, size = [jnp.asarray(ids) for ids in (src, dst)], case.block_size
        assert_same_bits(copy(jnp.asarray(pool), *pairs, block_size=size), copied(pool, pool, src, dst, size))
        for one, other in ((pool, larger), (larger, pool)):
            out = between(jnp.asarray(one), jnp.asarray(other), *pairs, block_size=size)
            assert_same_bits(out, copied(one, other, src, dst, size))


def check_fills(fill, case, pool_of=random_bits):
    """Fills with one value or another, of one case."""
    pool = pool_of(np.random.default_rng(0), case, case.num_blocks)
    for value in (0, 0.5, math.nan) if case.dtype != "int8" else (0, -3):
        for ids, _ in hard_lists(case):
            out = fill(jnp.asarray(pool), jnp.asarray(ids), value, block_size=case.block_size)
            assert_same_bits(out, filled(pool, ids, value, case.block_size))
