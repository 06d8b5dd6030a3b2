"""Memories with a host pool, and a driver of one that says in short what the tests of swaps ask."""

import dataclasses
import functools

from paxkv import checks
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.windows import Group
from tests.paxkv.oracles.block_manager import Prompt
from tests.paxkv.oracles.swapping import SwapOperations, SwappingJittedManager

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
