"""The scheduler: who computes how many tokens in the next step, and who has to wait for it.

A step in the life of a request:

1. It arrives: its arrival lies behind the clock, its status is WAITING.
2. First come, first served: the earliest waiting request asks memory for a row and for room for all its tokens.
   OK gives it a row, NEVER ends it with a reason, LATER stops admission until something changes.
3. Each step the running requests, oldest first, share the token budget. A request that is behind computes as many
   of its known tokens as the budget lets it (chunked prefill), one that has caught up computes one (decode).
4. If memory cannot hold what they are about to store, the requests that arrived last are preempted until it can:
   their memory is released, their output is kept, and they wait to be recomputed. Nobody is admitted in that step.
5. A request that has computed all its known tokens samples the next one.
6. It ends with a reason, and its memory is released.

Everything here is a pure function of state, and knows nothing of tokens or tensors: the engine and the simulator
run the same code.
"""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.memory import Ask, KVMemory
from paxkv.outcomes import Outcome
from paxkv.requests import Progress, Reason, Requests, Status, final_lengths, init_progress


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """Memory, the requests' progress, and which request holds which row."""

    memory: Any  # state of a KVMemory
    progress: Progress
    row_request: jax.Array  # i32[rows]; the sentinel requests.count for a free row
    clock: jax.Array  # i32[]; ticks


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What the next step computes, and what scheduling it took."""

    new_tokens: jax.Array  # i32[rows]; tokens each row computes
    starts: jax.Array  # i32[rows]; tokens stored before the step: the position of a row's first new token
    samples: jax.Array  # bool[rows]; rows that have then computed all they know, and sample
    admitted: jax.Array  # i32[]
    refused: jax.Array  # i32[]
    preempted: jax.Array  # i32[]
    recompute_tokens: jax.Array  # i32[]; stored tokens that preemption threw away


def init_scheduler(memory: KVMemory[Any], requests: Requests) -> SchedulerState:
    """Empty memory, nobody started, clock at zero."""
    return SchedulerState(
        memory=memory.init(),
        progress=init_progress(requests.count),
        row_request=jnp.full(memory.rows, requests.count, jnp.int32),
        clock=jnp.int32(0),
    )


def known_tokens(requests: Requests, progress: Progress, row_request: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Prompt and output so far of the request in each row, 0 for a free row."""
    known = requests.prompt_lens + progress.generated
    return known.at[row_request].get(mode="fill", fill_value=0)


def schedule(
    memory: KVMemory[Any], requests: Requests, state: SchedulerState, token_budget: int
) -> tuple[SchedulerState, Plan]:
    """Decides the next step and makes room for it: preempts, admits, and appends to memory.

    Args:
      memory: the memory.
      requests: the workload.
      state: the state before the step.
      token_budget: most tokens that a step computes, at least `memory.rows`.
    """
    oldest_first = jnp.argsort(state.row_request)  # a request's id is its place in the order of arrival
    backlog = known_tokens(requests, state.progress, state.row_request) - memory.seqs(state.memory).lengths
    granted = _share_budget(backlog, oldest_first, token_budget)

    victims = _victims(memory, state, granted, oldest_first)
    state, recompute_tokens = _preempt(memory, state, victims)
    granted = jnp.where(victims, 0, granted)
    preempted = jnp.sum(victims, dtype=jnp.int32)

    # Those who run take what they need before anybody is admitted to the rest. The outcomes are also sticky faults.
    starts = memory.seqs(state.memory).lengths
    state = dataclasses.replace(state, memory=memory.append(state.memory, granted, token_budget)[0])
    state, granted_new, admitted, refused = _admit(
        memory, requests, state, token_budget - jnp.sum(granted), closed=preempted > 0
    )
    state = dataclasses.replace(state, memory=memory.append(state.memory, granted_new, token_budget)[0])
    granted += granted_new
    known = known_tokens(requests, state.progress, state.row_request)
    return state, Plan(
        new_tokens=granted,
        starts=starts,
        samples=(granted > 0) & (starts + granted == known),
        admitted=admitted,
        refused=refused,
        preempted=preempted,
        recompute_tokens=recompute_tokens,
    )


