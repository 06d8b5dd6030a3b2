"""Who waits: arrivals, and the next candidate for admission, at a cost that does not grow with the workload.

Requests are numbered in order of arrival, so that who has arrived is a prefix of them. Two marks are kept there: where
that prefix ends, and a number below which nobody waits. Both only move over what they pass, so that all looks of a run
together cost about as much as one pass over its requests.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.policy import Choices, select
from paxkv.requests import Requests, Status
from paxkv.scheduler_state import SchedulerState

_FOREVER = 2**31 - 1
_WINDOW = 1024


def let_in(requests: Requests, state: SchedulerState) -> SchedulerState:
    """Counts whoever has arrived by now."""

    def has_come(carry: tuple) -> Bool[Array, ""]:
        arrived, _ = carry
        at = requests.arrivals.at[arrived].get(mode="fill", fill_value=_FOREVER)
        return (arrived < requests.count) & (at <= state.clock)

    def count(carry: tuple) -> tuple:
        arrived, queued = carry
        waits = state.progress.status[arrived] == Status.WAITING  # unless it was aborted before it came
        return arrived + 1, queued + waits.astype(jnp.int32)

    arrived, queued = jax.lax.while_loop(has_come, count, (state.arrived, state.queued))
    return dataclasses.replace(state, arrived=arrived, queued=queued)


def first_waiting(requests: Requests, state: SchedulerState, begin: Int32[Array, ""]) -> Int32[Array, ""]:
    """The lowest number from `begin` on of a request that waits or has not arrived yet; `requests.count` if none."""

    def is_taken(at: Int32[Array, ""]) -> Bool[Array, ""]:
        status = state.progress.status.at[at].get(mode="fill", fill_value=Status.WAITING)
        return (at < requests.count) & (status != Status.WAITING)

    return jax.lax.while_loop(is_taken, lambda at: at + 1, begin)


def least_waiting(
    policy: Choices, requests: Requests, state: SchedulerState, after: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Who has arrived, waits, and comes first in the policy's order; after a request unless that is negative.

    `requests.count` if there is none. Looks at whoever came since the first who waits, a window at a time.
    """
    nobody = requests.count
    last = _key(policy, requests, jnp.maximum(after, 0))

    def look(carry: tuple) -> tuple:
        begin, least, best = carry
        ids = begin + jnp.arange(min(_WINDOW, nobody), dtype=jnp.int32)
        key = _key(policy, requests, ids)
        status = state.progress.status.at[ids].get(mode="fill", fill_value=Status.ENDED)
        waits = (status == Status.WAITING) & (ids < state.arrived)
        waits &= (after < 0) | (key > last) | ((key == last) & (ids > after))
        here = jnp.min(jnp.where(waits, key, _FOREVER))
        better = jnp.any(waits) & ((here < least) | (best == nobody))  # among equals who came first
        found = jnp.min(jnp.where(waits & (key == here), ids, nobody))
        return begin + ids.shape[0], jnp.where(better, here, least), jnp.where(better, found, best)

    start = (state.first, jnp.int32(_FOREVER), jnp.int32(nobody))
    return jax.lax.while_loop(lambda carry: carry[0] < state.arrived, look, start)[2]


def _key(policy: Choices, requests: Requests, ids: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """By what each request is ordered: the least comes first."""

    def of(values: jax.Array) -> jax.Array:
        return values.at[ids].get(mode="fill", fill_value=0)

    return select(
        policy.order,
        jnp.zeros_like(ids),  # first_come
        of(requests.prompt_lens) + of(requests.predicted_lens),  # shortest
        -1 - of(requests.priorities),  # the highest priority; not its negative, which the lowest int32 has not
        of(requests.deadlines),
    )


def next_arrival(requests: Requests, state: SchedulerState) -> Int32[Array, ""]:
    """When the next request arrives, or the clock if none is still to come: where an idle engine jumps to."""
    following = first_waiting(requests, state, state.arrived)
    at = requests.arrivals.at[following].get(mode="fill", fill_value=0)
    return jnp.where(following < requests.count, at, state.clock)
