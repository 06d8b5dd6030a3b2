"""What a compiled program says of itself, whatever device it is for."""

import re
from typing import Any

import jax

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def program_metrics(compiled: jax.stages.Compiled, operations: str | None) -> dict[str, float | int]:
    """`argument_bytes`, `output_bytes` and `temp_bytes` of a program on each device, and its `collectives`.

    Args:
      compiled: the program.
      operations: a listing of its operations as HLO writes them; without one, collectives are left out.
    """
    memory: Any = compiled.memory_analysis()
    report = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    if operations is not None:
        # Not after "= type": the type of a collective of several arrays is a tuple, which has spaces.
        counts = (len(re.findall(rf" {name}(?:-start)?\(", operations)) for name in COLLECTIVES)
        report["collectives"] = sum(counts)
    return report
