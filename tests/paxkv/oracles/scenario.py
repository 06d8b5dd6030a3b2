"""Scenarios as data: what is done to a block manager, in order, and what can be seen afterwards.

A scenario file holds the `memory` that its scenarios share and the list of them. A scenario may change the memory,
may be played once for each entry of `vary` (whose values stand wherever `$name` is written). Each of its steps does
one thing (`do`) and may expect anything of what `Player.expect` knows. A file whose scenarios are not of the block
manager says what `plays` them.

Tokens are written as runs: `[["p", 48], ["x", 7]]` are the first 48 tokens of a text called p and the first 7 of one
called x. Equal runs are equal tokens, and no two texts have a token in common. What a request generates by itself is
the text `>name`.
"""

import copy
import itertools
import json
import pathlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tests.paxkv.oracles.blocks import Prompt

FOLDER = pathlib.Path(__file__).parent.parent / "scenarios"
TEXT_LENGTH = 10_000
OUTCOMES = ["OK", "LATER", "NEVER", "OUT_OF_BLOCKS", "DOUBLE_FREE", "OUT_OF_RANGE", "COPIES_PENDING"]


class Manager(Protocol):
    """A block manager as the scenarios see it. Rows and blocks are numbers; outcomes are those of `Outcome`."""

    def admit(self, prompt: Prompt, final: int) -> tuple[int, int]: ...
    def append(self, counts: list[int]) -> int: ...
    def publish(self, tokens: list[list[int]]) -> None: ...
    def background(self) -> None: ...
    def release(self, rows: list[bool]) -> None: ...
    def fork(self, row: int, length: int, promised: int, prompt: Prompt) -> tuple[int, int]: ...
    def copied(self) -> None: ...
    def evict(self, blocks: list[int]) -> None: ...
    def pin(self, blocks: list[int]) -> int: ...
    def unpin(self, blocks: list[int]) -> int: ...
    def reset(self) -> int: ...
    def bump_epoch(self) -> None: ...

    def view(self) -> dict[str, Any]:
        """All there is to see, as plain values: `tables` (by group, by row), `lengths`, `references`, `free`,
        `contents` (by block: what it holds, or None), `copies`, `statistics`, `faults`."""
        ...

    def slot(self, row: int, position: int) -> int | None: ...

    def events(self) -> list[tuple]:
        """What happened to cached contents since the last call: `("stored", tokens)`, `("removed", tokens)` with all
        tokens from the beginning of the prompt to the end of the block, and `("cleared",)`."""
        ...

    def page_groups(self, blocks: int) -> dict[str, int]: ...

    # With a host pool only.

    def swap_out(self, rows: list[bool]) -> tuple[list[int], int, list]: ...
    def swap_in(self, place: int) -> tuple[int, int, list]: ...
    def host_free(self) -> int: ...


