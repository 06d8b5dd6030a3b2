"""The scheduler: who computes how many tokens in the next step, and who has to wait for it.

A step in the life of a request:

1. It arrives: its arrival lies behind the clock, its status is WAITING.
2. First come, first served: the earliest waiting request asks memory for a row and for room for all its tokens.
   OK gives it a row, NEVER ends it with a reason, LATER stops admission until something changes.
3. Each step the running requests share the token budget. One that has caught up computes one token (decode); then
   those that are behind, oldest first, compute as many of their known tokens as the budget lets them (chunked
   prefill).
4. If memory cannot hold what they are about to store, requests are preempted until it can, by default those that
   arrived last: their memory is released, their output is kept, and they wait to be recomputed. Nobody is admitted
   in that step.
5. A request that has computed all its known tokens samples the next one.
6. It ends with a reason, and its memory is released.

A request to a server that only answers brings the keys and values of its prompt: they are stored when it is admitted,
and computed if it is preempted and comes back.

Sequences that were asked for together (samples of one prompt, beams) share its blocks if memory can fork: the first
computes the prompt but for its last token, the others fork from it there, and from then on all of them sample in the
same steps. They are preempted together.

Everything here is a pure function of state. Tokens are only handed on, to memories that share what is equal; tensors
are unknown here: the engine and the simulator run the same code.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.control_flow import run_if
from paxkv.memory import KVMemory
from paxkv.policy import FIRST_COME, Choices, Policy, as_choices
from paxkv.preemption import discard_parked, make_room
from paxkv.publish_tokens import publish_granted
from paxkv.queue import let_in
from paxkv.requests import Reason, Requests, Status
from paxkv.scheduler_state import Plan, SchedulerState, by_row, known_tokens
from paxkv.swap_state import Moves, join_moves
from paxkv.waiting import admit_waiting


def schedule(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    token_budget: int,
    policy: Policy | Choices = FIRST_COME,
    transcripts: Int32[Array, "requests width"] | None = None,
) -> tuple[SchedulerState, Plan]:
    """Decides the next step and makes room for it: preempts, admits, and appends to memory.

    Args:
      memory: the memory.
      requests: the workload.
      state: the state before the step.
      token_budget: most tokens that a step computes, at least `memory.rows`.
      policy: what it may choose.
      transcripts: prompt and output so far of each request; needed if memory shares what is equal.
    """
    choice = as_choices(policy)
    state = let_in(requests, state)
    backlog = _backlog(memory, requests, state)
    if choice.may("first", "prefill"):
        backlog = jnp.where(choice.prefill_first & (backlog == 1), 0, backlog)
    stored = _store(memory, choice, requests, transcripts, state, backlog, token_budget)
    new = admit_waiting(
        memory,
        choice,
        requests,
        transcripts if memory.publishes else None,
        stored.state,
        token_budget - jnp.sum(stored.granted),
        token_budget,
        closed=stored.preempted > 0,
    )
    stored = stored._replace(state=new.state, granted=stored.granted + new.granted, starts=stored.starts + new.starts)
    if choice.may("first", "prefill"):
        nobody_reads = choice.prefill_first & (jnp.sum(stored.granted) == 0)

        def answer(before: _Stored) -> _Stored:
            backlog = jnp.where(_backlog(memory, requests, before.state) == 1, 1, 0)
            after = _store(memory, choice, requests, transcripts, before.state, backlog, token_budget)
            return after._replace(
                preempted=before.preempted + after.preempted,
                recompute_tokens=before.recompute_tokens + after.recompute_tokens,
                moves_out=_joined(before.moves_out, after.moves_out),
            )

        stored = run_if(nobody_reads, answer, stored)
    state, granted = stored.state, stored.granted
    known = known_tokens(requests, state.progress, state.row_request)
    return state, Plan(
        new_tokens=granted,
        starts=stored.starts,
        samples=(granted > 0) & (stored.starts + granted == known),
        admitted=new.admitted,
        refused=new.refused,
        preempted=stored.preempted,
        recompute_tokens=stored.recompute_tokens,
        hit_tokens=new.hit_tokens,
        closed=new.closed & (stored.preempted == 0),
        moves_out=stored.moves_out,
        moves_in=new.moves,
    )


class _Stored(NamedTuple):
    """Rows that were given tokens to compute, and room for them."""

    state: SchedulerState
    granted: Int32[Array, " rows"]
    starts: Int32[Array, " rows"]
    preempted: Int32[Array, ""]
    recompute_tokens: Int32[Array, ""]
    moves_out: Moves | None


def _joined(first: Moves | None, then: Moves | None) -> Moves | None:
    return first if then is None or first is None else join_moves(first, then)


def _store(
    memory: KVMemory[Any],
    policy: Choices,
    requests: Requests,
    transcripts: Int32[Array, "requests width"] | None,
    state: SchedulerState,
    backlog: Int32[Array, " rows"],
    token_budget: int,
) -> _Stored:
    """Shares the token budget among those who run, preempts until there is room for it, and takes the room.

    Those who run take what they need before anybody is admitted to the rest. The outcomes are also sticky faults.
    """
    granted = _share_budget(backlog, state.row_request, token_budget)
    state, victims, recompute_tokens, moves_out = make_room(memory, policy, requests, state, granted)
    granted = jnp.where(victims, 0, granted)
    starts = memory.seqs(state.memory).lengths
    state = dataclasses.replace(state, memory=memory.append(state.memory, granted, token_budget)[0])
    if memory.publishes == "on_schedule":
        state = publish_granted(memory, transcripts, state, starts, granted, token_budget)
    return _Stored(state, granted, starts, jnp.sum(victims, dtype=jnp.int32), recompute_tokens, moves_out)


def _backlog(memory: KVMemory[Any], requests: Requests, state: SchedulerState) -> Int32[Array, " rows"]:
    """Tokens that each row knows, has not stored, and may compute now."""
    backlog = known_tokens(requests, state.progress, state.row_request) - memory.seqs(state.memory).lengths
    if requests.samples > 1 and memory.can_fork:
        backlog -= _waits_for_others(requests, state, backlog).astype(jnp.int32)
    return backlog


def _waits_for_others(
    requests: Requests, state: SchedulerState, backlog: Int32[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Rows whose last known token has to wait: not all that were asked for together have come as far."""
    nobody = requests.count
    caught_up = jnp.zeros(nobody, jnp.bool).at[state.row_request].set(backlog == 1, mode="drop")
    behind = (state.progress.status != Status.ENDED) & ~caught_up
    behind_by_leader = jnp.zeros(nobody, jnp.int32).at[requests.leaders].add(behind.astype(jnp.int32))
    together = by_row(requests.group_sizes, state.row_request, 1) > 1
    return together & (by_row(behind_by_leader[requests.leaders], state.row_request, 0) > 0) & (backlog > 0)


