"""The engine under a cost model: a whole trace in one loop on the device, without weights.

The scheduler and the memories are those of the engine, so are the decisions. What is left out is the model: nobody
looks at tokens, so a request ends with the output that it asked for.

Between an arrival and the end of some request every step is like the one before, but for lengths and time. Such steady
steps are taken in strides: their times and records are computed as vectors, and memory grows by all of them at once.
What comes out is what single steps give, bit for bit, but for which of equal blocks serves whom.
"""

import dataclasses
import enum
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from paxkv.control_flow import run_if
from paxkv.cost_model import CostModel, StepCost, StepWork
from paxkv.kv_cache import KVCache
from paxkv.memory import KVMemory, Limits, Usage
from paxkv.outcomes import raise_on_fault
from paxkv.policy import Choices, Policy, choices, require_schedulable
from paxkv.queue import first_waiting
from paxkv.requests import TICK_US, Progress, Requests, Status, final_lengths
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import Plan, SchedulerState, by_row, init_scheduler, known_tokens
from paxkv.sizes import require_int
from paxkv.steps import StepRecord, record_step, step_ticks, step_work

_FOREVER = 2**31 - 1
_NO_TOKEN = -2
MOST_RECORDS = 2**24
"""Steps that a dispatch can record; on the device one takes some hundred bytes."""


class Halt(enum.IntEnum):
    """Why a simulation cannot go on."""

    NONE = 0
    STUCK = 1  # requests are left, and a step changed nothing: so will all that follow
    CLOCK = 2  # it passed what int32 can count


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Simulator:
    """Everything about a simulated server that does not change while it runs.

    Attributes:
      memory: how keys and values are handed out.
      token_budget: most tokens computed in a step, at least `memory.rows`; with `memory.max_len` it bounds the pairs of
        a query and a key, which int32 counts.
      cost: how long a step takes.
      policy: what the scheduler may choose.
      max_stride: most steps that are taken at once; 1 for each by itself. What it costs grows with it.
      max_records: steps of which there is room for records, in one dispatch; with `max_stride` at most `MOST_RECORDS`.
    """

    memory: KVMemory[Any]
    token_budget: int
    cost: CostModel = dataclasses.field(default_factory=StepCost)
    policy: Policy = dataclasses.field(default_factory=Policy)
    max_stride: int = 8
    max_records: int = 2**16

    def __post_init__(self) -> None:
        """Refuses what the scheduler could not serve with, and strides of no step."""
        require_schedulable(self.memory, self.token_budget, self.policy)
        if (pairs := self.token_budget * self.memory.max_len) >= 2**31:
            raise ValueError(
                f"token_budget: expected less than 2**31 in all when multiplied by max_len = {self.memory.max_len}, "
                f"which bounds what attention multiplies in a step, got {self.token_budget}, {pairs:,} in all; lower it"
            )
        room = require_int("max_stride", self.max_stride) + require_int("max_records", self.max_records)
        if room > MOST_RECORDS:
            raise ValueError(
                f"max_records, max_stride: expected at most {MOST_RECORDS:,} together, for which there is room, got "
                f"{self.max_records:,} and {self.max_stride:,}; lower the larger one"
            )


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulated server, and what happened since its records were last taken."""

    scheduler: SchedulerState
    records: StepRecord  # i32[max_records + max_stride]; what is beyond `count` means nothing
    count: jax.Array  # i32[]; steps recorded
    halt: jax.Array  # i32[]; Halt
    turns: jax.Array  # i32[]; strides taken since the start, for whoever wants to know how long they are


def init_simulation(simulator: Simulator, requests: Requests, limits: Limits | None = None) -> Simulation:
    """Nothing stored, nobody started; all of the memory may be used unless `limits` says otherwise.

    Raises:
      ValueError: if requests ask for what needs logits, or bring tokens that a prefix cache would have to know; or
        more of the memory is to be used than there is.
    """
    units = simulator.memory.num_units
    if limits is not None and not 1 <= int(limits.units) <= units:
        raise ValueError(f"limits: expected 1 to {units} units, which the memory has, got {int(limits.units)}")
    if requests.beams or requests.stop_token >= 0:
        what = "beams" if requests.beams else "a stop token"
        raise ValueError(f"requests: expected none with {what}, as a simulator has no logits, got some")
    if requests.delivered is not None and simulator.memory.publishes:
        raise ValueError("delivered: expected nothing with a prefix cache, whose chains begin with what was computed")
    scheduler = init_scheduler(simulator.memory, requests, limits)
    size = simulator.max_records + simulator.max_stride
    names = [field.name for field in dataclasses.fields(StepRecord) if field.name != "usage"]
    usage = Usage(*(jnp.zeros(size, jnp.int32) for _ in dataclasses.fields(Usage)))
    return Simulation(
        scheduler=scheduler,
        records=StepRecord(usage=usage, **{name: jnp.zeros(size, jnp.int32) for name in names}),
        count=jnp.int32(0),
        halt=jnp.int32(Halt.NONE),
        turns=jnp.int32(0),
    )


@jax.jit(static_argnames="simulator", donate_argnames="simulation")
def run(
    simulator: Simulator,
    requests: Requests,
    simulation: Simulation,
    transcripts: Int32[Array, "requests width"] | None = None,
    choice: Choices | None = None,
) -> Simulation:
    """Runs until all requests have ended, the room for records is used up, or nothing can go on. Donates `simulation`.

    Args:
      simulator: the server.
      requests: what is asked of it.
      simulation: where it stands. Its records are overwritten.
      transcripts: prompt and output of each request, all that it will come to; needed if memory shares what is equal.
      choice: the policy as values, instead of the simulator's.
    """
    policy = choices(simulator.policy) if choice is None else choice

    def goes_on(now: Simulation) -> Bool[Array, ""]:
        return (now.count < simulator.max_records) & (now.halt == Halt.NONE) & ~is_finished(requests, now.scheduler)

    def turn(now: Simulation) -> Simulation:
        return _turn(simulator, policy, requests, now, transcripts)

    return jax.lax.while_loop(goes_on, turn, dataclasses.replace(simulation, count=jnp.zeros_like(simulation.count)))


class Simulated(NamedTuple):
    """Everything that happened, on the host."""

    steps: StepRecord  # i32[steps] arrays of NumPy
    progress: Progress  # i32[requests] arrays of NumPy
    turns: int  # in how many strides the steps were taken


def simulate(
    simulator: Simulator,
    requests: Requests,
    limits: Limits | None = None,
    transcripts: Int32[Array, "requests width"] | None = None,
    choice: Choices | None = None,
    on_dispatch: Callable[[int], Any] = lambda newly_ended: None,
) -> Simulated:
    """Host side: runs until every request has ended.

    Args:
      simulator: the server.
      requests: what is asked of it.
      limits: how much of the memory may be used; None for all.
      transcripts: as for `run`.
      choice: as for `run`.
      on_dispatch: called with the number of requests that have ended since it was called last.

    Raises:
      ValueError: the modelled clock ran out.
      RuntimeError: requests are left, and nothing will ever happen to them.
      MemoryFaultError: the memory recorded a fault.
    """
    simulation = init_simulation(simulator, requests, limits)
    parts, ended = [], 0
    while True:
        simulation = run(simulator, requests, simulation, transcripts, choice)
        parts.append(take_records(simulation.records, int(simulation.count)))
        require_sound(simulator, simulation)
        progress = jax.tree.map(np.asarray, simulation.scheduler.progress)
        before, ended = ended, int(np.sum(progress.status == Status.ENDED))
        on_dispatch(ended - before)
        if bool(is_finished(requests, simulation.scheduler)):
            break
    steps = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return Simulated(steps, progress, int(simulation.turns))


def take_records(records: StepRecord, count: int) -> StepRecord:
    """Host side: the records that mean something, as arrays of NumPy."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], records)


