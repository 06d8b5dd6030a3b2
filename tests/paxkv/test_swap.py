"""Sequences that go to the host and come back: who owns what, what is copied, and that no number is lost."""

import dataclasses
import functools
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from paxkv import block_pool, checks, swap, swap_state
from paxkv.kv_cache import KVCache, copy_blocks, copy_blocks_between
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.windows import Group
from tests.paxkv.oracles.block_manager import Prompt
from tests.paxkv.oracles.jitted import ints
from tests.paxkv.oracles.swapping import SwapOperations, SwappingJittedManager, SwapTwins, drive_swaps

MEMORIES = {
    "shared": Paged(rows=4, max_len=48, block_size=4, num_blocks=10, host_blocks=4, forks=True, cache=PrefixCache()),
    "plain": Paged(rows=4, max_len=13, block_size=3, num_blocks=11, host_blocks=6, lookahead=2, watermark_blocks=1),
    "two groups": Paged(
        rows=3,
        max_len=48,
        block_size=4,
        num_blocks=24,
        host_blocks=12,
        groups=(Group(4), Group(4, window=5)),
        cache=PrefixCache(publish="on_compute", eviction="lfu"),
    ),
}


@functools.cache
def operations(memory: Paged) -> SwapOperations:
    return SwapOperations(memory)


@pytest.mark.parametrize("name", MEMORIES)
def test_both_pools_agree_with_the_oracle(name):
    drive_swaps(SwapTwins(MEMORIES[name], operations(MEMORIES[name])), seed=0, steps=200)


# ---- known situations ----------------------------------------------------------------------------------------------

EIGHT = Paged(rows=4, max_len=64, block_size=8, num_blocks=6, host_blocks=4, forks=True)


class Server:
    """A memory and its operations, by what they answer."""

    def __init__(self, memory: Paged, compiled: SwapOperations | None = None):
        self.memory = memory
        self.manager = SwappingJittedManager(memory, compiled or operations(memory))

    @property
    def state(self):
        return self.manager.state

    def store(self, tokens: int) -> int:
        row, outcome = self.manager.admit(Prompt(tuple(range(tokens))), tokens)
        assert outcome == Outcome.OK
        self.grow({row: tokens - int(self.state.seqs.lengths[row])})
        return row

    def grow(self, counts: dict[int, int]) -> None:
        assert self.manager.append([counts.get(row, 0) for row in range(self.memory.rows)]) == Outcome.OK

    def fork(self, row: int, length: int) -> int:
        child, outcome = self.manager.fork(row, length, length, Prompt(()))
        assert outcome == Outcome.OK
        return child

    def out(self, *rows: int) -> tuple[list[int], int, list]:
        places, outcome, moved = self.manager.swap_out([row in rows for row in range(self.memory.rows)])
        checks.require_invariants(self.memory, self.state)
        return [places[row] for row in rows], outcome, moved

    def back(self, place: int) -> tuple[int, int, list]:
        answer = self.manager.swap_in(place)
        checks.require_invariants(self.memory, self.state)
        return answer

    @property
    def free(self) -> tuple[int, int]:
        """Blocks of the device, and of the host."""
        return int(self.state.pool.num_free), int(self.state.swap.pool.num_free)


@pytest.fixture
def server():
    return Server(EIGHT)


def test_a_block_goes_to_the_host_and_comes_back_and_both_pools_are_as_before(server):
    row = server.store(7)
    assert server.free == (5, 4)
    (place,), outcome, moved = server.out(row)
    assert (outcome, len(moved), server.free) == (Outcome.OK, 1, (6, 3))
    row, outcome, moved = server.back(place)
    assert (row, outcome, len(moved), server.free) == (0, Outcome.OK, 1, (5, 4))
    assert server.state.seqs.lengths.tolist() == [7, 0, 0, 0]