def _share_budget(
    backlog: Int32[Array, " rows"], row_request: Int32[Array, " rows"], token_budget: int
) -> Int32[Array, " rows"]:
    """Tokens for each row: the first in order takes what it needs, the next what is left, and so on.

    First those that have caught up, then the others in order of arrival, which is that of their numbers: who was
    preempted or overtaken may have younger ones in the rows before it.
    """

    def in_order(backlog: jax.Array) -> jax.Array:
        order = jnp.lexsort((row_request, backlog > 1))
        wanted = backlog[order]
        before = jnp.cumsum(wanted) - wanted
        return jnp.zeros_like(backlog).at[order].set(jnp.clip(token_budget - before, 0, wanted))

    return run_if(jnp.sum(backlog) > token_budget, in_order, backlog)


def commit(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    plan: Plan,
    tokens: Int32[Array, " rows"],
    now: Int32[Array, ""],
    transcripts: Int32[Array, "requests width"] | None = None,
    token_budget: int = 1,
) -> SchedulerState:
    """Books the sampled tokens at time `now`, ends requests that are done, and releases their memory.

    Args:
      memory: the memory.
      requests: the workload.
      state: the state that `schedule` returned.
      plan: the plan that `schedule` returned.
      tokens: the sampled token of each row; ignored where `plan.samples` is false.
      now: the clock after the step.
      transcripts: as for `schedule`.
      token_budget: as for `schedule`; only memories that publish on compute need to know.
    """
    if memory.publishes == "on_compute":
        state = publish_granted(memory, transcripts, state, plan.starts, plan.new_tokens, token_budget)
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
    return dataclasses.replace(
        state,
        memory=memory.background(memory.release(state.memory, done)),
        progress=progress,
        row_request=jnp.where(done, nobody, state.row_request),
        clock=now,
    )


def abort(
    memory: KVMemory[Any], requests: Requests, state: SchedulerState, unwanted: Bool[Array, " requests"]
) -> SchedulerState:
    """Ends requests between two steps, wherever they stand: not arrived, waiting, running, or parked on the host.

    What they published stays cached. A request that has ended already is left alone. The beams of a prompt are one
    search: who aborts one of them aborts all.

    Args:
      memory: the memory.
      requests: the workload.
      state: the state between two steps.
      unwanted: the requests to end.
    """
    progress = state.progress
    if requests.beams:
        groups = jnp.zeros(requests.count, jnp.bool).at[requests.leaders].max(unwanted)
        unwanted = groups[requests.leaders]
    ends = unwanted & (progress.status != Status.ENDED)
    leaves = ends.at[state.row_request].get(mode="fill", fill_value=False)
    state = discard_parked(memory, state, ends)
    waited = ends & (progress.status == Status.WAITING) & (jnp.arange(requests.count) < state.arrived)
    progress = dataclasses.replace(
        progress,
        status=jnp.where(ends, Status.ENDED, progress.status),
        reason=jnp.where(ends, Reason.ABORTED, progress.reason),
        ended_at=jnp.where(ends, state.clock, progress.ended_at),
    )
    return dataclasses.replace(
        state,
        memory=memory.release(state.memory, leaves),
        progress=progress,
        row_request=jnp.where(leaves, requests.count, state.row_request),
        queued=state.queued - jnp.sum(waited, dtype=jnp.int32),
    )