def _share_budget(
    backlog: Int32[Array, " rows"], oldest_first: Int32[Array, " rows"], token_budget: int
) -> Int32[Array, " rows"]:
    """Tokens for each row: the oldest request takes what it needs, the next what is left, and so on."""
    wanted = backlog[oldest_first]
    before = jnp.cumsum(wanted) - wanted
    return jnp.zeros_like(backlog).at[oldest_first].set(jnp.clip(token_budget - before, 0, wanted))


def _victims(
    memory: KVMemory[Any],
    state: SchedulerState,
    granted: Int32[Array, " rows"],
    oldest_first: Int32[Array, " rows"],
) -> Bool[Array, " rows"]:
    """The fewest rows, youngest first, without which memory can hold what the others are about to store.

    Preempting one request after another until the rest fits comes to the same as asking, for every number of
    survivors at once, whether their demand is covered by what is available and what the others would give
    back: both only get easier as survivors leave.
    """
    rows = memory.rows
    lengths = memory.seqs(state.memory).lengths
    demand = memory.demand(state.memory, lengths + granted)[oldest_first]
    held = memory.held(state.memory)[oldest_first]
    needed = jnp.cumsum(demand)
    given_back = jnp.sum(held) - jnp.cumsum(held)
    fits = needed <= memory.available(state.memory) + given_back
    survives = jnp.zeros(rows, jnp.bool).at[oldest_first].set(fits)
    return (state.row_request < state.progress.status.shape[0]) & ~survives


def _preempt(
    memory: KVMemory[Any], state: SchedulerState, victims: Bool[Array, " rows"]
) -> tuple[SchedulerState, Int32[Array, ""]]:
    """Takes the victims' memory and sends them back to the queue, where their early arrival puts them first."""
    nobody = state.progress.status.shape[0]
    at = jnp.where(victims, state.row_request, nobody)
    lost = jnp.sum(jnp.where(victims, memory.seqs(state.memory).lengths, 0), dtype=jnp.int32)
    progress = dataclasses.replace(
        state.progress,
        status=state.progress.status.at[at].set(Status.WAITING, mode="drop"),
        preemptions=state.progress.preemptions.at[at].add(1, mode="drop"),
    )
    return dataclasses.replace(
        state,
        memory=memory.release(state.memory, victims),
        progress=progress,
        row_request=jnp.where(victims, nobody, state.row_request),
    ), lost


def _next_waiting(requests: Requests, state: SchedulerState) -> Int32[Array, ""]:
    """The earliest request that has arrived and waits, `requests.count` if there is none."""
    waiting = (state.progress.status == Status.WAITING) & (requests.arrivals <= state.clock)
    first = jnp.argmax(waiting).astype(jnp.int32)
    return jnp.where(waiting[first], first, requests.count)