@pytest.mark.parametrize("together", [True, False])
def test_two_forks_of_two_blocks_take_two_host_blocks_and_share_them_when_they_are_back(server, together):
    first = server.store(15)
    second = server.fork(first, 15)
    if together:
        places, outcome, moved = server.out(first, second)
        assert (outcome, len(moved)) == (Outcome.OK, 2)
    else:
        (one,), _, moved = server.out(first)
        assert len(moved) == 2
        (other,), _, moved = server.out(second)
        assert moved == []
        places = [one, other]
    assert server.free == (6, 2)
    assert [len(server.back(place)[2]) for place in places] == [2, 0]
    assert server.free == (4, 4)
    ids = np.asarray(server.state.tables[0].ids)
    np.testing.assert_array_equal(ids[0], ids[1])
    assert server.state.pool.ref_counts[ids[0, :2]].tolist() == [2, 2]


def test_who_comes_back_after_a_fork_has_written_gets_the_block_as_it_was(server):
    first = server.store(15)
    second = server.fork(first, 15)
    (place,), _, _ = server.out(first)
    server.grow({second: 1})  # alone now, into the block that the other shared
    row, outcome, moved = server.back(place)
    assert (outcome, len(moved)) == (Outcome.OK, 1)
    ids = np.asarray(server.state.tables[0].ids)
    assert (ids[row, :2] == ids[second, :2]).tolist() == [True, False]


def test_only_what_changed_goes_to_the_host_again(server):
    row = server.store(20)
    (place,), _, moved = server.out(row)
    assert len(moved) == 3
    row, _, moved = server.back(place)
    assert len(moved) == 3
    server.grow({row: 1})
    last = int(server.state.tables[0].ids[row, 2])
    (place,), _, moved = server.out(row)
    assert [block for block, _ in moved] == [last]
    assert server.free == (6, 1)


def test_a_host_pool_that_is_full_or_too_small_refuses_and_nothing_is_lost(server):
    first, second = server.store(20), server.store(9)
    server.out(first)
    before = jax.tree.leaves(server.state)
    assert server.out(second) == ([EIGHT.rows], Outcome.LATER, [])
    assert server.free == (4, 1)
    for old, new in zip(before, jax.tree.leaves(server.state), strict=True):
        np.testing.assert_array_equal(old, new)
    third = server.store(30)
    before = jax.tree.leaves(server.state)
    assert server.out(second, third)[1] == Outcome.NEVER
    for old, new in zip(before, jax.tree.leaves(server.state), strict=True):
        np.testing.assert_array_equal(old, new)


TIGHT = dataclasses.replace(EIGHT, host_blocks=3)


def play_tight(memory: Paged, compiled: SwapOperations | None = None) -> None:
    server = Server(memory, compiled)
    first = server.store(15)
    second = server.fork(first, 15)
    places, outcome, _ = server.out(first, second)
    assert outcome == Outcome.OK  # two blocks for both
    assert server.manager.discard(places[1]) == Outcome.OK
    first = server.back(places[0])[0]
    other = server.store(15)
    assert server.out(other)[1] == Outcome.OK  # in the third block, and over the copy of one of the first two
    assert server.free == (4, 1)
    assert server.out(first)[1] == Outcome.LATER  # the other copy is still there, but takes up the room that is left


def test_a_copy_that_is_left_on_the_host_takes_room_and_one_for_several_takes_it_once():
    play_tight(TIGHT)


def test_a_sequence_waits_for_blocks_and_for_a_row_and_keeps_the_watermark():
    server = Server(dataclasses.replace(EIGHT, watermark_blocks=1))
    (place,), _, _ = server.out(server.store(9))
    others = [server.store(8) for _ in range(4)]
    assert server.back(place)[1] == Outcome.LATER  # no row
    server.manager.release([False, False, False, True])
    assert server.back(place)[1] == Outcome.OK  # two of three blocks
    (place,), _, _ = server.out(3)
    server.grow({others[0]: 1})
    assert server.back(place)[1] == Outcome.LATER  # two blocks, one of which is kept back
    assert server.free == (2, 2)


def test_it_comes_back_only_with_room_for_its_next_token(server):
    (place,), _, _ = server.out(server.store(16))
    server.store(32)
    assert server.back(place)[1] == Outcome.LATER  # two blocks are free, three are needed for 17 tokens
    server.manager.release([True, False, False, False])
    row = server.back(place)[0]
    assert server.state.seqs.promised[row] == 17


