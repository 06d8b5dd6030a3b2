"""The block managers with a host pool: the plain-Python one, the jitted one, and both driven together.

Here a block is on the host if a host block holds the same data, where data is an object with an identity: every write
makes another one, a copy is the same one, and a device block that nobody refers to and that is not cached is wiped.
"""

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxkv import chains, prefix_cache, swap
from paxkv.paged import Paged
from tests.paxkv.oracles.block_manager import BlockManager, Knobs, Row
from tests.paxkv.oracles.common import DOUBLE_FREE, LATER, NEVER, OK, OUT_OF_RANGE
from tests.paxkv.oracles.jitted import JittedManager, Operations, knobs
from tests.paxkv.oracles.twins import Driver, Twins

Pairs = list[tuple[int, int]]  # source, destination


class SwappingManager(BlockManager):
    def __init__(self, knobs: Knobs, host_blocks: int):
        super().__init__(knobs)
        self.data = [object() for _ in self.blocks]
        self.host_data = [object() for _ in range(host_blocks)]
        self.host_references = [0] * host_blocks
        self.host_free = deque(range(host_blocks))
        self.places: list[Row | None] = [None] * knobs.rows  # with tables of host blocks

    # ---- when data changes -----------------------------------------------------------------------------------------

    def take(self) -> int:
        block = super().take()
        self.data[block] = object()
        return block

    def forget(self, block: int) -> None:
        super().forget(block)
        if block in self.free:
            self.data[block] = object()

    def set_free(self, blocks: list[int]) -> None:
        super().set_free(blocks)
        for block in blocks:
            if block in self.free and self.blocks[block].content is None:
                self.data[block] = object()

    def append(self, counts: list[int], max_new_tokens: int) -> int:
        before = [self.length(row) for row in range(self.knobs.rows)]
        outcome = super().append(counts, max_new_tokens)
        if outcome == OK:
            for row, count in enumerate(counts):
                for group, layers in self.groups if count else []:
                    first, end = before[row] // layers.block_size, layers.blocks_for(before[row] + count)
                    for block in self.table(row, group)[first:end]:
                        self.data[block] = object()
        return outcome

    # ---- to the host -----------------------------------------------------------------------------------------------

    def filled(self, row: Row) -> list[list[int | None]]:
        """The tables of a row without blocks that hold no token yet."""
        return [row.tables[group][: layers.blocks_for(row.length)] for group, layers in self.groups]

    def on_host(self, block: int) -> int | None:
        return next((h for h, data in enumerate(self.host_data) if data is self.data[block]), None)

    def on_device(self, host: int) -> int | None:
        return next((b for b, data in enumerate(self.data) if data is self.host_data[host]), None)

    def swap_out(self, mask: list[bool]) -> tuple[list[int], int, Pairs]:
        nowhere = [self.knobs.rows] * self.knobs.rows
        rows = [row for row, leaves in enumerate(mask) if leaves]
        for row in rows:
            if not self.is_live(row) or self.waits(row):
                return nowhere, self.fault(OUT_OF_RANGE, row), []
        blocks = {b for row in rows for table in self.filled(self.rows[row]) for b in table if b is not None}
        if len(blocks) > len(self.host_data):
            return nowhere, NEVER, []
        fresh = sum(1 for b in blocks if self.on_host(b) is None or self.on_host(b) in self.host_free)
        if fresh > len(self.host_free) or len(rows) > self.places.count(None):
            return nowhere, LATER, []
        places, moved = list(nowhere), []
        for row in rows:
            places[row] = self.places.index(None)
            filled = self.filled(self.rows[row])
            there = {b: self.on_host(b) for table in filled for b in table if b is not None}
            for host in there.values():
                if host in self.host_free:
                    self.host_free.remove(host)
            for block in there:
                if there[block] is None:
                    there[block] = self.host_free.popleft()
                    self.host_data[there[block]] = self.data[block]
                    moved.append((block, there[block]))
                self.host_references[there[block]] += 1
            tables = [[None if block is None else there[block] for block in table] for table in filled]
            self.places[places[row]] = replace(self.rows[row], tables=tables)
        self.release(mask)
        return places, OK, moved

    # ---- and back --------------------------------------------------------------------------------------------------

    def swap_in(self, place: int) -> tuple[int, int, Pairs]:
        nowhere = self.knobs.rows
        if not self.is_parked(place):
            return nowhere, self.fault_at(place, OUT_OF_RANGE), []
        parked = self.places[place]
        promised = max(parked.promised, min(parked.length + 1, self.knobs.max_len))
        hosts = self.hosts(parked)
        there = {host: self.on_device(host) for host in hosts}
        to_come = self.still_needs(promised, parked.tables)
        if len(hosts) + to_come > self.knobs.num_blocks:
            return nowhere, NEVER, []
        need = to_come + sum(1 for block in there.values() if block is None or block in self.free)
        watermark = self.knobs.watermark_blocks if any(self.rows) else 0
        if None not in self.rows or need + self.owed() + watermark > len(self.free):
            return nowhere, LATER, []
        for block in there.values():
            if block is not None:
                self.refer(block)
        moved = []
        for host in hosts:
            if there[host] is None:
                there[host] = self.take()
                self.data[there[host]] = self.host_data[host]
                moved.append((host, there[host]))
            self.blocks[there[host]].tables += 1
        row = self.rows.index(None)
        tables = [[None if host is None else there[host] for host in table] for table in parked.tables]
        self.rows[row] = replace(parked, tables=tables, promised=promised)
        self.leave(place)
        return row, OK, moved

    def discard(self, place: int) -> int:
        if not self.is_parked(place):
            return self.fault_at(place, DOUBLE_FREE)
        self.leave(place)
        return OK

    def fault_at(self, place: int, outcome: int) -> int:
        return self.fault(outcome, min(max(place, 0), self.knobs.rows - 1))

    def is_parked(self, place: int) -> bool:
        return 0 <= place < len(self.places) and self.places[place] is not None

    @staticmethod
    def hosts(parked: Row) -> list[int]:
        return [host for table in parked.tables for host in table if host is not None]

    def leave(self, place: int) -> None:
        for host in reversed(self.hosts(self.places[place])):
            self.host_references[host] -= 1
            if self.host_references[host] == 0:
                self.host_free.append(host)
        self.places[place] = None

    def violations(self) -> list[str]:
        entries = Counter(host for parked in self.places if parked for host in self.hosts(parked))
        broken = super().violations()
        for host, references in enumerate(self.host_references):
            if references != entries[host] or (references == 0) != (host in self.host_free):
                broken.append(f"host block {host} has {references} references")
        return broken


