"""What a step does, how long it takes, and what is recorded of it: the same for the engine and the simulator."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.cost_model import CostModel, StepWork
from paxkv.memory import KVMemory, Usage
from paxkv.queue import next_arrival
from paxkv.requests import Requests, final_lengths
from paxkv.scheduler_state import Plan, SchedulerState
from paxkv.swap_state import Moves


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What happened in a step; all i32[]. Usage is taken at its peak, after memory grew and before it shrank."""

    clock: jax.Array  # ticks, at the start
    ticks: jax.Array  # modelled duration; of a step in which nobody runs, the time to the next arrival
    running: jax.Array
    waiting: jax.Array  # arrived and without a row
    new_tokens: jax.Array  # 0: nothing was there to do, or all who run wait for others of their group
    prefill_tokens: jax.Array  # of those, tokens of requests that had more than one to compute
    sampled: jax.Array
    admitted: jax.Array
    refused: jax.Array
    preempted: jax.Array
    recompute_tokens: jax.Array
    hit_tokens: jax.Array  # that admitted requests found stored already
    ended: jax.Array
    kv_tokens: jax.Array  # stored tokens that attention read
    usage: Usage
    sync_map_calls: jax.Array
    background_map_calls: jax.Array
    unmap_calls: jax.Array
    swapped_out_blocks: jax.Array  # copied to the host
    swapped_in_blocks: jax.Array
    copied_blocks: jax.Array  # because a sequence writes into one that others share


def step_work(memory: KVMemory[Any], before: SchedulerState, scheduled: SchedulerState, plan: Plan) -> StepWork:
    """What the planned step has to do.

    Args:
      memory: the memory.
      before: the state before the step was scheduled.
      scheduled: the state that `schedule` returned.
      plan: its plan.
    """
    new = plan.new_tokens
    lengths = memory.seqs(scheduled.memory).lengths
    return StepWork(
        tokens=jnp.sum(new),
        samples=jnp.sum(plan.samples, dtype=jnp.int32),
        kv_tokens=jnp.sum(jnp.where(new > 0, lengths, 0)),
        pairs=jnp.sum(new * plan.starts + new * (new + 1) // 2),
        sync_map_calls=memory.map_calls(scheduled.memory).sync - memory.map_calls(before.memory).sync,
        swapped_blocks=_count(plan.moves_out) + _count(plan.moves_in),
    )


def step_ticks(
    memory: KVMemory[Any], cost: CostModel, requests: Requests, scheduled: SchedulerState, work: StepWork
) -> Int32[Array, ""]:
    """How long the step takes; if nobody runs, until the next request arrives."""
    idle = ~jnp.any(memory.seqs(scheduled.memory).active)
    return jnp.where(idle, next_arrival(requests, scheduled) - scheduled.clock, cost.ticks(work))


def record_step(
    memory: KVMemory[Any],
    requests: Requests,
    before: SchedulerState,
    scheduled: SchedulerState,
    plan: Plan,
    work: StepWork,
    after: SchedulerState,
    copied_blocks: Int32[Array, ""],
) -> StepRecord:
    """What is to be told of a step that led from `before` over `scheduled` to `after`, the state once it was booked."""
    calls = jax.tree.map(lambda a, b: a - b, memory.map_calls(after.memory), memory.map_calls(before.memory))
    row_request = scheduled.row_request
    return StepRecord(
        clock=scheduled.clock,
        ticks=after.clock - scheduled.clock,
        running=jnp.sum(row_request < requests.count, dtype=jnp.int32),
        waiting=scheduled.queued,
        new_tokens=work.tokens,
        prefill_tokens=jnp.sum(jnp.where(plan.samples & (plan.new_tokens == 1), 0, plan.new_tokens)),
        sampled=work.samples,
        admitted=plan.admitted,
        refused=plan.refused,
        preempted=plan.preempted,
        recompute_tokens=plan.recompute_tokens,
        hit_tokens=plan.hit_tokens,
        ended=jnp.sum(row_request != after.row_request, dtype=jnp.int32),
        kv_tokens=work.kv_tokens,
        usage=memory.usage(scheduled.memory, final_lengths(requests, memory.max_len, row_request)),
        sync_map_calls=calls.sync,
        background_map_calls=calls.background,
        unmap_calls=calls.unmap,
        swapped_out_blocks=_count(plan.moves_out),
        swapped_in_blocks=_count(plan.moves_in),
        copied_blocks=copied_blocks,
    )


def _count(moves: Moves | None) -> Int32[Array, ""]:
    return jnp.int32(0) if moves is None else moves.count