def test_who_fills_the_whole_memory_never_comes_back():
    memory = dataclasses.replace(EIGHT, num_blocks=4)
    server = Server(memory)
    (place,), outcome, _ = server.out(server.store(32))
    assert outcome == Outcome.OK
    assert server.back(place)[1] == Outcome.NEVER
    assert server.manager.discard(place) == Outcome.OK
    assert server.free == (4, 4)


def test_an_aborted_sequence_leaves_the_host(server):
    first = server.store(15)
    second = server.fork(first, 15)
    places, _, _ = server.out(first, second)
    assert server.manager.discard(places[0]) == Outcome.OK
    assert server.free == (6, 2)  # the other still needs them
    assert server.manager.discard(places[0]) == Outcome.DOUBLE_FREE
    assert server.back(places[0])[1] == Outcome.OUT_OF_RANGE
    assert server.manager.discard(places[1]) == Outcome.OK
    assert server.free == (6, 4)
    assert server.back(-1)[1] == server.back(EIGHT.rows)[1] == Outcome.OUT_OF_RANGE


def test_a_free_row_and_one_that_waits_for_its_copy_are_refused_and_reported(server):
    first = server.store(15)
    second = server.fork(first, 15)
    server.grow({second: 1})
    assert server.out(second)[1] == Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.row) == second
    server.manager.copied()
    assert server.out(second)[1] == Outcome.OK
    assert server.out(second)[1] == Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.word) == 1 << Outcome.OUT_OF_RANGE


def test_what_is_still_cached_need_not_come_back():
    server = Server(dataclasses.replace(EIGHT, cache=PrefixCache(), num_blocks=8))
    row = server.store(20)
    server.manager.publish([list(range(20)), [], [], []])
    (place,), _, _ = server.out(row)
    row, _, moved = server.back(place)
    assert len(moved) == 1  # the third block was not full
    assert server.state.tables[0].ids[row, :2].tolist() == [0, 1]


def test_a_parked_sequence_goes_on_publishing_where_it_was():
    """The same tokens, swapped in between or not: the same contents, keys and hits."""
    records = []
    for swapped in (False, True):
        server = Server(dataclasses.replace(EIGHT, cache=PrefixCache(), num_blocks=8))
        row = server.store(20)
        server.manager.publish([list(range(20)), [], [], []])
        if swapped:
            (place,), _, _ = server.out(row)
            row = server.back(place)[0]
        server.grow({row: 5})
        server.manager.publish([list(range(20, 25)), [], [], []])
        table = np.asarray(server.state.tables[0].ids)[row, :3]
        held = np.asarray(server.state.contents.records)[table]
        records.append((held[:, [0, 1, 3, 4, 5, *range(6, 14)]], jax.tree.map(np.asarray, server.state.chains)))
        assert server.manager.admit(Prompt(tuple(range(26))), 26) == (1, Outcome.OK)
        assert int(server.state.seqs.lengths[1]) == 24
    np.testing.assert_array_equal(records[0][0], records[1][0])
    for alone, swapped in zip(jax.tree.leaves(records[0][1]), jax.tree.leaves(records[1][1]), strict=True):
        np.testing.assert_array_equal(alone, swapped)


def test_a_memory_without_host_blocks_pays_nothing_and_says_so():
    memory = dataclasses.replace(EIGHT, host_blocks=0)
    assert memory.init().swap is None
    with pytest.raises(ValueError, match="host_blocks"):
        swap.swap_out(memory, memory.init(), jnp.zeros(4, jnp.bool))
    with pytest.raises(ValueError, match="host_blocks"):
        dataclasses.replace(EIGHT, host_blocks=-1)


BROKEN = {
    "host_references_are_table_entries": lambda swap: {"tables": (put(swap.tables[0], 3, 0, 1),)},
    "host_free_and_used_are_all": lambda swap: {
        "pool": dataclasses.replace(swap.pool, num_free=swap.pool.num_free + 1)
    },
    "parked_places_hold_all_they_stored": lambda swap: {"lengths": swap.lengths.at[0].set(17)},
    "free_places_hold_nothing": lambda swap: {"promised": swap.promised.at[1].set(3)},
    "twins_are_blocks": lambda swap: {"host_twins": swap.host_twins.at[5].set(-1)},
}


