"""Known situations with known answers, played against the plain-Python block manager and the jitted one."""

import functools
from collections import Counter
from typing import Any

import pytest

from paxkv.paged import Paged
from tests.paxkv.oracles.block_manager import BlockManager
from tests.paxkv.oracles.blocks import Prompt
from tests.paxkv.oracles.jitted import JittedManager, knobs, paged
from tests.paxkv.oracles.scenario import Player, Scenario, scenarios
from tests.paxkv.oracles.swapping import SwapOperations, SwappingJittedManager, SwappingManager

# What a scenario may need that the block manager does not have, and where it belongs.
NOT_HERE = {
    "images": "keys of prompts with images: no such model yet",
    "scheduler": "choices of the scheduler",
    "sizing": "arithmetic of capacities, tested in test_capacity",
    "metrics_window": "rates over the last requests",
    "events": "what was stored and removed, tested in test_events",
    "page_groups": "page groups of blocks, tested in test_page_groups",
    "data": "what is in the blocks, tested in test_swap",
}
ALL = scenarios()


class OracleManager:
    """The plain-Python block manager as the scenarios see one."""

    def __init__(self, memory: dict[str, Any]):
        fixed, host_blocks = knobs(paged(memory)), memory.get("host_blocks")
        self.manager = SwappingManager(fixed, host_blocks) if host_blocks else BlockManager(fixed)

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


def cases() -> list:
    def marks(scenario: Scenario) -> list:
        return (
            [pytest.mark.skip(reason=f"needs {scenario.needs}: {NOT_HERE[scenario.needs]}")] if scenario.needs else []
        )

    return [pytest.param(scenario, id=scenario.name, marks=marks(scenario)) for scenario in ALL]


def test_nothing_is_left_out_but_what_belongs_elsewhere():
    left_out = Counter(scenario.needs for scenario in ALL if scenario.needs)
    assert left_out.keys() == NOT_HERE.keys()
    assert len({scenario.name for scenario in ALL}) == len(ALL)


@pytest.mark.parametrize("scenario", cases())
def test_oracle_does_as_the_scenario_says(scenario):
    Player(OracleManager(scenario.memory), scenario.memory).play(scenario.steps)


@pytest.mark.parametrize("scenario", cases())
def test_manager_does_as_the_scenario_says(scenario):
    Player(jitted_manager(scenario.memory), scenario.memory).play(scenario.steps)