def require_sound(simulator: Simulator, simulation: Simulation) -> None:
    """Host side: refuses a simulation that has halted, or whose memory has recorded a fault. See `simulate`."""
    raise_on_fault(simulator.memory.seqs(simulation.scheduler.memory).faults)
    match Halt(int(simulation.halt)):
        case Halt.CLOCK:
            limit_s = _FOREVER * TICK_US // 10**6
            raise ValueError(
                f"the modelled clock passed {limit_s} s, the most that it can count; simulate fewer requests, or lower "
                "the workload's time scale or the cost of a step"
            )
        case Halt.STUCK:
            raise RuntimeError(
                f"{int(simulation.scheduler.queued)} requests wait at {int(simulation.scheduler.clock)} ticks, nobody "
                "is admitted, and nobody who runs computes anything"
            )


def is_finished(requests: Requests, state: SchedulerState) -> Bool[Array, ""]:
    """Whether every request has ended."""
    to_come = first_waiting(requests, state, state.arrived) < requests.count
    return ~to_come & (state.queued == 0) & ~jnp.any(state.row_request < requests.count)


def _turn(
    simulator: Simulator,
    policy: Choices,
    requests: Requests,
    now: Simulation,
    transcripts: Int32[Array, "requests width"] | None,
) -> Simulation:
    """One step, and as many as follow from it without a decision."""
    before = now.scheduler
    after, first, plan = _step(simulator, policy, requests, before, transcripts)
    no_decision = (first.admitted == 0) & (first.refused == 0) & (first.preempted == 0)
    nothing = (first.new_tokens == 0) & no_decision & ((first.ticks == 0) | (first.running > 0))
    halt = jnp.where(after.clock < before.clock, Halt.CLOCK, jnp.where(nothing, Halt.STUCK, Halt.NONE))
    records, more = jax.tree.map(lambda leaf: leaf[None], first), jnp.int32(0)
    if simulator.max_stride > 1 and simulator.memory.has_steady_steps:
        after, following, more = _stride(simulator, requests, after, plan)
        records = jax.tree.map(lambda one, rest: jnp.concatenate([one, rest]), records, following)
    return Simulation(
        scheduler=after,
        records=jax.tree.map(
            lambda all_, new: jax.lax.dynamic_update_slice(all_, new, (now.count,)), now.records, records
        ),
        count=now.count + 1 + more,
        halt=halt.astype(jnp.int32),
        turns=now.turns + 1,
    )


