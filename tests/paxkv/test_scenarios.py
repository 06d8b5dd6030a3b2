"""Known situations with known answers, played against the plain-Python block manager and the jitted one."""

import functools
import itertools
import math
from typing import Any

import pytest

from paxkv.paged import Paged
from tests.paxkv.oracles.block_manager import BlockManager
from tests.paxkv.oracles.blocks import Content, Prompt
from tests.paxkv.oracles.jitted import JittedManager, knobs, paged
from tests.paxkv.oracles.scenario import Player, scenarios
from tests.paxkv.oracles.swapping import SwapOperations, SwappingJittedManager, SwappingManager

MANAGED = [scenario for scenario in scenarios() if scenario.plays == "manager"]


class OracleManager:
    """The plain-Python block manager as the scenarios see one."""

    def __init__(self, memory: dict[str, Any]):
        fixed, host_blocks = knobs(paged(memory)), memory.get("host_blocks")
        self.manager = SwappingManager(fixed, host_blocks) if host_blocks else BlockManager(fixed)
        self.cached: list[Content] = []  # when events were last asked for
        self.resets = 0

    def admit(self, prompt: Prompt, final: int) -> tuple[int, int]:
        return self.manager.admit(len(prompt.tokens), final, prompt)

    def append(self, counts: list[int]) -> int:
        return self.manager.append(counts, self.manager.knobs.max_len)

    def publish(self, tokens: list[list[int]]) -> None:
        self.manager.publish(tokens)

    def background(self) -> None:
        self.manager.free_out_of_view()

    def release(self, rows: list[bool]) -> None:
        self.manager.release(rows)

    def fork(self, row: int, length: int, promised: int, prompt: Prompt) -> tuple[int, int]:
        return self.manager.fork(row, length, promised, prompt)

    def copied(self) -> None:
        self.manager.copied()

    def evict(self, blocks: list[int]) -> None:
        self.manager.evict(blocks)

    def pin(self, blocks: list[int]) -> int:
        return self.manager.pin(blocks)

    def unpin(self, blocks: list[int]) -> int:
        return self.manager.unpin(blocks)

    def reset(self) -> int:
        return self.manager.reset_cache()

    def bump_epoch(self) -> None:
        self.manager.bump_epoch()

    def swap_out(self, rows: list[bool]) -> tuple[list[int], int, list]:
        return self.manager.swap_out(rows)

    def swap_in(self, place: int) -> tuple[int, int, list]:
        return self.manager.swap_in(place)

    def host_free(self) -> int:
        return len(self.manager.host_free)

    def slot(self, row: int, position: int) -> int | None:
        size = self.manager.knobs.layers[0].block_size
        table = self.manager.table(row, 0)
        block = table[position // size] if position // size < len(table) else None
        return None if block is None else block * size + position % size

    def events(self) -> list[tuple]:
        """Children go before their parents and come after them."""
        was_reset, self.resets = self.manager.statistics.resets > self.resets, self.manager.statistics.resets
        before, self.cached = [] if was_reset else self.cached, self.manager.contents()
        removed = sorted((c for c in before if c not in self.cached), key=lambda c: -len(c.path))
        stored = sorted((c for c in self.cached if c not in before), key=lambda c: len(c.path))
        happened = [("removed", c) for c in removed] + [("stored", c) for c in stored]
        told = [(kind, tuple(itertools.chain.from_iterable(content.path[1:]))) for kind, content in happened]
        return [("cleared",)] * was_reset + told

    def page_groups(self, blocks: int) -> dict[str, int]:
        used = [b for b, block in enumerate(self.manager.blocks) if block.references or block.content]
        return {"used": len(used), "pinned": len({b // blocks for b in used}), "needed": math.ceil(len(used) / blocks)}

    def view(self) -> dict[str, Any]:
        manager, rows = self.manager, range(self.manager.knobs.rows)
        broken = manager.violations()
        assert not broken, broken
        return {
            "tables": [[list(manager.table(row, group)) for row in rows] for group, _ in manager.groups],
            "lengths": [manager.length(row) for row in rows],
            "references": [block.references for block in manager.blocks],
            "free": list(manager.free),
            "contents": [block.content for block in manager.blocks],
            "copies": manager.pending_copies(),
            "statistics": dict(vars(manager.statistics)),
            "faults": set(manager.faults),
        }


class HostedManager(SwappingJittedManager):
    def host_free(self) -> int:
        return int(self.state.swap.pool.num_free)


@functools.cache
def swap_operations(memory: Paged) -> SwapOperations:
    return SwapOperations(memory)


def jitted_manager(memory: dict[str, Any]) -> JittedManager:
    static = paged(memory)
    return HostedManager(static, swap_operations(static)) if static.host_blocks else JittedManager(static)


def test_no_two_scenarios_have_one_name():
    assert len({scenario.name for scenario in scenarios()}) == len(scenarios()) > len(MANAGED) > 100


@pytest.mark.parametrize("scenario", MANAGED, ids=lambda scenario: scenario.name)
def test_oracle_does_as_the_scenario_says(scenario):
    Player(OracleManager(scenario.memory), scenario.memory).play(scenario.steps)


@pytest.mark.parametrize("scenario", MANAGED, ids=lambda scenario: scenario.name)
def test_manager_does_as_the_scenario_says(scenario):
    Player(jitted_manager(scenario.memory), scenario.memory).play(scenario.steps)
