"""Who comes next, against a walk through everybody, and who is counted when some leave before they come."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from paxkv import queue
from paxkv.policy import Policy, choices
from paxkv.queue import least_waiting, let_in, next_arrival
from paxkv.requests import TICK_US, Reason, Status, make_requests
from paxkv.reserved import Reserved
from paxkv.scheduler import abort
from paxkv.scheduler_state import init_scheduler

MEMORY = Reserved(rows=2, max_len=8, num_slots=16, policy="max")
COUNT = 11
ORDERS = [Policy(order=order) for order in ("first_come", "shortest", "priority", "deadline")]


def test_the_next_in_order_is_found_in_any_window_and_among_equals_who_came_first(monkeypatch):
    monkeypatch.setattr(queue, "_WINDOW", 4)
    find = jax.jit(least_waiting)
    rng = random.Random(1)
    for _ in range(12):
        prompts, outputs = ([rng.randint(1, 3) for _ in range(COUNT)] for _ in range(2))
        priorities = [rng.choice([-(2**31), 1 - 2**31, -1, 0, 2**31 - 1]) for _ in range(COUNT)]
        deadlines = [rng.choice([0, 5, 2**31 - 2]) for _ in range(COUNT)]
        requests = make_requests(
            None,
            np.array(prompts),
            np.array(outputs),
            np.zeros(COUNT),
            seed=0,
            priorities=np.array(priorities),
            deadline_ms=np.array(deadlines) * (TICK_US / 1000),
        )
        status = [rng.choice(list(Status)) for _ in range(COUNT)]
        state = init_scheduler(MEMORY, requests)
        progress = dataclasses.replace(state.progress, status=jnp.array(status, jnp.int32))
        arrived = rng.randint(0, COUNT)
        state = dataclasses.replace(state, progress=progress, arrived=jnp.int32(arrived))
        keys = {
            "first_come": [0] * COUNT,
            "shortest": [p + o for p, o in zip(prompts, outputs, strict=True)],
            "priority": [-p for p in priorities],
            "deadline": deadlines,
        }
        for policy in ORDERS:
            place = [(key, i) for i, key in enumerate(keys[policy.order])]
            waiting = sorted(place[i] for i in range(arrived) if status[i] == Status.WAITING)
            for after in (-1, rng.randrange(COUNT), rng.randrange(COUNT)):
                later = [i for key, i in waiting if after < 0 or (key, i) > place[after]]
                found = find(choices(policy, tuple(ORDERS)), requests, state, jnp.int32(after))
                assert int(found) == (later[0] if later else COUNT), f"{policy.order}, after {after}"


def test_who_leaves_before_it_comes_is_neither_counted_nor_awaited():
    arrival_ms = np.array([0, 0, 5, 9]) * (TICK_US / 1000)
    requests = make_requests(None, np.full(4, 3), np.full(4, 2), arrival_ms, seed=0)
    state = let_in(requests, init_scheduler(MEMORY, requests))
    assert (int(state.arrived), int(state.queued)) == (2, 2)
    progress = dataclasses.replace(  # request 0 was served in the meantime
        state.progress,
        status=state.progress.status.at[0].set(Status.ENDED),
        reason=state.progress.reason.at[0].set(Reason.LENGTH),
        ended_at=state.progress.ended_at.at[0].set(2),
    )
    state = dataclasses.replace(state, progress=progress, queued=jnp.int32(1), clock=jnp.int32(3))
    state = abort(MEMORY, requests, state, jnp.array([True, True, True, False]))
    assert state.progress.reason.tolist() == [Reason.LENGTH, Reason.ABORTED, Reason.ABORTED, Reason.NONE]
    assert state.progress.ended_at.tolist() == [2, 3, 3, -1]
    assert int(state.queued) == 0
    assert int(next_arrival(requests, state)) == 9
    state = let_in(requests, dataclasses.replace(state, clock=jnp.int32(9)))
    assert (int(state.arrived), int(state.queued)) == (4, 1)
    assert int(next_arrival(requests, state)) == 9  # nobody is still to come