def put(table, place: int, column: int, block: int):
    return dataclasses.replace(table, ids=table.ids.at[place, column].set(block))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_of_the_host_is_named(server, name):
    server.out(server.store(15))
    state = server.state
    swap_now = dataclasses.replace(state.swap, **BROKEN[name](state.swap))
    with pytest.raises(checks.InvariantError, match=name):
        checks.require_invariants(EIGHT, dataclasses.replace(state, swap=swap_now))


def test_swaps_are_in_place_and_need_no_more_room_for_larger_pools():
    temporary = []
    for num_blocks in (22_888, 4 * 22_888):
        memory = Paged(rows=64, max_len=4096, block_size=16, num_blocks=num_blocks, host_blocks=num_blocks // 2)

        def step(state, rows, place, memory=memory):
            state, *_, moves_out = swap.swap_out(memory, state, rows)
            state, *_, moves_in = swap.swap_in(memory, state, place)
            return swap.discard(memory, state, place + 1)[0], (moves_out.count, moves_in.count)

        def steps(state, *of, step=step):
            return jax.lax.scan(lambda state, _: step(state, *of), state, length=3)

        state = memory.init()
        lowered = jax.jit(steps, donate_argnums=0).lower(state, jnp.zeros(64, jnp.bool), jnp.int32(0))
        analysis = lowered.compile().memory_analysis()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert analysis.alias_size_in_bytes == state_bytes
        temporary.append(analysis.temp_size_in_bytes)
    # A bit for each block tells which were counted. A table has 65,536 bytes.
    assert temporary[1] - temporary[0] <= 3 * 22_888 // 8 + 1024
    assert temporary[0] < 65_536


# ---- mistakes, each of which the oracle notices ----------------------------------------------------------------------

MUTANTS = []


def mutant(name: str, *mutated: str):
    """Registers a patch of code, the memory that it is tried on, and the operations in which that code runs."""

    def register(apply):
        MUTANTS.append(pytest.param(name, mutated, apply, id=apply.__name__))
        return apply

    return register


@mutant("shared", "swap_out")
def copies_what_is_on_the_host_already(patch):
    patch.setattr(swap, "twins_on_host", lambda state, ids: jnp.full_like(ids, state.device_twins.shape[0]))


@mutant("shared", "append", "append_one", "swap_in")
def forgets_that_a_taken_block_is_written(patch):
    patch.setattr(swap_state, "part_twins", lambda state, ids: state)


@mutant("plain", "append", "append_one")
def forgets_that_a_last_block_is_written(patch):
    patch.setattr(swap_state, "part_written", lambda state, *of: state)


@mutant("shared", "append", "append_one")
def looks_for_the_written_block_where_the_row_ends(patch):
    right = swap_state.part_written
    patch.setattr(swap_state, "part_written", lambda s, g, t, lengths, grows: right(s, g, t, lengths + 1, grows))


@mutant("shared", "swap_in")
def trusts_a_name_that_is_not_returned(patch):
    def one_sided(state, ids):
        return state.device_twins.at[ids].get(mode="fill", fill_value=state.host_twins.shape[0])

    patch.setattr(swap, "twins_on_device", one_sided)


@mutant("shared", "swap_in")
def relies_on_free_blocks_that_are_not_cached(patch):
    patch.setattr(swap, "is_free", lambda pool, ids: jnp.zeros(ids.shape, jnp.bool))


@mutant("shared", "swap_in")
def copies_back_what_is_cached(patch):
    patch.setattr(swap, "prefix_cache", types.SimpleNamespace(content_of=lambda contents, ids: jnp.zeros_like(ids)))


@mutant("shared", "swap_in")
def takes_cached_blocks_without_a_reference(patch):
    patch.setattr(swap, "retain", lambda pool, ids, *, distinct: pool)


@mutant("shared", "swap_in", "discard")
def keeps_the_host_blocks_of_who_left(patch):
    patch.setattr(swap, "give_back", lambda pool, ids, to_back, *, distinct: (pool, jnp.bool(True)))


@mutant("shared", "swap_in", "discard")
def writes_over_the_newest_copy_first(patch):
    right = block_pool.give_back
    patch.setattr(swap, "give_back", lambda pool, ids, to_back, *, distinct: right(pool, ids, None, distinct=distinct))


@mutant("plain", "swap_out")
def swaps_blocks_that_hold_nothing_yet(patch):
    right = swap.blocks_for
    patch.setattr(swap, "blocks_for", lambda tokens, size: right(tokens, size) + 1)


@mutant("tight", "swap_out")
def counts_a_shared_block_for_each_of_its_rows(patch):
    right = swap._count_blocks

    def one_by_one(memory, state, swap_now, rows):
        each = [right(memory, state, swap_now, rows & (jnp.arange(memory.rows) == row)) for row in range(memory.rows)]
        return sum(blocks for blocks, _ in each), sum(fresh for _, fresh in each)

    patch.setattr(swap, "_count_blocks", one_by_one)


@mutant("tight", "swap_out")
def counts_free_copies_as_if_they_took_no_room(patch):
    patch.setattr(swap, "is_free", lambda pool, ids: jnp.zeros(ids.shape, jnp.bool))


@mutant("shared", "swap_out")
def keeps_the_rows_of_who_left(patch):
    patch.setattr(Paged, "release", lambda self, state, rows: state)


@mutant("plain", "swap_in")
def ignores_what_was_promised_to_others(patch):
    patch.setattr(Paged, "owed", lambda self, state: jnp.int32(0))


@mutant("plain", "swap_in")
def asks_for_no_room_beyond_what_is_stored(patch):
    patch.setattr(Paged, "most_held", lambda self, tokens, first: jnp.zeros_like(first))


@mutant("plain", "swap_in")
def uses_the_watermark_up(patch):
    right = swap.swap_in
    patch.setattr(swap, "swap_in", lambda memory, *of: right(dataclasses.replace(memory, watermark_blocks=0), *of))


@mutant("shared", "swap_out")
def parks_without_the_chain(patch):
    right = swap.swap_out

    def unchained(memory, state, rows):
        state, *rest = right(memory, state, rows)
        bare = dataclasses.replace(state.swap, chains=jax.tree.map(jnp.zeros_like, state.swap.chains))
        return dataclasses.replace(state, swap=bare), *rest

    patch.setattr(swap, "swap_out", unchained)


@mutant("two groups", "swap_out")
def forgets_where_the_window_begins(patch):
    right = swap.begin_row
    patch.setattr(swap, "begin_row", lambda table, row, ids, first, *of: right(table, row, ids, 0 * first, *of))


@mutant("two groups", "swap_in")
def gives_the_second_group_the_blocks_of_the_first(patch):
    right = swap._by_group
    patch.setattr(swap, "_by_group", lambda tables, entries: [right(tables, entries)[0]] * len(tables))


@pytest.mark.parametrize(("name", "mutated", "apply"), MUTANTS)
def test_mutant_is_noticed(name, mutated, apply, monkeypatch):
    memory, play = (TIGHT, play_tight) if name == "tight" else (MEMORIES[name], drive_for_long)
    compiled = SwapOperations(memory)
    compiled.compiled = {op: run for op, run in operations(memory).compiled.items() if op not in mutated}
    apply(monkeypatch)
    with pytest.raises((AssertionError, checks.InvariantError)):
        play(memory, compiled)


def drive_for_long(memory: Paged, compiled: SwapOperations) -> None:
    for seed in range(10):
        drive_swaps(SwapTwins(memory, compiled), seed, steps=100)


# ---- real keys and values ------------------------------------------------------------------------------------------

DATA = Paged(rows=3, max_len=24, block_size=4, num_blocks=7, host_blocks=9, forks=True, cache=PrefixCache())
Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPES = (KV_HEADS, HEAD_DIM), (KV_HEADS,)  # of a token's key or value, and of its scales

attend = jax.jit(functools.partial(paged_attention, max_q_len=1, backend="xla"))


@functools.cache
def written(prefix: tuple[int, ...]) -> KVCache:
    """What is stored of a token: numbers that depend on it and on all before it."""
    rng = np.random.default_rng([len(prefix), *prefix])
    k, v = (tuple(rng.normal(0, 2, shape).astype(np.float32) for shape in SHAPES) for _ in range(2))
    return KVCache(k=k, v=v)


def nothing_written(slots: int) -> KVCache:
    """Keys and values of one layer, and as a second one their scales: all NaN."""
    return KVCache(*(tuple(np.full((slots, *shape), np.nan, np.float32) for shape in SHAPES) for _ in range(2)))


class DataServer(Server):
    """Moves the data as the memory says, and wipes whatever block nobody may rely on."""

    def __init__(self, memory: Paged, moves=copy_blocks_between):
        super().__init__(memory)
        self.moves = moves
        self.device = nothing_written(memory.num_slots)
        self.host = nothing_written(memory.host_blocks * memory.block_size)
        self.known: dict[int, list[int]] = {}  # tokens of each row
        self.parked: dict[int, list[int]] = {}  # and of each place
        self.copied = 0

    def stored(self, row: int) -> int:
        return int(self.state.seqs.lengths[row])

    def slots(self, row: int, length: int) -> np.ndarray:
        size, table = self.memory.block_size, np.asarray(self.state.tables[0].ids[row])
        position = np.arange(length)
        return table[position // size] * size + position % size

    def begin(self, tokens: list[int]) -> None:
        row, outcome = self.manager.admit(Prompt(tuple(tokens)), len(tokens))
        if outcome == Outcome.OK:
            self.known[row] = tokens[: self.stored(row)]
            self.append({row: tokens[self.stored(row) :]})

    def append(self, new: dict[int, list[int]]) -> None:
        """Stores and publishes these tokens, or none of them."""
        memory, rows = self.memory, range(self.memory.rows)
        if self.manager.append([len(new.get(row, [])) for row in rows]) != Outcome.OK:
            return
        copies = self.state.copies
        moved = copy_blocks(
            jax.tree.map(jnp.asarray, self.device), copies.sources, copies.destinations, memory.block_size
        )
        self.device = jax.tree.map(np.array, moved)
        self.manager.copied()
        for row, tokens in new.items():
            first = len(self.known[row])
            self.known[row] = self.known[row] + tokens
            for position in range(first, first + len(tokens)):
                slot = self.slots(row, position + 1)[position]
                for pool, value in self.pairs(self.device, written(tuple(self.known[row][: position + 1]))):
                    pool[slot] = value
        self.manager.publish([new.get(row, []) for row in rows])

    @staticmethod
    def pairs(cache: KVCache, token: KVCache) -> list[tuple[np.ndarray, np.ndarray]]:
        return list(zip(jax.tree.leaves(cache), jax.tree.leaves(token), strict=True))

    def move(self, source: KVCache, destination: KVCache, moved: list) -> KVCache:
        padded = moved + [(self.memory.num_slots, self.memory.num_slots)] * (self.memory.host_blocks - len(moved))
        lists = (ints(ids) for ids in zip(*padded, strict=True))
        source, destination = (jax.tree.map(jnp.asarray, cache) for cache in (source, destination))
        self.copied += len(moved)
        return jax.tree.map(np.array, self.moves(source, destination, *lists, self.memory.block_size))

    def leave(self, rows: list[int]) -> None:
        places, outcome, moved = self.out(*rows)
        if outcome == Outcome.OK:
            self.host = self.move(self.device, self.host, moved)
            self.parked |= {place: self.known.pop(row) for place, row in zip(places, rows, strict=True)}

    def come_back(self, place: int) -> None:
        row, outcome, moved = self.back(place)
        if outcome == Outcome.OK:
            self.device = self.move(self.host, self.device, moved)
            self.known[row] = self.parked.pop(place)

    def end(self, row: int) -> None:
        self.manager.release([row == other for other in range(self.memory.rows)])
        del self.known[row]

    def wipe(self) -> None:
        state, size = self.state, self.memory.block_size
        useless = (np.asarray(state.pool.ref_counts) == 0) & (np.asarray(state.contents.records)[:, 0] == 0)
        for pool in jax.tree.leaves(self.device):
            pool[np.repeat(useless, size)] = np.nan

    def require_data(self) -> None:
        """What is stored is what was written, and attention is that over blocks that never moved, bit for bit."""
        memory, rows = self.memory, range(self.memory.rows)
        width = memory.blocks_per_seq * memory.block_size
        unmoved = nothing_written(memory.rows * width)
        for row, tokens in self.known.items():
            for position in range(len(tokens)):
                for pool, value in self.pairs(unmoved, written(tuple(tokens[: position + 1]))):
                    pool[row * width + position] = value
            for pool, expected in zip(jax.tree.leaves(self.device), jax.tree.leaves(unmoved), strict=True):
                here = row * width + np.arange(len(tokens))
                np.testing.assert_array_equal(pool[self.slots(row, len(tokens))], expected[here])
        lengths = [len(self.known.get(row, [])) for row in rows]
        assert self.state.seqs.lengths.tolist() == lengths
        q = jnp.asarray(np.random.default_rng(0).normal(0, 3, (memory.rows, Q_HEADS, HEAD_DIM)), jnp.float32)
        cu_q_lens = np.cumsum([0, *(int(length > 0) for length in lengths)])
        in_order = jnp.arange(memory.rows * memory.blocks_per_seq, dtype=jnp.int32).reshape(memory.rows, -1)
        outs = []
        for cache, table in ((self.device, self.state.tables[0].ids), (unmoved, in_order)):
            k, v = (jnp.asarray(pool[0].reshape(-1, memory.block_size, *SHAPES[0])) for pool in (cache.k, cache.v))
            outs.append(np.asarray(attend(q, k, v, table, ints(lengths), ints(cu_q_lens)))[: cu_q_lens[-1]])
        assert not np.isnan(outs[0]).any()
        np.testing.assert_array_equal(*outs)


def live(server: DataServer, seed: int, steps: int) -> None:
    """Requests with common beginnings run, fork, leave for the host, come back and end."""
    rng = random.Random(seed)
    for _ in range(steps):
        rows, parked = list(server.known), list(server.parked)
        kind = rng.choices(["begin", "grow", "fork", "leave", "back", "discard", "end"], [4, 5, 2, 3, 4, 0.4, 1])[0]
        if kind == "begin":
            server.begin([rng.choice([5, 5, 6]) for _ in range(rng.randint(1, 14))])
        elif kind == "grow":
            room = {row: server.memory.max_len - server.stored(row) for row in rows}
            server.append({row: [rng.randint(0, 9) for _ in range(min(rng.randint(0, 3), room[row]))] for row in rows})
        elif kind == "fork" and rows:
            row = rng.choice(rows)
            tokens = server.known[row][: rng.randint(0, server.stored(row))]
            child, outcome = server.manager.fork(row, len(tokens), len(tokens), Prompt(tuple(tokens)))
            if outcome == Outcome.OK:
                server.known[child] = tokens
        elif kind == "leave" and rows:
            server.leave(sorted(rng.sample(rows, rng.randint(1, len(rows)))))
        elif kind == "back" and parked:
            server.come_back(rng.choice(parked))
        elif kind == "discard" and parked:
            place = rng.choice(parked)
            assert server.manager.discard(place) == Outcome.OK
            del server.parked[place]
        elif kind == "end" and rows:
            server.end(rng.choice(rows))
        server.wipe()
        server.require_data()


def test_attention_after_swaps_is_bit_for_bit_that_without():
    server = DataServer(DATA)
    live(server, seed=0, steps=150)
    assert server.copied > 20


def test_a_copy_that_was_not_made_shows():
    with pytest.raises(AssertionError):
        live(DataServer(DATA, moves=lambda source, destination, *lists: destination), seed=0, steps=150)
