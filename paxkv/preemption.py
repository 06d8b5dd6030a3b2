"""Preemption: whose memory is taken back when it does not last for what all are about to store."""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.memory import KVMemory
from paxkv.outcomes import Outcome
from paxkv.policy import Choices, select
from paxkv.requests import Requests, Status
from paxkv.scheduler_state import SchedulerState, by_row
from paxkv.swap_state import Moves, join_moves, no_moves_out


class Preempted(NamedTuple):
    """What had to go."""

    state: SchedulerState
    victims: Bool[Array, " rows"]
    lost_tokens: Int32[Array, ""]  # stored tokens that have to be computed again
    moves: Moves | None  # blocks to copy to the host


def make_room(
    memory: KVMemory[Any],
    policy: Choices,
    requests: Requests,
    state: SchedulerState,
    granted: Int32[Array, " rows"],
) -> Preempted:
    """Preempts, one after another, the fewest requests without which the others can store what they were granted.

    What is given back counts as it is given back: of a block that several sequences share, only the last one to leave
    frees it.

    With `policy.preemption` "swap" a victim's blocks go to the host, if there is room for all of them; the copies are
    to be made before anything is written. If there is none, those of the victim's group who are parked leave the host
    too: they would not share with who has to compute the prompt again, and might not find room beside it.
    """

    def is_short(carry: Preempted) -> Bool[Array, ""]:
        state, victims = carry.state, carry.victims
        lengths = memory.seqs(state.memory).lengths
        demand = memory.demand(state.memory, lengths + jnp.where(victims, 0, granted))
        return (jnp.sum(demand) > memory.available(state.memory)) & jnp.any(state.row_request < requests.count)

    def preempt_one(carry: Preempted) -> Preempted:
        state = carry.state
        chosen = _victim(memory, policy, requests, state)
        stored = jnp.sum(jnp.where(chosen, memory.seqs(state.memory).lengths, 0), dtype=jnp.int32)
        moves, lost = carry.moves, jnp.bool(True)
        if moves is not None:
            memory_state, places, outcome, new = memory.swap_out(state.memory, chosen)
            at = jnp.where(chosen, state.row_request, requests.count)
            state = dataclasses.replace(
                state, memory=memory_state, places=_places(state).at[at].set(places, mode="drop")
            )
            moves, lost = join_moves(moves, new), outcome != Outcome.OK
            if _has_groups(memory, requests):
                others = lost & _is_of_group(requests, state, chosen)
                stored += _parked_tokens(memory, state, others)
                state = discard_parked(memory, state, others)
        state = _preempt(memory, requests, state, chosen, lost)
        return Preempted(state, carry.victims | chosen, carry.lost_tokens + jnp.where(lost, stored, 0), moves)

    moves = no_moves_out(memory.num_units, memory.host_blocks) if policy.swaps(memory) else None
    start = Preempted(state, jnp.zeros(memory.rows, jnp.bool), jnp.int32(0), moves)
    return jax.lax.while_loop(is_short, preempt_one, start)


def discard_parked(memory: KVMemory[Any], state: SchedulerState, unwanted: Bool[Array, " requests"]) -> SchedulerState:
    """Gives up what these requests have on the host, if anything."""
    if state.places is None:
        return state
    places = _places(state)
    parked = unwanted & (places < memory.rows)

    def discard_one(carry: tuple) -> tuple:
        memory_state, todo = carry
        request = jnp.argmax(todo)
        memory_state, _ = memory.discard(memory_state, places[request])
        return memory_state, todo.at[request].set(False)

    memory_state, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), discard_one, (state.memory, parked))
    return dataclasses.replace(state, memory=memory_state, places=jnp.where(parked, memory.rows, places))


def _parked_tokens(
    memory: KVMemory[Any], state: SchedulerState, requests: Bool[Array, " requests"]
) -> Int32[Array, ""]:
    """Tokens that these requests have stored on the host."""
    tokens = memory.parked(state.memory).at[_places(state)].get(mode="fill", fill_value=0)
    return jnp.sum(jnp.where(requests, tokens, 0), dtype=jnp.int32)


def _has_groups(memory: KVMemory[Any], requests: Requests) -> bool:
    """Whether sequences that were asked for together share, and so run together."""
    return requests.samples > 1 and memory.can_fork


def _is_of_group(requests: Requests, state: SchedulerState, rows: Bool[Array, " rows"]) -> Bool[Array, " requests"]:
    """Requests that were asked for together with those in the masked rows, which are of one group."""
    leaders = by_row(requests.leaders, state.row_request, -1)
    return requests.leaders == jnp.max(jnp.where(rows, leaders, -1))


def _places(state: SchedulerState) -> Int32[Array, " requests"]:
    return typing.cast(jax.Array, state.places)


def _victim(memory: KVMemory[Any], policy: Choices, requests: Requests, state: SchedulerState) -> Bool[Array, " rows"]:
    """The row that goes next, with those of the sequences that were asked for together with it."""
    running = state.row_request < requests.count
    worth = select(
        policy.victim,
        jnp.zeros(memory.rows, jnp.int32),  # last_arrived
        memory.seqs(state.memory).lengths,  # least_work
        by_row(requests.priorities, state.row_request, 0),  # priority
    )
    least = jnp.min(jnp.where(running, worth, 2**31 - 1))
    candidates = running & (worth == least)
    if not _has_groups(memory, requests):
        last = jnp.max(jnp.where(candidates, state.row_request, -1))
        return running & (state.row_request == last)
    leaders = by_row(requests.leaders, state.row_request, requests.count)
    return running & (leaders == jnp.max(jnp.where(candidates, leaders, -1)))


def _preempt(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    victims: Bool[Array, " rows"],
    lost: Bool[Array, ""],
) -> SchedulerState:
    """Sends the victims back to the queue, where their early arrival puts them first; takes their memory if `lost`."""
    nobody = requests.count
    at = jnp.where(victims, state.row_request, nobody)
    progress = dataclasses.replace(
        state.progress,
        status=state.progress.status.at[at].set(Status.WAITING, mode="drop"),
        preemptions=state.progress.preemptions.at[at].add(1, mode="drop"),
    )
    return dataclasses.replace(
        state,
        memory=memory.release(state.memory, victims & lost),
        progress=progress,
        row_request=jnp.where(victims, nobody, state.row_request),
        queued=state.queued + jnp.sum(victims, dtype=jnp.int32),
        first=jnp.minimum(state.first, jnp.min(jnp.where(victims, state.row_request, nobody))),
    )
