"""What a compiled program's devices exchange, read from its operations."""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
_DTYPES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1,
}  # fmt: skip
_OPERATION = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = .*? (?P<kind>{'|'.join(_KINDS)})(?:-start)?\((?P<given>[^)]*)\)"
)
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<dtype>\w+)\[(?P<sizes>[\d,]*)\]")
_WHERE = re.compile(r'op_name="([^"]*)"')
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUP = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\])")


class Collective(NamedTuple):
    """One exchange."""

    kind: str  # as HLO names it, such as all-reduce
    operand_bytes: int  # what each device gives into it
    where: str  # the path of the code that asked for it
    group: int | None = None  # devices that exchange with one another; None for all
    times: int = 1  # how often a run of the program comes by

    @property
    def given_bytes(self) -> int:
        """What each device gives in all."""
        return self.times * self.operand_bytes


def read_collectives(operations: str, trips: int | None = None) -> list[Collective]:
    """The collectives of a program, each one once as it stands in the code, with how often it runs.

    Args:
      operations: as `jax.stages.Compiled.as_text()` lists them.
      trips: rounds of a loop whose number the listing does not tell, as those for TPUs never do.

    Raises:
      ValueError: an operand's size or dtype cannot be read, or exchanges are in a loop of unknown length.
    """
    lines = operations.splitlines()
    arrays = {m["name"]: (m["dtype"], m["sizes"]) for m in map(_DEFINITION.match, lines) if m}
    found = []
    for line, times in zip(lines, _times(lines, trips), strict=True):
        match = _OPERATION.match(line)
        if match is None:
            continue
        operands = [word.strip().split(" ")[-1].lstrip("%") for word in match["given"].split(", ") if "=" not in word]
        missing = [name for name in operands if name not in arrays]
        if missing:
            raise ValueError(f"operations: expected a size for every operand of {match['name']}, got none of {missing}")
        if times is None:
            raise ValueError(f"trips: expected how often the loop around {match['name']} runs, got None")
        where, group = _WHERE.search(line), _GROUP.search(line)
        found.append(
            Collective(
                match["kind"],
                sum(_bytes(*arrays[name]) for name in operands),
                where[1] if where else "",
                (int(group["size"]) if group["size"] else len(group["first"].split(","))) if group else None,
                times,
            )
        )
    return found


def totals(collectives: Sequence[Collective]) -> dict[tuple[str, int], int]:
    """How often which kind of exchange is made with so many bytes of each device."""
    counts = collections.Counter()
    for one in collectives:
        counts[one.kind, one.operand_bytes] += one.times
    return dict(counts)


def _times(lines: Sequence[str], trips: int | None) -> list[int | None]:
    """How often each line runs; None where that depends on a loop of unknown length."""
    place, owner, calls = "", [], collections.defaultdict(list)
    entry = ""
    for line in lines:
        head = _COMPUTATION.match(line)
        if head:
            place = head["name"]
            entry = place if head["entry"] else entry
        owner.append(place)
        rounds: int | None = 1
        if " while(" in line:
            known = _TRIPS.search(line)
            rounds = int(known[1]) if known else trips
        for names in _CALLED.findall(line):
            calls[place] += [(name.strip().lstrip("%"), rounds) for name in names.strip("{}").split(",")]
    times: dict[str, int | None] = {entry: 1}
    _count(entry, 1, calls, times)
    # A listing of one computation, without an entry, runs once.
    return [times.get(name, 0 if entry else 1) for name in owner]


def _count(
    caller: str, factor: int | None, calls: Mapping[str, list[tuple[str, int | None]]], times: dict[str, int | None]
) -> None:
    for callee, rounds in calls.get(caller, ()):
        new = None if factor is None or rounds is None else factor * rounds
        before = times.get(callee, 0)
        times[callee] = None if before is None or new is None else before + new
        _count(callee, new, calls, times)


def _bytes(dtype: str, sizes: str) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"operations: expected operands of {', '.join(_DTYPES)}, got one of dtype {dtype!r}")
    return _DTYPES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
