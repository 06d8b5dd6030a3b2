"""Real keys, values and scales that go to the host and come back: no number is lost."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from paxkv.kv_cache import KVCache, KVPool, LayerCache, copy_blocks, copy_blocks_between
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from tests.paxkv.oracles.block_manager import Prompt
from tests.paxkv.oracles.caches import keys_and_values
from tests.paxkv.oracles.jitted import ints
from tests.paxkv.oracles.swap_server import Server

DATA = Paged(rows=3, max_len=24, block_size=4, num_blocks=7, host_blocks=9, forks=True, cache=PrefixCache())
Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPES = (KV_HEADS, HEAD_DIM), (KV_HEADS,)  # of a token's key or value, and of its scales

attend = jax.jit(functools.partial(paged_attention, max_q_len=1, backend="xla"))


@functools.cache
def written(prefix: tuple[int, ...]) -> KVCache:
    """What is stored of a token: numbers that depend on it and on all before it."""
    rng = np.random.default_rng([len(prefix), *prefix])
    return one_layer(lambda shape: rng.normal(0, 2, shape).astype(np.float32))


def nothing_written(slots: int) -> KVCache:
    """Keys and values of one layer, and their scales: all NaN."""
    return one_layer(lambda shape: np.full((slots, *shape), np.nan, np.float32))


def one_layer(draw) -> KVCache:
    k, v = (KVPool(draw(SHAPES[0]), scales=draw(SHAPES[1])) for _ in range(2))
    return KVCache((LayerCache(k, v, np.zeros(1, np.int32)),))


def arrays(cache: KVCache) -> list:
    """All that lies in blocks."""
    return jax.tree.leaves([(layer.k, layer.v) for layer in cache.layers])


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
        return list(zip(arrays(cache), arrays(token), strict=True))

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
        for pool in arrays(self.device):
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
            for pool, expected in zip(arrays(self.device), arrays(unmoved), strict=True):
                here = row * width + np.arange(len(tokens))
                np.testing.assert_array_equal(pool[self.slots(row, len(tokens))], expected[here])
        lengths = [len(self.known.get(row, [])) for row in rows]
        assert self.state.seqs.lengths.tolist() == lengths
        q = jnp.asarray(np.random.default_rng(0).normal(0, 3, (memory.rows, Q_HEADS, HEAD_DIM)), jnp.float32)
        cu_q_lens = np.cumsum([0, *(int(length > 0) for length in lengths)])
        in_order = jnp.arange(memory.rows * memory.blocks_per_seq, dtype=jnp.int32).reshape(memory.rows, -1)
        outs = []
        for cache, table in ((self.device, self.state.tables[0].ids), (unmoved, in_order)):
            k, v = (jnp.asarray(pool.reshape(-1, memory.block_size, *SHAPES[0])) for pool in keys_and_values(cache))
            outs.append(np.asarray(attend(q, k, v, table, ints(lengths), ints(cu_q_lens)))[: cu_q_lens[-1]])
        assert not np.isnan(outs[0]).any()
        np.testing.assert_array_equal(*outs)


@pytest.mark.slow
def test_what_is_still_cached_stays_in_place_and_what_was_evicted_comes_back_from_the_host():
    server = DataServer(DATA)
    server.begin(list(range(10)))  # two blocks that are cached, and two tokens in a third
    blocks = np.asarray(server.state.tables[0].ids[0, :3]).tolist()
    server.leave([0])
    assert server.copied == 3
    server.wipe()
    server.come_back(0)
    assert server.copied == 3 + 1
    assert np.asarray(server.state.tables[0].ids[0, :2]).tolist() == blocks[:2]
    server.require_data()

    server.append({0: [7, 8]})
    server.leave([0])
    assert server.copied == 3 + 1 + 1  # only what was written meanwhile
    server.begin(list(range(100, 120)))  # five of seven blocks
    server.end(0)
    server.wipe()
    server.require_data()
    server.come_back(0)
    assert 0 < server.copied - 5 <= 3
    server.require_data()
    server.append({0: [9, 9, 9]})
    server.require_data()


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


@pytest.mark.slow
def test_attention_after_swaps_is_bit_for_bit_that_without():
    server = DataServer(DATA)
    live(server, seed=0, steps=150)
    assert server.copied > 20


@pytest.mark.slow
def test_a_copy_that_was_not_made_shows():
    with pytest.raises(AssertionError):
        live(DataServer(DATA, moves=lambda source, destination, *lists: destination), seed=0, steps=150)
