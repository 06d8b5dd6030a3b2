"""What a compiled program says of itself, whatever device it is for."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.compat import absent_device
from pallas_kernels.targets import Target

_PLATFORMS: Mapping[str, str] = {"gpu": "cuda", "tpu": "tpu"}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def compile_absent(
    function: Callable[..., Any], arguments: Sequence[Any], target: Target, *, donate_argnums: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles `function` for devices that are not there.

    Args:
      function: to be compiled, jitted or not.
      arguments: trees of shapes and dtypes that lie on such devices.
      target: what the devices are.
      donate_argnums: of the arguments that the function takes over.
    """
    with absent_device(target.device_kind, target.num_cores, target.platform):
        traced = jax.jit(function, donate_argnums=tuple(donate_argnums)).trace(*arguments)
        return traced.lower(lowering_platforms=(_PLATFORMS[target.platform],)).compile()


def program_metrics(compiled: jax.stages.Compiled, operations: str | None) -> dict[str, float | int]:
    """What a program needs on each device, in `_bytes`, and its `collectives`.

    These are `argument`, `output`, of which `alias` lie in the place of arguments, `temp`, and `code` where the
    compiler tells.

    Args:
      compiled: the program.
      operations: a listing of its operations as HLO writes them; without one, collectives are left out.
    """
    memory: Any = compiled.memory_analysis()
    report = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
    if operations is not None:
        # Not after "= type": the type of a collective of several arrays is a tuple, which has spaces.
        counts = (len(re.findall(rf" {name}(?:-start)?\(", operations)) for name in COLLECTIVES)
        report["collectives"] = sum(counts)
    return report
