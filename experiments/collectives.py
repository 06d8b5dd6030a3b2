"""What a compiled program's devices exchange, read from its operations."""

import math
import re
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


class Collective(NamedTuple):
    """One exchange."""

    kind: str  # as HLO names it, such as all-reduce
    operand_bytes: int  # what each device gives into it
    where: str  # the path of the code that asked for it


def read_collectives(operations: str) -> list[Collective]:
    """The collectives of a program, once each as they stand in the code.

    Args:
      operations: as `jax.stages.Compiled.as_text()` lists them.

    Raises:
      ValueError: an operand's size or dtype cannot be read.
    """
    lines = operations.splitlines()
    arrays = {m["name"]: (m["dtype"], m["sizes"]) for m in map(_DEFINITION.match, lines) if m}
    found = []
    for line in lines:
        match = _OPERATION.match(line)
        if match is None:
            continue
        operands = [word.strip().split(" ")[-1].lstrip("%") for word in match["given"].split(", ") if "=" not in word]
        missing = [name for name in operands if name not in arrays]
        if missing:
            raise ValueError(f"operations: expected a size for every operand of {match['name']}, got none of {missing}")
        where = _WHERE.search(line)
        found.append(
            Collective(match["kind"], sum(_bytes(*arrays[name]) for name in operands), where[1] if where else "")
        )
    return found


def _bytes(dtype: str, sizes: str) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"operations: expected operands of {', '.join(_DTYPES)}, got one of dtype {dtype!r}")
    return _DTYPES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