class SwapOperations(Operations):
    def swap_out(self, state, rows):
        return swap.swap_out(self.memory, state, rows)

    def swap_in(self, state, place):
        return swap.swap_in(self.memory, state, place)

    def discard(self, state, place):
        return swap.discard(self.memory, state, place)


class SwappingJittedManager(JittedManager):
    def swap_out(self, mask: list[bool]) -> tuple[list[int], int, Pairs]:
        self.state, places, outcome, moves = self.operations("swap_out", self.state, jnp.asarray(mask, jnp.bool))
        return places.tolist(), int(outcome), self.pairs(moves, self.memory.num_blocks, self.memory.host_blocks)

    def swap_in(self, place: int) -> tuple[int, int, Pairs]:
        self.state, row, outcome, moves = self.operations("swap_in", self.state, jnp.int32(place))
        return int(row), int(outcome), self.pairs(moves, self.memory.host_blocks, self.memory.num_blocks)

    def discard(self, place: int) -> int:
        self.state, outcome = self.operations("discard", self.state, jnp.int32(place))
        return int(outcome)

    @staticmethod
    def pairs(moves: Any, no_source: int, no_destination: int) -> Pairs:
        pairs = list(zip(moves.sources.tolist(), moves.destinations.tolist(), strict=True))
        count = int(moves.count)
        assert pairs[count:] == [(no_source, no_destination)] * (len(pairs) - count), pairs
        return pairs[:count]