class Tokens:
    """Texts by name."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def of(self, text: str, count: int) -> list[int]:
        first = self.texts.setdefault(text, len(self.texts)) * TEXT_LENGTH
        return list(range(first, first + count))

    def written(self, runs: list) -> list[int]:
        return list(itertools.chain.from_iterable(self.of(text, count) for text, count in runs))


class Player:
    """Plays the steps of one scenario and compares what it says with what the manager shows."""

    def __init__(self, manager: Manager, memory: dict[str, Any]):
        self.manager = manager
        self.memory = memory
        self.tokens = Tokens()
        self.rows: dict[str, int] = {}
        self.places: dict[str, int] = {}  # of those on the host
        self.prompts: dict[str, Prompt] = {}  # what each request was admitted with
        self.uncomputed: dict[int, list[int]] = {}  # tokens appended by row, and not yet published
        self.scales: dict[int, float] = {}  # by block: the data that must go where the block goes
        self.host_scales: dict[int, float] = {}

    def play(self, steps: list[dict]) -> None:
        told = any("events" in step for step in steps)
        for number, step in enumerate(steps):
            for _ in range(step.get("repeat", 1)):
                self.where = f"step {number}, {json.dumps(step)}"
                before = self.manager.view()
                outcome = getattr(self, step["do"])(step)
                if outcome is not None:
                    wanted = step.get("outcome", "OK")
                    assert OUTCOMES[outcome] == wanted, f"{OUTCOMES[outcome]} instead of {wanted}: {self.where}"
                    if outcome:
                        after = self.manager.view()
                        assert after | {"faults": None} == before | {"faults": None}, f"it changed: {self.where}"
                self.expect(step)
                if told:
                    self.expect_events(step)

    # ---- what is done ----------------------------------------------------------------------------------------------

    def admit(self, step: dict) -> int:
        tokens = self.tokens.written(step["tokens"])
        named = {key: step[key] for key in ("adapter", "salt", "resumed", "lookup", "priority") if key in step}
        prompt = Prompt(tuple(tokens), **named)
        row, outcome = self.manager.admit(prompt, step.get("final", len(tokens)))
        if outcome == 0:
            self.rows[step["as"]] = row
            self.prompts[step["as"]] = prompt
            assert self.hit(row) == step.get("hit", self.hit(row)), f"hit {self.hit(row)}: {self.where}"
        return outcome

    def hit(self, row: int) -> int:
        return self.manager.view()["lengths"][row]

    def append(self, step: dict) -> int:
        self.manager.background()  # what the step before was the last to read
        lengths = self.manager.view()["lengths"]
        counts, tokens = [0] * len(lengths), {}
        for name, count in step["counts"].items():
            row = self.rows[name]
            counts[row] = count
            tokens[row] = self.known(name, lengths[row] + count)[lengths[row] :]
        outcome = self.manager.append(counts)
        if outcome == 0:
            for row, new in tokens.items():
                self.uncomputed[row] = self.uncomputed.get(row, []) + new
            if self.memory.get("cache", True) and self.memory.get("publish", "on_schedule") == "on_schedule":
                self.compute(step)
        return outcome

    def known(self, name: str, length: int) -> list[int]:
        """The first tokens of a request: those it came with, then those it generates."""
        tokens = list(self.prompts[name].tokens)
        return (tokens + self.tokens.of(f">{name}", max(0, length - len(tokens))))[:length]

    def compute(self, step: dict) -> None:
        if self.memory.get("cache", True):
            self.manager.publish([self.uncomputed.get(row, []) for row in range(self.memory["rows"])])
        self.uncomputed = {}

    def store(self, step: dict) -> int:
        """Admits a request, appends all its tokens in one step, and computes them."""
        outcome = self.admit(step)
        if outcome == 0:
            name = step["as"]
            left = len(self.prompts[name].tokens) - self.hit(self.rows[name])
            appended = self.append({"counts": {name: left}})
            assert appended == 0, f"{OUTCOMES[appended]} on append: {self.where}"
            self.compute(step)
            self.scales |= zip(self.table(name), step.get("scales", []), strict=False)
        return outcome

    def table(self, name: str) -> list[int | None]:
        return self.manager.view()["tables"][0][self.rows[name]]

    def release(self, step: dict) -> None:
        rows = [self.rows[name] for name in step["rows"]]
        self.manager.release([row in rows for row in range(self.memory["rows"])])
        for row in rows:
            self.uncomputed.pop(row, None)

    def fork(self, step: dict) -> int:
        parent, length = step["of"], step["length"]
        prompt = replace(self.prompts[parent], tokens=tuple(self.known(parent, length)))
        row, outcome = self.manager.fork(self.rows[parent], length, step.get("promised", length), prompt)
        if outcome == 0:
            self.rows[step["as"]], self.prompts[step["as"]] = row, prompt
        return outcome

    def copied(self, step: dict) -> None:
        self.manager.copied()

    def evict(self, step: dict) -> None:
        self.manager.evict(step["blocks"])

    def pin(self, step: dict) -> int:
        return self.manager.pin(step["blocks"])

    def unpin(self, step: dict) -> int:
        return self.manager.unpin(step["blocks"])

    def reset(self, step: dict) -> int:
        return self.manager.reset()

    def bump_epoch(self, step: dict) -> None:
        self.manager.bump_epoch()

    def swap_out(self, step: dict) -> int:
        rows = [self.rows[name] for name in step["rows"]]
        places, outcome, moves = self.manager.swap_out([row in rows for row in range(self.memory["rows"])])
        if outcome == 0:
            self.places |= {name: places[self.rows[name]] for name in step["rows"]}
            self.host_scales |= {host: self.scales[block] for block, host in moves if block in self.scales}
            assert len(moves) == step["moved"], f"moved {moves}: {self.where}"
        return outcome

    def swap_in(self, step: dict) -> int:
        moved = 0
        for name in step["rows"]:
            row, outcome, moves = self.manager.swap_in(self.places[name])
            if outcome:
                return outcome
            self.rows[name] = row
            self.scales |= {block: self.host_scales[host] for host, block in moves if host in self.host_scales}
            moved += len(moves)
        assert moved == step["moved"], f"moved {moved}: {self.where}"
        return 0

    # ---- what is seen ----------------------------------------------------------------------------------------------

    def expect(self, step: dict) -> None:
        view = self.manager.view()
        seen = {
            "free": view["free"],
            "num_free": len(view["free"]),
            "usage": 1 - len(view["free"]) / self.memory["num_blocks"],
            "contents": [block for block, content in enumerate(view["contents"]) if content is not None],
            "copies": [list(pair) for pair in view["copies"]],
            "shared": sum(1 for references in view["references"] if references > 1),
            "faults": sorted(OUTCOMES[fault] for fault in view["faults"]),
        }
        if self.memory.get("host_blocks"):
            seen["host_free"] = self.manager.host_free()
        for name, value in seen.items():
            assert name not in step or step[name] == value, f"{name} is {value} after {self.where}"
        named = {
            "tables": lambda name: view["tables"][0][self.rows[name]],
            "lengths": lambda name: view["lengths"][self.rows[name]],
            "references": lambda block: view["references"][int(block)],
            "statistics": lambda name: view["statistics"][name],
            "slots": lambda name: {p: self.manager.slot(self.rows[name], int(p)) for p in step["slots"][name]},
            "scales_of": lambda name: [self.scales[block] for block in view["tables"][0][self.rows[name]]],
            "page_groups": lambda blocks: self.manager.page_groups(int(blocks)),
        }
        for what, look in named.items():
            for name, value in step.get(what, {}).items():
                assert look(name) == value, f"{what} of {name} is {look(name)} after {self.where}"

    def expect_events(self, step: dict) -> None:
        happened, told = self.manager.events(), step.get("events", [])
        wanted = [(kind, *(tuple(self.tokens.written(runs)) for runs in prefix)) for kind, *prefix in told]
        assert happened == wanted, f"{happened} after {self.where}"


def filled_in(value: Any, given: dict[str, Any]) -> Any:
    """The data with each `$name` replaced."""
    if isinstance(value, str) and value.startswith("$"):
        return given[value[1:]]
    if isinstance(value, list):
        return [filled_in(item, given) for item in value]
    if isinstance(value, dict):
        return {key: filled_in(item, given) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Scenario:
    name: str
    plays: str  # "manager", or what else its file names
    memory: dict[str, Any]
    steps: list[dict]


def scenarios() -> list[Scenario]:
    """Those of all files, each entry of `vary` as one of its own."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        for scenario in content["scenarios"]:
            memory = content.get("memory", {}) | scenario.get("memory", {})
            for given in scenario.get("vary", [{}]):
                case = ", ".join(f"{key} {value}" for key, value in given.items() if not isinstance(value, list))
                name = f"{path.stem}: {scenario['name']}" + (f" ({case})" if case else "")
                steps = filled_in(copy.deepcopy(scenario["steps"]), given)
                found.append(Scenario(name, content.get("plays", "manager"), filled_in(memory, given), steps))
    return found
