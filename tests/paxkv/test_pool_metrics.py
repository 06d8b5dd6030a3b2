import collections
import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_pool import give_back, init_block_pool, retain
from paxkv.block_tables import BlockTable
from paxkv.lifecycle import end_copies
from paxkv.memory import Ask
from paxkv.paged import Paged
from paxkv.pool_metrics import (
    init_lifetimes,
    observe_lifetimes,
    page_groups,
    pool_metrics,
    run_lengths,
    usage,
)
from paxkv.prefix_cache import PrefixCache

CACHED = Paged(rows=3, max_len=32, block_size=4, num_blocks=10, cache=PrefixCache())
PLAIN = dataclasses.replace(CACHED, cache=None)


def state_with(references=(), cached=(), pins=(), memory=CACHED):
    """A state in which blocks have these references and contents: `references` and `pins` list a block for each."""
    state = memory.init()
    pool = retain(init_block_pool(memory.num_blocks), ints(*references, *pins))
    state = dataclasses.replace(state, pool=pool)
    if memory.cache is None:
        return state
    records = state.contents.records
    for content, block in enumerate(cached, 1):
        records = records.at[block, 0].set(content)
    counts = jnp.zeros(memory.num_blocks, jnp.int32).at[ints(*pins)].add(1)
    return dataclasses.replace(state, contents=dataclasses.replace(state.contents, records=records), pins=counts)


def ints(*values):
    return jnp.array(values, jnp.int32)


def with_tables(*rows, memory=PLAIN, first=0):
    width = memory.blocks_per_seq
    ids = [[*row, *[memory.num_blocks] * (width - len(row))] for row in rows]
    table = BlockTable(ints(*ids), jnp.full(len(rows), first, jnp.int32), ints(*map(len, rows)))
    return dataclasses.replace(memory.init(), tables=(table,))


def test_the_ends_of_a_pending_copy_are_shared_with_nobody():
    memory = dataclasses.replace(PLAIN, forks=True)
    state, *_ = jax.jit(memory.admit)(memory.init(), Ask(*ints(6, 6, 6)))
    append = jax.jit(memory.append, static_argnums=2)
    state, _ = append(state, ints(6, 0, 0), 6)
    state, *_ = jax.jit(memory.fork)(state, jnp.int32(0), jnp.int32(6), jnp.int32(7))
    state, _ = append(state, ints(0, 1, 0), 6)
    assert state.tables[0].ids[:2, :2].tolist() == [[0, 1], [0, 2]]
    for now in (state, jax.jit(functools.partial(end_copies, memory))(state)):
        found = pool_metrics(now)
        assert (int(found.held), int(found.shared), int(found.saved)) == (3, 1, 1)


def test_blocks_are_counted_by_what_they_are_used_for():
    found = pool_metrics(state_with(references=[0, 1, 1, 1, 4], cached=[1, 2, 3], pins=[4, 2]))
    assert {name: int(n) for name, n in vars(found).items()} == {
        "free": 6,
        "held": 4,
        "cached": 3,
        "cached_free": 1,
        "shared": 2,
        "pinned": 2,
        "saved": 3,
    }


def test_a_pool_without_a_cache_has_nothing_cached():
    found = pool_metrics(state_with(references=[0, 0, 7], memory=PLAIN))
    assert [int(n) for n in (found.free, found.held, found.cached, found.pinned, found.saved)] == [8, 2, 0, 0, 1]


@pytest.mark.parametrize(("held", "share"), [(0, 0.0), (5, 0.5), (10, 1.0)])
def test_usage_is_the_share_of_blocks_held_cached_free_ones_left_out(held, share):
    assert float(usage(state_with(references=range(held), cached=[9]))) == share


@pytest.mark.parametrize(
    ("rows", "bins"),
    [
        ([[]], [0, 0, 0, 0]),
        ([[4]], [1, 0, 0, 0]),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], [0, 0, 0, 1]),
        ([[3, 2, 1]], [3, 0, 0, 0]),
        ([[1, 2, 4, 5, 6], [7, 0]], [2, 2, 0, 0]),
        ([[5, 6], [7, 8]], [0, 2, 0, 0]),  # a stretch does not go on in the next row
        ([[2, 3, 4, 5]], [0, 0, 1, 0]),
    ],
)
def test_stretches_of_consecutive_blocks(rows, bins):
    assert run_lengths(with_tables(*rows)).tolist() == bins


def test_stretches_agree_with_a_walk_through_each_row():
    draw = random.Random(1)
    for _ in range(20):
        rows = [[draw.randrange(10) for _ in range(draw.randrange(9))] for _ in range(3)]
        counts = collections.Counter()
        for row in rows:
            length = 0
            for block, following in zip(row, [*row[1:], None][: len(row)], strict=True):
                length += 1
                if following != block + 1:
                    counts[length.bit_length() - 1] += 1
                    length = 0
        assert run_lengths(with_tables(*rows)).tolist() == [counts[b] for b in range(4)]


