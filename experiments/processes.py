"""Several processes that run one experiment together: which one this is, and whether all were started alike.

All run the same command; process 0 writes the run.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.errors import UserError

_MAX_NAMED = 4  # differences of a process that are told
_FLAGS = ("processes", "process", "coordinator")


@dataclasses.dataclass(frozen=True)
class Group:
    """Which of how many processes this one is, and where they meet."""

    count: int = 1
    index: int = 0
    coordinator: str = ""  # host:port of process 0; the port after it is the lifeline's

    @property
    def address(self) -> tuple[str, int]:
        """Where the lifeline is."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port) + 1


ALONE = Group()


def group_of(flags: dict[str, str], environment: Mapping[str, str] = os.environ) -> Group:
    """Takes `--processes`, `--process` and `--coordinator` out of a command's flags, or `PAXKV_PROCESSES` and so on.

    Raises:
      UserError: one of them is missing or out of range.
    """
    given = {name: flags.pop(name, environment.get(f"PAXKV_{name.upper()}", "")) for name in _FLAGS}
    if not any(given.values()):
        return ALONE
    if missing := [name for name, value in given.items() if not value]:
        raise UserError(f"several processes need --processes, --process and --coordinator, got no {', '.join(missing)}")
    host, _, port = given["coordinator"].rpartition(":")
    if not host or not _is_number(port) or not 0 < int(port) < 65_535:
        raise UserError(
            f"coordinator: expected host:port of process 0, such as localhost:12355, got {given['coordinator']!r}"
        )
    if not _is_number(given["processes"]) or int(given["processes"]) < 1:
        raise UserError(f"processes: expected a number, at least 1, got {given['processes']!r}")
    count = int(given["processes"])
    if not _is_number(given["process"]) or int(given["process"]) >= count:
        raise UserError(f"process: expected a number from 0 to {count - 1}, got {given['process']!r}")
    return Group(count, int(given["process"]), given["coordinator"])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def told_apart(runs: Sequence[Mapping[str, Any]]) -> str:
    """Which processes run something else than process 0, and what of it differs; nothing if all run the same.

    Args:
      runs: of each process, what decides its programs: plain values, perhaps in mappings.
    """
    first, *others = ({key: json.dumps(value) for key, value in _flat(run)} for run in runs)
    found = []
    for process, own in enumerate(others, 1):
        keys = [key for key in first | own if first.get(key) != own.get(key)]
        named = [f"{key} {own.get(key, 'nothing')} instead of {first.get(key, 'nothing')}" for key in keys[:_MAX_NAMED]]
        if len(keys) > _MAX_NAMED:
            named.append(f"{len(keys) - _MAX_NAMED} more")
        if named:
            found.append(f"process {process} of {len(runs)} runs something else than process 0: {', '.join(named)}")
    return "; ".join(found)


def _flat(run: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under its dotted key."""
    for name, value in run.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
