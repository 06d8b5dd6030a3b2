"""Blocks across four devices: who has which, and what they make of them together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from paxkv.block_tables import BlockTable
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, LayerCache
from paxkv.paged import Paged
from paxkv.split_paged import merge_over, split_blocks
from tests.pallas_kernels.attention_oracle import attend

SHARDS, BLOCK, BLOCKS, HEADS, WIDTH = 4, 4, 24, 2, 8
HERE = BLOCKS // SHARDS
ALONE = Paged(rows=4, max_len=48, block_size=BLOCK, num_blocks=BLOCKS)
LENGTHS = [37, 5, 16, 0]
DEALINGS = ("round_robin", "by_shard")


def on_each(run, everywhere, parted=()):
    """What `run` gives on each device: arguments that all have, and arguments of which each has a part."""
    mesh = jax.make_mesh((SHARDS,), ("kv",), (AxisType.Auto,), devices=jax.devices()[:SHARDS])
    every = jax.shard_map(
        lambda everywhere, parted: jax.tree.map(lambda x: x[None], run(*everywhere, *parted)),
        mesh=mesh, in_specs=(P(), P("kv")), out_specs=P("kv"), check_vma=False,
    )  # fmt: skip
    return jax.tree.map(np.asarray, jax.jit(every)(everywhere, parted))


def home(dealing, block):
    """The device that has a block, and where."""
    return (block % SHARDS, block // SHARDS) if dealing == "round_robin" else divmod(block, HERE)


@functools.cache
def state():
    """Sequences whose blocks lie anywhere."""
    ids = np.full((ALONE.rows, ALONE.blocks_per_seq), BLOCKS, np.int32)
    order, ends = iter(np.random.default_rng(0).permutation(BLOCKS)), [-(-n // BLOCK) for n in LENGTHS]
    for row, end in enumerate(ends):
        ids[row, :end] = [next(order) for _ in range(end)]
    table = BlockTable(jnp.asarray(ids), jnp.zeros(ALONE.rows, jnp.int32), jnp.array(ends, jnp.int32))
    empty = ALONE.init()
    seqs = dataclasses.replace(empty.seqs, lengths=jnp.array(LENGTHS, jnp.int32))
    return dataclasses.replace(empty, seqs=seqs, tables=(table,))


@pytest.mark.parametrize("dealing", DEALINGS)
def test_every_block_and_every_token_has_one_device(dealing):
    memory = split_blocks(ALONE, SHARDS, dealing)
    ids = np.arange(-1, BLOCKS + 6)
    places = np.full((SHARDS, len(ids)), HERE)
    for block in range(BLOCKS):
        shard, place = home(dealing, block)
        places[shard, block + 1] = place
    np.testing.assert_array_equal(on_each(memory.own_blocks, (jnp.asarray(ids, jnp.int32),)), places)

    row, position = (
        np.array(x, np.int32) for x in zip(*((r, p) for r in range(5) for p in (0, 3, 4, 15)), strict=True)
    )
    slots = np.full((SHARDS, len(row)), HERE * BLOCK)
    for token, (r, p) in enumerate(zip(row, position, strict=True)):
        if r < ALONE.rows and p < LENGTHS[r] + -LENGTHS[r] % BLOCK:
            shard, place = home(dealing, int(state().tables[0].ids[r, p // BLOCK]))
            slots[shard, token] = place * BLOCK + p % BLOCK
    found = on_each(memory.slots, (state(), jnp.asarray(row), jnp.asarray(position)))
    np.testing.assert_array_equal(np.where(found < HERE * BLOCK, found, HERE * BLOCK), slots)


def parts_of(dealing, whole):
    """A pool `[blocks, block, ...]` as the devices have it, a part after another: `[slots, ...]`."""
    parts = np.empty((SHARDS, HERE, *whole.shape[1:]), whole.dtype)
    for block in range(BLOCKS):
        parts[home(dealing, block)] = whole[block]
    return parts.reshape(-1, *whole.shape[2:])


ATTENDED = [
    ([1, 1, 1, 0], None, "round_robin"),
    ([1, 1, 1, 0], 6, "by_shard"),
    ([5, 5, 1, 0], None, "by_shard"),
    ([5, 3, 7, 0], 6, "round_robin"),
]


@pytest.mark.parametrize(("q_lens", "window", "dealing"), ATTENDED)
def test_all_devices_together_attend_over_all_blocks(q_lens, window, dealing):
    """Slots in which nothing is stored hold NaN."""
    rng = np.random.default_rng(1)
    keys, values = ([rng.normal(size=(n, HEADS, WIDTH)).astype(np.float32) for n in LENGTHS] for _ in range(2))
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = rng.normal(size=(sum(q_lens) + 1, 2 * HEADS, WIDTH)).astype(np.float32)
    pools = np.full((2, BLOCKS, BLOCK, HEADS, WIDTH), np.nan, np.float32)
    for row, n in enumerate(LENGTHS):
        for p in range(n):
            pools[:, int(state().tables[0].ids[row, p // BLOCK]), p % BLOCK] = keys[row][p], values[row][p]
    memory, most = split_blocks(ALONE, SHARDS, dealing), max(q_lens)

    def run(state, q, cu_q_lens, k, v):
        return memory.attend(state, q, KVPool(k), KVPool(v), cu_q_lens, AttentionSpec(window=window), max_q_len=most)

    given = (state(), jnp.asarray(q), jnp.asarray(cu_q_lens))
    expected = attend(q, keys, values, LENGTHS, cu_q_lens, window=window).out
    for out in on_each(run, given, tuple(jnp.asarray(parts_of(dealing, pool)) for pool in pools)):
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_partial_attentions_merge_by_their_weights():
    rng = np.random.default_rng(2)
    out = rng.normal(size=(SHARDS, 5, HEADS, WIDTH)).astype(np.float32)
    lse = rng.normal(size=(SHARDS, 5, HEADS), scale=4).astype(np.float32)
    lse[1:3, 0], lse[:, 1] = -np.inf, -np.inf  # some devices have seen nothing, or all
    out[1:3, 0], out[:, 1] = 0, 0
    out[2, 3, 1], lse[2, 3, 1], lse[1, 2, 0] = np.nan, np.nan, np.nan
    lse[:, 4] += 200
    with np.errstate(invalid="ignore"):
        weights = np.exp(lse.astype(np.float64) - np.logaddexp.reduce(lse.astype(np.float64)))
    weights[:, 1] = 0
    expected = (weights[..., None] * out).sum(0)
    assert np.isnan(expected).sum() == 2 * WIDTH
    merged = on_each(lambda *own: merge_over("kv", *(x[0] for x in own)), (), (jnp.asarray(out), jnp.asarray(lse)))
    for one in merged:
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dealing", DEALINGS)
def test_a_block_is_copied_to_where_it_is_needed_bit_for_bit(dealing):
    memory = split_blocks(ALONE, SHARDS, dealing)
    whole = np.random.default_rng(3).integers(0, 2**32, (BLOCKS, BLOCK, HEADS, WIDTH), np.uint32).view(np.float32)
    source, destination = np.array([0, 5, 9, 24, 7]), np.array([5, 6, 2, 24, 23])  # 5 is read before it is written
    expected = whole.copy()
    expected[destination[destination < BLOCKS]] = whole[source[source < BLOCKS]]

    def run(source, destination, data):
        pool = KVPool(data)
        copied = memory.copy(KVCache((LayerCache(pool, pool, jnp.zeros(1, jnp.int32)),)), source, destination)
        return copied.layers[0].k.data

    ids = tuple(jnp.asarray(x, jnp.int32) for x in (source, destination))
    found = on_each(run, ids, (jnp.asarray(parts_of(dealing, whole)),))
    np.testing.assert_array_equal(
        found.reshape(-1, HEADS, WIDTH).view(np.uint32), parts_of(dealing, expected).view(np.uint32)
    )
