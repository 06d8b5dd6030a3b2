"""Preemption: whose memory is taken back when it does not last for what all are about to store."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.memory import KVMemory
from paxkv.requests import Requests, Status
from paxkv.scheduler_state import Policy, SchedulerState, by_row


def make_room(
    memory: KVMemory[Any],
    policy: Policy,
    requests: Requests,
    state: SchedulerState,
    granted: Int32[Array, " rows"],
) -> tuple[SchedulerState, Bool[Array, " rows"], Int32[Array, ""]]:
    """Preempts, one after another, the fewest requests without which the others can store what they were granted.

    What is given back counts as it is given back: of a block that several sequences share, only the last one to leave
    frees it.

    Returns:
      The state, the rows that were preempted, and the stored tokens that were lost.
    """

    def is_short(carry: tuple) -> Bool[Array, ""]:
        state, victims, _ = carry
        lengths = memory.seqs(state.memory).lengths
        demand = memory.demand(state.memory, lengths + jnp.where(victims, 0, granted))
        return (jnp.sum(demand) > memory.available(state.memory)) & jnp.any(state.row_request < requests.count)

    def preempt_one(carry: tuple) -> tuple:
        state, victims, lost = carry
        chosen = _victim(memory, policy, requests, state)
        lengths = memory.seqs(state.memory).lengths
        lost += jnp.sum(jnp.where(chosen, lengths, 0), dtype=jnp.int32)
        return _preempt(memory, requests, state, chosen), victims | chosen, lost

    start = (state, jnp.zeros(memory.rows, jnp.bool), jnp.int32(0))
    return jax.lax.while_loop(is_short, preempt_one, start)


def _victim(memory: KVMemory[Any], policy: Policy, requests: Requests, state: SchedulerState) -> Bool[Array, " rows"]:
    """The row that goes next, with those of the sequences that were asked for together with it."""
    running = state.row_request < requests.count
    match policy.victim:
        case "last_arrived":
            worth = jnp.zeros(memory.rows, jnp.int32)
        case "least_work":
            worth = memory.seqs(state.memory).lengths
        case "priority":
            worth = by_row(requests.priorities, state.row_request, 0)
    least = jnp.min(jnp.where(running, worth, 2**31 - 1))
    candidates = running & (worth == least)
    if not (requests.samples > 1 and memory.can_fork):
        last = jnp.max(jnp.where(candidates, state.row_request, -1))
        return running & (state.row_request == last)
    leaders = by_row(requests.leaders, state.row_request, requests.count)
    return running & (leaders == jnp.max(jnp.where(candidates, leaders, -1)))


def _preempt(
    memory: KVMemory[Any], requests: Requests, state: SchedulerState, victims: Bool[Array, " rows"]
) -> SchedulerState:
    """Takes the victims' memory and sends them back to the queue, where their early arrival puts them first."""
    nobody = requests.count
    at = jnp.where(victims, state.row_request, nobody)
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
    )