class SwapTwins(Twins):
    """Both managers, compared on the host too."""

    def __init__(self, memory: Paged, compiled: Operations | None = None):
        self.memory = memory
        self.jitted = SwappingJittedManager(memory, compiled or SwapOperations(memory))
        self.plain = SwappingManager(knobs(memory), memory.host_blocks)
        self.ids = {}
        self.count = 0
        self.compare("init")

    def compare(self, after: str, before: Any = None, *, failed: bool = False) -> None:
        super().compare(after, before, failed=failed)
        plain, none = self.plain, self.memory.host_blocks
        host = jax.tree.map(np.asarray, self.jitted.state.swap)
        queue = host.pool.queue[int(host.pool.head) : int(host.pool.tail)].tolist()
        free = [block for block in queue if block != none]
        for name, value, wanted in (
            ("free", free, list(plain.host_free)),
            ("references", host.pool.ref_counts.tolist(), plain.host_references),
            ("parked", host.parked.tolist(), [parked is not None for parked in plain.places]),
            ("lengths", host.lengths.tolist(), [parked.length if parked else 0 for parked in plain.places]),
            ("promised", host.promised.tolist(), [parked.promised if parked else 0 for parked in plain.places]),
        ):
            assert value == wanted, f"{name} on the host is {value} instead of {wanted} after {after}"
        for place, parked in enumerate(plain.places):
            for group, _ in plain.groups:
                table = self.jitted.row_of(host.tables[group], place)
                assert table == (parked.tables[group] if parked else []), f"{table} at place {place} after {after}"
            if self.memory.cache:
                self.compare_parked_chain(host.chains, place, parked, after)

    def compare_parked_chain(self, chain: chains.Chains, place: int, parked: Row | None, after: str) -> None:
        where = f"place {place} after {after}"
        assert chain.hashed[place] == (len(parked.tokens) if parked else 0), where
        if parked is None:
            assert not any(np.any(leaf[place]) for leaf in jax.tree.leaves(chain)), where
            return
        assert tuple(chain.identities[place].tolist()) == parked.identity, where
        assert chain.priorities[place] == parked.priority, where
        for group, _ in self.plain.groups:
            last = int(chain.contents[place, group])
            if parked.publishes[group]:
                self.same(parked.last[group], last, group, where)
            else:
                assert last == prefix_cache.BROKEN, where


class SwapDriver(Driver):
    """Sequences also go to the host and come back."""

    def __init__(self, twins: SwapTwins, letters: int = 2):
        super().__init__(twins, letters)
        self.parked: dict[int, tuple[list[int], list[int]]] = {}  # by place: tokens to publish, tokens to come

    def swap_out(self, rng: random.Random) -> None:
        if rng.random() < 0.7:
            self.twins.both("background", plain="free_out_of_view")
        rows = [row for row in range(self.memory.rows) if self.plain.length(row) or rng.random() < 0.03]
        chosen = [row for row in rows if rng.random() < 0.5] or rows[:1]
        places, outcome, _ = self.twins.both("swap_out", [row in chosen for row in range(self.memory.rows)])
        for row in chosen if outcome == OK else []:
            self.parked[places[row]] = self.unpublished[row], self.to_come[row]
            self.unpublished[row], self.to_come[row] = [], []

    def place(self, rng: random.Random) -> int:
        """Where somebody is parked; now and then anywhere, and also where no place is."""
        parked = list(self.parked) if rng.random() < 0.9 else []
        return rng.choice(parked or [rng.randint(-1, self.memory.rows)])

    def swap_in(self, rng: random.Random) -> None:
        place = self.place(rng)
        row, outcome, _ = self.twins.both("swap_in", place)
        if outcome == OK:
            self.unpublished[row], self.to_come[row] = self.parked.pop(place)

    def discard(self, rng: random.Random) -> None:
        place = self.place(rng)
        if self.twins.both("discard", place) == OK:
            del self.parked[place]

    def step(self, rng: random.Random) -> None:
        back = 4 if self.parked else 0.3
        kind = rng.choices(["swap_out", "swap_in", "discard", "other"], weights=[3, back, back / 4, 12])[0]
        if kind == "other":
            super().step(rng)
        else:
            getattr(self, kind)(rng)


def drive_swaps(twins: SwapTwins, seed: int, steps: int) -> SwapDriver:
    rng, driver = random.Random(seed), SwapDriver(twins)
    for _ in range(steps):
        driver.step(rng)
    return driver