def _admit(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    token_budget: Int32[Array, ""],
    closed: Bool[Array, ""],
) -> tuple[SchedulerState, Int32[Array, " rows"], Int32[Array, ""], Int32[Array, ""]]:
    """Admits waiting requests in order until one has to wait, the budget is spent, or nobody is left.

    The queue is strictly first come, first served: a small request never overtakes a large one, so the large
    one is sure to be served.

    Returns:
      The state, the tokens granted to each new row, and how many requests were admitted and refused.
    """
    nobody = requests.count
    final = final_lengths(requests, memory.max_len)

    def is_open(carry: tuple) -> Bool[Array, ""]:
        _, granted, _, _, closed, candidate = carry
        return ~closed & (candidate < nobody) & (jnp.sum(granted) < token_budget)

    def try_one(carry: tuple) -> tuple:
        state, granted, admitted, refused, _, candidate = carry
        progress = state.progress
        known = requests.prompt_lens[candidate] + progress.generated[candidate]
        no_output = requests.output_lens[candidate] == 0
        too_long = requests.prompt_lens[candidate] >= memory.max_len
        impossible = memory.max_len + 1  # longer than any sequence may be, so memory answers NEVER
        ask = Ask(
            known_tokens=known,
            prompt_tokens=requests.prompt_lens[candidate],
            final_tokens=jnp.where(no_output | too_long, impossible, final[candidate]),
        )
        memory_state, row, outcome = memory.admit(state.memory, ask)
        ok, ends = outcome == Outcome.OK, outcome == Outcome.NEVER
        reason = jnp.where(too_long, Reason.REFUSED_TOO_LONG, Reason.REFUSED_NEVER_FITS)
        reason = jnp.where(no_output, Reason.NO_OUTPUT, reason)
        admitted_at = progress.admitted_at[candidate]
        at_end = jnp.where(ends, candidate, nobody)
        at_row = jnp.where(ok, row, memory.rows)
        progress = dataclasses.replace(
            progress,
            status=progress.status.at[candidate].set(
                jnp.where(ok, Status.RUNNING, jnp.where(ends, Status.ENDED, Status.WAITING))
            ),
            reason=progress.reason.at[at_end].set(reason, mode="drop"),
            ended_at=progress.ended_at.at[at_end].set(state.clock, mode="drop"),
            admitted_at=progress.admitted_at.at[candidate].set(
                jnp.where(ok & (admitted_at < 0), state.clock, admitted_at)
            ),
        )
        state = SchedulerState(
            memory=memory_state,
            progress=progress,
            row_request=state.row_request.at[at_row].set(candidate, mode="drop"),
            clock=state.clock,
        )
        left = token_budget - jnp.sum(granted)
        granted = granted.at[at_row].set(jnp.minimum(known, left), mode="drop")
        closed = ~ok & ~ends
        return (
            state,
            granted,
            admitted + ok.astype(jnp.int32),
            refused + ends.astype(jnp.int32),
            closed,
            _next_waiting(requests, state),
        )

    zero = jnp.int32(0)
    granted = jnp.zeros(memory.rows, jnp.int32)
    start = (state, granted, zero, zero, closed, _next_waiting(requests, state))
    state, granted, admitted, refused, _, _ = jax.lax.while_loop(is_open, try_one, start)
    return state, granted, admitted, refused


def commit(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    plan: Plan,
    tokens: Int32[Array, " rows"],
    now: Int32[Array, ""],
) -> SchedulerState:
    """Books the sampled tokens at time `now`, ends requests that are done, and releases their memory.

    Args:
      memory: the memory.
      requests: the workload.
      state: the state that `schedule` returned.
      plan: the plan that `schedule` returned.
      tokens: the sampled token of each row; ignored where `plan.samples` is false.
      now: the clock after the step.
    """
    progress = state.progress
    nobody = requests.count
    at = jnp.where(plan.samples, state.row_request, nobody)
    generated = progress.generated.at[at].add(1, mode="drop")
    first = jnp.where(generated.at[at].get(mode="fill", fill_value=0) == 1, at, nobody)

    produced = generated.at[at].get(mode="fill", fill_value=0)
    asked = requests.output_lens.at[at].get(mode="fill", fill_value=1)
    total = requests.prompt_lens.at[at].get(mode="fill", fill_value=0) + produced
    reason = jnp.full(memory.rows, Reason.NONE, jnp.int32)
    reason = jnp.where(total >= memory.max_len, Reason.MAX_MODEL_LEN, reason)
    reason = jnp.where(produced >= asked, Reason.LENGTH, reason)
    reason = jnp.where(tokens == requests.stop_token, Reason.STOP_TOKEN, reason)
    done = plan.samples & (reason != Reason.NONE)
    ended = jnp.where(done, at, nobody)

    progress = dataclasses.replace(
        progress,
        generated=generated,
        first_token_at=progress.first_token_at.at[first].set(now, mode="drop"),
        status=progress.status.at[ended].set(Status.ENDED, mode="drop"),
        reason=progress.reason.at[ended].set(reason, mode="drop"),
        ended_at=progress.ended_at.at[ended].set(now, mode="drop"),
    )
    return SchedulerState(
        memory=memory.background(memory.release(state.memory, done)),
        progress=progress,
        row_request=jnp.where(done, nobody, state.row_request),
        clock=now,
    )


def next_arrival(requests: Requests, state: SchedulerState) -> Int32[Array, ""]:
    """When the next request arrives, or the clock if none is still to come: where an idle engine jumps to."""
    to_come = (state.progress.status == Status.WAITING) & (requests.arrivals > state.clock)
    first = jnp.argmax(to_come)
    return jnp.where(to_come[first], requests.arrivals[first], state.clock)
