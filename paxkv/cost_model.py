"""The engine's clock: what a step costs in modelled time.

Decisions must not depend on how fast this machine happens to be, or a run could not be repeated. So requests
arrive, and steps pass, on a clock that an affine model drives; wall-clock time is measured beside it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.requests import TICK_US
from paxkv.sizes import require_int

MAX_COST_NS = 3600 * 10**9
"""Largest cost of a step or of one unit of its work; in ticks it leaves int32 most of its range."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StepCost:
    """Nanoseconds of a step: integers, so that the clock is exact on every machine.

    `map_call_ns` is paid for the driver calls that a step has to wait for; those made in the background are
    free, which is the claim of vAttention (ASPLOS'25), section 6. Its 40 microseconds are cuMemMap with
    cuMemSetAccess on a 2 MiB page, as measured there. `swap_block_ns` is paid for each block that goes to the host or
    comes back: at the 25 GB/s or so that a PCIe 4.0 x16 link gives, a block of b bytes takes b / 25 ns.
    """

    step_ns: int = 5_000_000  # reading the weights, launching the kernels
    token_ns: int = 20_000  # each token that is computed
    kv_token_ns: int = 20  # each stored token that attention reads
    map_call_ns: int = 40_000
    swap_block_ns: int = 0

    def __post_init__(self) -> None:
        """Refuses negative costs, and steps that take no time at all."""
        require_int("step_ns", self.step_ns)
        for name in ("token_ns", "kv_token_ns", "map_call_ns", "swap_block_ns"):
            require_int(name, getattr(self, name), minimum=0)
        for name in ("step_ns", "token_ns", "kv_token_ns", "map_call_ns", "swap_block_ns"):
            if getattr(self, name) > MAX_COST_NS:
                raise ValueError(f"{name} must be at most {MAX_COST_NS}, which is an hour, got {getattr(self, name)}")


def step_ticks(
    cost: StepCost,
    tokens: Int32[Array, ""],
    kv_tokens: Int32[Array, ""],
    sync_map_calls: Int32[Array, ""],
    swapped_blocks: Int32[Array, ""] | None = None,
) -> Int32[Array, ""]:
    """Modelled duration of a step in ticks, rounded up.

    Args:
      cost: the model's parameters.
      tokens: tokens computed in the step.
      kv_tokens: stored tokens read, summed over the sequences that compute anything.
      sync_map_calls: driver calls the step waits for.
      swapped_blocks: blocks that go to the host or come back; None for none.
    """
    tick_ns = 1000 * TICK_US
    whole, rest = divmod(cost.step_ns, tick_ns)
    ticks, ns = jnp.int32(whole), jnp.int32(rest)
    charges = [(cost.token_ns, tokens), (cost.kv_token_ns, kv_tokens), (cost.map_call_ns, sync_map_calls)]
    if swapped_blocks is not None:
        charges.append((cost.swap_block_ns, swapped_blocks))
    for unit_ns, count in charges:
        # Not `unit_ns * count`: int32 holds two seconds of nanoseconds. Only remainders are multiplied as such.
        whole, rest = divmod(unit_ns, tick_ns)
        ticks += whole * count + rest * (count // tick_ns)
        ns += rest * (count % tick_ns)
    return ticks + (ns + (tick_ns - 1)) // tick_ns