def _step(
    simulator: Simulator,
    policy: Choices,
    requests: Requests,
    before: SchedulerState,
    transcripts: Int32[Array, "requests width"] | None,
) -> tuple[SchedulerState, StepRecord, Plan]:
    """One step of the server, as the engine takes it."""
    memory, budget = simulator.memory, simulator.token_budget
    scheduled, plan = schedule(memory, requests, before, budget, policy, transcripts)
    memory_state, _, copied = memory.settle(scheduled.memory, KVCache(layers=()))
    scheduled = dataclasses.replace(scheduled, memory=memory_state)
    work = step_work(memory, before, scheduled, plan)
    now = scheduled.clock + step_ticks(memory, simulator.cost, requests, scheduled, work)
    no_tokens = jnp.full(memory.rows, _NO_TOKEN, jnp.int32)
    after = commit(memory, requests, scheduled, plan, no_tokens, now, transcripts, budget)
    return after, record_step(memory, requests, before, scheduled, plan, work, after, copied), plan


def _stride(
    simulator: Simulator, requests: Requests, state: SchedulerState, plan: Plan
) -> tuple[SchedulerState, StepRecord, Int32[Array, ""]]:
    """The steps that follow one without a decision: everybody who runs gets a token, and nobody ends.

    Returns:
      The state after them, the records of `max_stride - 1` steps, and how many of them were taken.
    """
    memory, most = simulator.memory, simulator.max_stride - 1
    row_request, seqs = state.row_request, memory.seqs(state.memory)
    running = row_request < requests.count
    num_running = jnp.sum(running, dtype=jnp.int32)

    # The step after the i-th one finds that many tokens more, and starts when they are done.
    ahead = jnp.arange(1, most + 1, dtype=jnp.int32)
    read = jnp.sum(seqs.lengths) + ahead * num_running
    zeros = jnp.zeros_like(ahead)
    everyone = jnp.broadcast_to(num_running, ahead.shape)
    work = StepWork(everyone, everyone, read, read, zeros, zeros)
    ends = state.clock + jnp.cumsum(simulator.cost.ticks(work))
    starts = jnp.concatenate([state.clock[None], ends[:-1]])

    known = known_tokens(requests, state.progress, row_request)
    generated = by_row(state.progress.generated, row_request, 0)
    left = jnp.minimum(by_row(requests.output_lens, row_request, _FOREVER) - generated, memory.max_len - known)
    following = first_waiting(requests, state, state.arrived)
    arrival = requests.arrivals.at[following].get(mode="fill", fill_value=_FOREVER)
    # The steps up to the first that begins too late, or in which the clock passes what int32 can count.
    in_time = (starts < arrival) & (ends > starts)
    before_arrival = jnp.sum(jnp.cumprod(in_time.astype(jnp.int32)))
    # Whoever samples now has caught up, and whoever waits will be told to wait again as long as nobody leaves.
    all_decode = jnp.all(jnp.where(running, plan.samples, ~plan.samples)) & jnp.any(running)
    is_steady = all_decode & plan.closed
    steps = jnp.minimum(before_arrival, jnp.min(jnp.where(running, left, _FOREVER)) - 1)
    steps = memory.steady_steps(state.memory, running, jnp.where(is_steady, steps, 0))

    final = final_lengths(requests, memory.max_len, row_request)
    used = jax.vmap(lambda steps: memory.usage(memory.look_ahead(state.memory, running, steps), final))(ahead)
    records = StepRecord(
        clock=starts,
        ticks=ends - starts,
        running=everyone,
        waiting=jnp.broadcast_to(state.queued, ahead.shape),
        new_tokens=everyone,
        prefill_tokens=zeros,
        sampled=everyone,
        admitted=zeros,
        refused=zeros,
        preempted=zeros,
        recompute_tokens=zeros,
        hit_tokens=zeros,
        ended=zeros,
        kv_tokens=read,
        usage=used,
        sync_map_calls=zeros,
        background_map_calls=zeros,
        unmap_calls=zeros,
        swapped_out_blocks=zeros,
        swapped_in_blocks=zeros,
        copied_blocks=zeros,
    )

    def take(state: SchedulerState) -> SchedulerState:
        memory_state, _ = memory.append(state.memory, jnp.where(running, steps, 0), most)
        produced = state.progress.generated.at[row_request].add(steps, mode="drop")
        return dataclasses.replace(
            state, memory=memory_state, progress=dataclasses.replace(state.progress, generated=produced)
        )

    state = run_if(steps > 0, take, state)
    clock = jnp.where(steps > 0, ends[jnp.maximum(steps, 1) - 1], state.clock)
    return dataclasses.replace(state, clock=clock), records, steps