def test_blocks_that_left_the_window_are_in_no_stretch():
    state = with_tables([10, 10, 5, 6], first=2)
    assert run_lengths(state).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("references", "cached", "size", "pinned", "needed"),
    [
        ([], [], 4, 0, 0),
        ([], [1, 5, 9], 4, 3, 1),  # a cached block each keeps three groups of pages
        ([1, 5], [9], 4, 3, 1),
        ([0, 1, 2, 3], [3], 4, 1, 1),
        ([0, 4], [1, 2, 3], 4, 2, 2),
        ([], [1, 5, 9], 1, 3, 3),
        ([9], [], 16, 1, 1),
    ],
)
def test_page_groups_that_are_pinned_and_that_would_do(references, cached, size, pinned, needed):
    found = page_groups(state_with(references, cached), size)
    assert (int(found.pinned), int(found.needed)) == (pinned, needed)
    assert int(found.used_blocks) == len({*references, *cached})


def test_a_group_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks_per_group"):
        page_groups(CACHED.init(), 0)


def test_lifetimes_of_one_block_through_its_uses():
    """Taken at 10, let go at 15, hit at 40, let go at 41, evicted at 141 and held from then on."""
    used, idle, empty = state_with([3], cached=[3]), state_with(cached=[3]), state_with()
    other = state_with([3])
    lives = init_lifetimes(10, jnp.int32(0))
    for before, after, now in [
        (empty, other, 10),
        (other, used, 12),  # published
        (used, idle, 15),
        (idle, used, 40),
        (used, idle, 41),
        (idle, idle, 90),
        (idle, other, 141),
    ]:
        lives = observe_lifetimes(lives, before, after, jnp.int32(now))
    assert binned(lives.held) == {0: 1, 2: 1}  # 1 and 5
    assert binned(lives.idle_until_hit) == {4: 1}  # 25
    assert binned(lives.idle_until_lost) == {6: 1}  # 100
    assert int(lives.since[3]) == 141


def test_lifetimes_agree_with_a_diary_of_each_block():
    draw, rng = random.Random(2), np.random.default_rng(2)
    states = [
        state_with(rng.choice(10, 4, replace=False).tolist(), rng.choice(10, 5, replace=False).tolist())
        for _ in range(12)
    ]
    lives, now = init_lifetimes(10, jnp.int32(0)), 0
    since, wanted = [0] * 10, collections.defaultdict(collections.Counter)
    for before, after in itertools.pairwise(states):
        now += draw.choice([1, 3, 100, 5000])
        held, holds = before.pool.ref_counts.tolist(), after.pool.ref_counts.tolist()
        was, is_ = before.contents.records[:, 0].tolist(), after.contents.records[:, 0].tolist()
        for block in range(10):
            bin_ = max(now - since[block], 1).bit_length() - 1
            if held[block] and not holds[block]:
                wanted["held"][bin_] += 1
            if not held[block] and was[block] and was[block] == is_[block] and holds[block]:
                wanted["idle_until_hit"][bin_] += 1
            if not held[block] and was[block] and was[block] != is_[block]:
                wanted["idle_until_lost"][bin_] += 1
            if bool(held[block]) != bool(holds[block]):
                since[block] = now
        lives = observe_lifetimes(lives, before, after, jnp.int32(now))
    assert all(wanted[name] for name in ("held", "idle_until_hit", "idle_until_lost"))
    for name, bins in wanted.items():
        assert binned(getattr(lives, name)) == bins
    assert lives.since.tolist() == since


def test_blocks_without_a_cache_are_held_but_never_idle():
    held, free = state_with([1], memory=PLAIN), state_with(memory=PLAIN)
    lives = observe_lifetimes(init_lifetimes(10, jnp.int32(0)), held, free, jnp.int32(7))
    lives = observe_lifetimes(lives, free, held, jnp.int32(9))
    assert (binned(lives.held), binned(lives.idle_until_hit), binned(lives.idle_until_lost)) == ({2: 1}, {}, {})


def test_a_row_given_back_is_not_in_the_metrics():
    state = state_with(references=[0, 1, 2])
    pool, ok = give_back(state.pool, ints(0, 1, 2))
    assert ok
    assert int(pool_metrics(dataclasses.replace(state, pool=pool)).held) == 0


def binned(bins):
    return {index: count for index, count in enumerate(np.asarray(bins).tolist()) if count}


def test_all_of_it_runs_inside_a_scan():
    def step(lives, now):
        state = CACHED.init()
        return observe_lifetimes(lives, state, state, now), (pool_metrics(state), run_lengths(state), usage(state))

    _, (found, _, shares) = jax.lax.scan(step, init_lifetimes(10, jnp.int32(0)), jnp.arange(3, dtype=jnp.int32))
    assert found.free.tolist() == [10, 10, 10]
    assert shares.tolist() == [0.0, 0.0, 0.0]
