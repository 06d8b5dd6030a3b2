"""Does the block manager keep its promises under any operations in any order, and notice every misuse?"""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import polars as pl

from experiments.fuzz_operations import MOST
from experiments.fuzz_scan import Played, play
from experiments.progress import Progress
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.sizes import require_int

DESCRIPTION = "Random operations and misuse of the block manager, with every invariant checked after each of them."
GLOSSARY: Mapping[str, str] = {
    "operations": "Operations, misuse among them, after each of which everything was checked.",
    "faults": "Operations after which something was wrong; the memory began anew after each.",
    "first_fault": "The first of them: step, operation, outcome, and the checks that failed, in how many places.",
    "hit_tokens": "Tokens that new requests found in the cache, since the memory last began anew.",
    "evictions": "Cached blocks that made way for others.",
    "unpublished": "Full blocks that the hash table had no room for; only if all keys collide.",
    "copies": "Blocks that were copied because one of several that shared them wrote.",
    "moves": "Blocks that were moved to the host, or back.",
}
_ALL = "all"
_ENOUGH = 25_000  # operations on a memory, after which the rarest outcome was seen with all seeds that were tried


@dataclasses.dataclass(frozen=True)
class Config:
    """A series of random operations for each of several memories.

    Attributes:
      experiment: `fuzz`.
      seed: of the operations.
      operations: over all memories, shared out evenly.
      memories: what is put to the test, by name. Small ones are short of memory nearly always.
    """

    experiment: Literal["fuzz"] = "fuzz"
    seed: int = 0
    operations: int = 1_000_000
    memories: dict[str, Paged] = dataclasses.field(default_factory=dict)


def resolve(config: Config) -> Config:
    """Refuses what would test nothing.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    require_int("operations", config.operations)
    if not config.memories:
        raise ValueError("memories: expected at least one memory to put to the test, got none")
    if _ALL in config.memories:
        raise ValueError(f"memories: expected names other than {_ALL!r}, which is the sum of all of them")
    for name, memory in config.memories.items():
        if memory.max_chunk is not None and memory.max_chunk < MOST:
            raise ValueError(
                f"memories.{name}.max_chunk: expected at least {MOST}, as so many tokens are stored at once, "
                f"got {memory.max_chunk}"
            )
    return config


def parts(config: Config) -> list[str]:
    """Each memory is tested, and can be resumed, by itself."""
    return list(config.memories)


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Plays the series of every memory.

    Returns:
      For each memory, and for `all` of them, `operations` and `faults`; for each memory besides `first_fault` if there
      was one, what it did, and `<operation>.<OUTCOME>`: how often each operation came to each outcome.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, steps in progress.track(list(_shares(config)), "memories"):
        if run_dir.finished_part(name) is None:
            begin = time.perf_counter()
            played = play(config.memories[name], name, config.seed, steps)
            wall_s = time.perf_counter() - begin
            with run_dir.part(name) as part:
                part.write_json("found.json", _found(played, steps))
                part.write_json("time.json", {"wall_s": wall_s})
        part = run_dir.finished_part(name)
        if part is None:
            raise RuntimeError(f"part {name!r} of {run_dir.path} is missing")
        results[name] = part.read_json("found.json")
    counts = [
        {"memory": name, "operation": operation, "outcome": outcome, "count": found[f"{operation}.{outcome}"]}
        for name, found in results.items()
        for operation, outcome in _counted(found)
    ]
    run_dir.write_parquet("outcomes.parquet", pl.DataFrame(counts))
    total = {metric: sum(found[metric] for found in results.values()) for metric in ("operations", "faults")}
    return {_ALL: total, **results}


def _shares(config: Config) -> Iterator[tuple[str, int]]:
    """How many of the operations are each memory's."""
    share, more = divmod(config.operations, len(config.memories))
    for index, name in enumerate(config.memories):
        yield name, share + (index < more)


def _found(played: Played, steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {"operations": steps, "faults": played.faults}
    if played.first is not None:
        broken = ", ".join(f"{check} ({places})" for check, places in played.first.checks.items())
        first = played.first
        found["first_fault"] = f"step {first.step}: {first.operation} came to {first.outcome.name} and broke {broken}"
    counts = {
        f"{operation}.{outcome.name}": count
        for operation, by_outcome in played.outcomes.items()
        for outcome, count in by_outcome.items()
    }
    return found | played.seen | counts


def _counted(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The operations and outcomes that a memory's results count."""
    for metric in found:
        operation, dot, outcome = metric.partition(".")
        if dot:
            yield operation, outcome


def failed_checks(results: Results) -> list[str]:
    """Faults, and whatever never happened in a long series: one that refuses nothing proves little."""
    failures = []
    for name, found in results.items():
        if name != _ALL and found["faults"]:
            failures.append(f"{name}: {found['faults']:,} operations left something wrong; {found['first_fault']}")
        operations = int(str(found["operations"]))
        failures += [
            f"{name}: {metric} never happened in {operations:,} operations"
            for metric, count in found.items()
            if count == 0 and metric != "faults" and operations >= _ENOUGH
        ]
    return failures


def tables(results: Results) -> list[Table]:
    """A line a memory, and a line an operation with its outcomes over all memories."""
    seen = ("operations", "faults", "hit_tokens", "evictions", "copies", "moves", "unpublished")
    rows = [
        [name, *(f"{found[metric]:,}" if metric in found else "" for metric in seen), str(found.get("first_fault", ""))]
        for name, found in results.items()
    ]
    memories = Table(("memory", *(metric.replace("_", " ") for metric in seen), "first fault"), rows, "Memories")
    sums: dict[str, dict[str, int]] = {}
    for found in results.values():
        for operation, outcome in _counted(found):
            by_outcome = sums.setdefault(operation, dict.fromkeys(Outcome.__members__, 0))
            by_outcome[outcome] += int(str(found[f"{operation}.{outcome}"]))
    lines = [
        [operation, *(f"{count:,}" if count else "" for count in by_outcome.values())]
        for operation, by_outcome in sums.items()
    ]
    return [memories, Table(("operation", *Outcome.__members__), lines, "What the operations of all memories came to")]
