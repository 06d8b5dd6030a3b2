"""What a compiled program says of itself, whatever device it is for."""

import re
from typing import Any

import jax

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def program_metrics(compiled: jax.stages.Compiled, operations: str | None = None) -> dict[str, float | int]:
    """`argument_bytes`, `output_bytes` and `temp_bytes` of a program on each device, and its `collectives`.

    Args:
      compiled: the program.
      operations: a listing that has all operations as HLO writes them; what the program shows of itself if None.
    """
    memory: Any = compiled.memory_analysis()
    text = operations or compiled.as_text() or ""
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        # Not after "= type": the type of a collective of several arrays is a tuple, which has spaces.
        "collectives": sum(len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES),
    }
