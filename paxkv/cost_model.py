"""The engine's clock: what a step costs in modelled time.

Decisions must not depend on how fast this machine happens to be, or a run could not be repeated. So requests
arrive, and steps pass, on a clock that a model drives: an affine one, `StepCost`, or what hardware allows, `Roofline`
in `paxkv/roofline.py`. Wall-clock time is measured beside it.
"""

import dataclasses
import typing
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Int32

from paxkv.durations import TICK_PARTS, charge, rounded_up
from paxkv.requests import TICK_US
from paxkv.sizes import require_int

NS = TICK_PARTS // (1000 * TICK_US)
"""Parts of a tick in a nanosecond."""
MAX_COST_NS = 3600 * 10**9
"""Largest cost of a step or of one unit of its work; in ticks it leaves int32 most of its range."""


class StepWork(NamedTuple):
    """What a step does, or each of several: i32 of one shape."""

    tokens: Int32[Array, "*steps"]  # computed
    samples: Int32[Array, "*steps"]  # rows whose next token is drawn
    kv_tokens: Int32[Array, "*steps"]  # stored tokens that attention reads, summed over rows that compute anything
    pairs: Int32[Array, "*steps"]  # of a query and a key that it sees, summed over the computed tokens
    sync_map_calls: Int32[Array, "*steps"]  # driver calls that the step waits for
    swapped_blocks: Int32[Array, "*steps"]  # that go to the host or come back


@typing.runtime_checkable
class CostModel(Protocol):
    """How long a step takes. Hashable, so that it can be a static argument of a jitted function."""

    @property
    def map_call_ns(self) -> int:
        """Of a call into the virtual-memory driver."""
        ...

    @property
    def swap_block_ns(self) -> int:
        """Of a block that goes to the host or comes back."""
        ...

    def ticks(self, work: StepWork) -> Int32[Array, "*steps"]:
        """Modelled duration of each step in ticks, at least 1. In integers alone: the same bits on every machine."""
        ...


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

    def ticks(self, work: StepWork) -> Int32[Array, "*steps"]:
        """See `CostModel`. The sum of all charges, rounded up."""
        rates = (
            (self.token_ns, work.tokens),
            (self.kv_token_ns, work.kv_tokens),
            (self.map_call_ns, work.sync_map_calls),
            (self.swap_block_ns, work.swapped_blocks),
        )
        return rounded_up(charge(self.step_ns * NS, *((unit_ns * NS, count) for unit_ns, count in rates)))
