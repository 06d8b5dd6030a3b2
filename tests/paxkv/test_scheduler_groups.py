"""Samples of a prompt in the scheduler, without any model: they run, leave and come back together."""

import dataclasses
import functools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import checks, lifecycle
from paxkv.paged import Paged
from paxkv.policy import FIRST_COME, Policy
from paxkv.queue import next_arrival
from paxkv.requests import TICK_US, Reason, Status, make_requests
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import init_scheduler

PROMPTS, WIDTH, STEPS = 5, 24, 256
QUICKLY = {"xla_backend_optimization_level": 0}


class Case(NamedTuple):
    memory: Paged
    policy: Policy
    budget: int
    samples: int


CASES = {
    "in_order": Case(Paged(rows=4, max_len=32, block_size=4, num_blocks=9, forks=True), FIRST_COME, 8, 2),
    "overtaking": Case(
        Paged(
            rows=6,
            max_len=12,
            block_size=2,
            num_blocks=14,
            watermark_blocks=1,
            free_order="fifo",
            lookahead=1,
            forks=True,
        ),
        Policy(victim="least_work", overtake=True),
        6,
        3,
    ),
    "priority": Case(
        Paged(rows=6, max_len=24, block_size=3, num_blocks=14, forks=True), Policy(victim="priority"), 7, 2
    ),
    "swap": Case(
        Paged(rows=6, max_len=24, block_size=3, num_blocks=14, forks=True, host_blocks=11, watermark_blocks=5),
        Policy(victim="priority", preemption="swap", reserve_output=True),
        6,
        2,
    ),
    "swap_overtaking": Case(
        Paged(rows=9, max_len=20, block_size=1, num_blocks=36, forks=True, host_blocks=22),
        Policy(preemption="swap", overtake=True),
        9,
        3,
    ),
}


@functools.cache
def compiled(name):
    """All steps of a trace in one call; every sampled token is 0."""
    memory, policy, budget, _ = CASES[name]

    def one_step(state, _, requests):
        before = state
        state, plan = schedule(memory, requests, state, budget, policy)
        state = dataclasses.replace(state, memory=lifecycle.end_copies(memory, state.memory))
        total = jnp.sum(plan.new_tokens)
        idle = ~jnp.any(memory.seqs(state.memory).active)
        ticks = jnp.where(idle, next_arrival(requests, state) - state.clock, 1 + total)
        after = commit(memory, requests, state, plan, jnp.zeros(memory.rows, jnp.int32), state.clock + ticks)
        seen = {
            "before": before.row_request,
            "lengths_before": memory.seqs(before.memory).lengths,
            "during": state.row_request,
            "status": state.progress.status,
            "preemptions": state.progress.preemptions,
            "places": state.places,
            "places_before": before.places,
            "parked_before": memory.parked(before.memory) if memory.host_blocks else None,
            "clock": state.clock,
            "plan": plan,
            "faults": memory.seqs(after.memory).faults.word,
        }
        return after, seen

    def trace(requests):
        one = functools.partial(one_step, requests=requests)
        return jax.lax.scan(one, init_scheduler(memory, requests), length=STEPS)

    return jax.jit(trace, compiler_options=QUICKLY)


def run(name, prompt_lens, output_lens, arrivals, priorities=None):
    """The requests, the state at the end, and what each step showed that had anything to do."""
    memory, _, _, samples = CASES[name]
    requests = make_requests(
        np.zeros((PROMPTS, WIDTH), np.int32),
        np.array(prompt_lens),
        np.array(output_lens),
        np.array(arrivals) * (TICK_US / 1000),
        seed=0,
        samples=samples,
        predicted_lens=np.full(PROMPTS, 1000),  # far too much: room kept for it is missed by others of a group
        priorities=None if priorities is None else np.array(priorities),
    )
    state, seen = compiled(name)(requests)
    checks.require_invariants(memory, state.memory)
    state, seen = jax.tree.map(np.asarray, (state, seen))
    assert (state.progress.status == Status.ENDED).all(), f"a deadlock: {state.row_request}"
    assert int(state.memory.pool.num_free) == memory.num_blocks
    if memory.host_blocks:
        assert int(state.memory.swap.pool.num_free) == memory.host_blocks
        assert not state.memory.swap.parked.any()
    steps = [jax.tree.map(lambda leaf, i=i: leaf[i], seen) for i in range(STEPS)]
    return requests, state, steps[: int(np.flatnonzero(seen["plan"].new_tokens.sum(axis=1))[-1]) + 1]


def require_together(name, requests, step, where):
    """What holds in every step of groups. Returns how many left, and whether a group runs in part."""
    memory, policy, budget, samples = CASES[name]
    before, during = (
        {int(r): row for row, r in enumerate(step[when]) if r < requests.count} for when in ("before", "during")
    )
    waiting = {int(r) for r in np.flatnonzero(step["status"] == Status.WAITING)}
    waiting = {r for r in waiting if requests.arrivals[r] <= step["clock"]}
    assert step["faults"] == 0, where
    assert step["plan"].new_tokens.sum() <= budget, where
    if during or waiting:  # that somebody leaves, or comes to others, may be all that happens in a step
        plan = step["plan"]
        assert plan.new_tokens.sum() + plan.admitted + plan.preempted > 0, f"nothing happened, {where}"
    partly = {r // samples for r in during} & {r // samples for r in waiting}
    assert len(partly) <= 1, f"groups {partly} run in part, {where}"

    samples_now = {r for r, row in during.items() if step["plan"].samples[row]}
    for group in {r // samples for r in samples_now}:
        members = {r for r in range(group * samples, (group + 1) * samples) if step["status"][r] != Status.ENDED}
        assert members <= samples_now, f"{members - samples_now} do not sample with the others, {where}"

    lost = {r: int(step["lengths_before"][before[r]]) for r in before.keys() - during.keys()}
    if policy.swaps(memory):
        for r in range(requests.count):
            if step["places"][r] < memory.rows:
                lost.pop(r, None)
            elif step["places_before"][r] < memory.rows and r not in during:
                lost[r] = int(step["parked_before"][step["places_before"][r]])
    assert step["plan"].recompute_tokens == sum(lost.values()), f"{lost} was lost, {where}"
    if policy.swaps(memory):
        is_parked = {}
        for r in np.flatnonzero((step["status"] == Status.WAITING) & (step["preemptions"] > 0)):
            is_parked.setdefault(int(r) // samples, []).append(bool(step["places"][r] < memory.rows))
        for group, parked in is_parked.items():  # who computes anew has nobody behind it who comes from the host
            assert parked == sorted(parked, reverse=True), f"group {group} is torn, {where}"

    left, stayed = before.keys() - during.keys(), before.keys() & during.keys()
    torn = {r // samples for r in left} & {r // samples for r in stayed}
    assert not torn, f"groups {torn} were preempted in part, {where}"
    if left and stayed:
        worth = {r: int(step["lengths_before"][row]) for r, row in before.items()}
        if policy.victim == "priority":
            worth = {r: int(requests.priorities[r]) for r in before}
        elif policy.victim == "last_arrived":
            worth = {r: -(r // samples) for r in before}
        least = max(min(worth[r] for r in left if r // samples == group) for group in {r // samples for r in left})
        assert least <= min(worth[r] for r in stayed), f"the wrong ones were preempted, {where}"
    return len(left), bool(partly)


@pytest.mark.parametrize("name", ["in_order", "overtaking", "priority", "swap"])
def test_groups_run_and_leave_as_a_whole_and_one_at_most_waits_for_its_members(name):
    memory, policy, _, samples = CASES[name]
    preempted = partly = served = swapped = 0
    for seed in range(20):
        rng = random.Random(seed)
        prompts = [rng.choice([rng.randint(1, 4), rng.randint(1, memory.max_len // 2)]) for _ in range(PROMPTS)]
        outputs = [rng.randint(1, memory.max_len // 2) for _ in range(PROMPTS)]
        arrivals = np.cumsum([rng.choice([0, 0, 3, 20]) for _ in range(PROMPTS)]).tolist()
        requests, state, steps = run(name, prompts, outputs, arrivals, [rng.randint(1, 3) for _ in range(PROMPTS)])
        for i, step in enumerate(steps):
            left, in_part = require_together(name, requests, step, f"seed {seed}, step {i}")
            preempted, partly = preempted + left, partly + in_part
            if memory.host_blocks:
                swapped += int(step["plan"].moves_in.count)
        for group in range(PROMPTS):
            members = slice(group * samples, (group + 1) * samples)
            reasons = set(state.progress.reason[members])
            generated = set(state.progress.generated[members])
            assert len(reasons) == len(generated) == 1, f"seed {seed}: {reasons}, {generated} of group {group}"
            if reasons == {Reason.REFUSED_NEVER_FITS}:
                assert generated == {0}
                continue
            assert generated == {min(outputs[group], memory.max_len - prompts[group])}
            served += 1
    assert preempted > 10
    assert partly > 10
    assert served > 30
    assert swapped > 0 or policy.preemption != "swap"


def test_nobody_waits_for_one_of_a_group_that_has_ended():
    memory, stop = CASES["in_order"].memory, 7
    requests = make_requests(
        np.zeros((1, 4), np.int32), np.array([3]), np.array([5]), np.zeros(1), seed=0, samples=2, stop_token=stop
    )

    def step(state, _):
        state, plan = schedule(memory, requests, state, 8)
        state = dataclasses.replace(state, memory=lifecycle.end_copies(memory, state.memory))
        tokens = jnp.where(state.row_request == 0, stop, 0)
        return commit(memory, requests, state, plan, tokens, state.clock + 1), None

    serve = jax.jit(lambda state: jax.lax.scan(step, state, length=9)[0], compiler_options=QUICKLY)
    progress = serve(init_scheduler(memory, requests)).progress
    assert progress.reason.tolist() == [Reason.STOP_TOKEN, Reason.LENGTH]
    assert progress.generated.tolist() == [1, 5]


def test_a_group_that_left_twice_comes_back_in_room_for_all_of_it():
    """Alone, the group of the long prompt has just room enough if its members share that prompt again."""
    requests, state, steps = run("in_order", [2, 17, 1, 1, 1], [13, 8, 0, 0, 0], [0] * PROMPTS)
    for i, step in enumerate(steps):
        require_together("in_order", requests, step, f"step {i}")
    assert state.progress.generated[:4].tolist() == [13, 13, 8, 8]
    assert state.progress.preemptions[2] > 0


def test_who_completes_a_group_may_have_the_blocks_that_are_kept_back():
    """When one of the group of the long prompt is back, there is room for the other, but not beside the watermark."""
    requests, state, steps = run("swap", [2, 13, 1, 1, 1], [20, 9, 0, 0, 0], [0] * PROMPTS, [2, 1, 1, 1, 1])
    for i, step in enumerate(steps):
        require_together("swap", requests, step, f"step {i}")
    assert state.progress.generated[:4].tolist() == [20, 20, 9, 9]
    assert state.progress.preemptions[:4].tolist() == [0, 0, 1, 1]
    assert max(int(step["plan"].moves_out.count) for step in steps) == 8


def test_who_can_never_come_back_from_the_host_is_refused_and_leaves_it():
    """Nobody that the scheduler parks: it promises no more than there is. Here it is given a place by hand."""
    memory = Paged(rows=2, max_len=64, block_size=8, num_blocks=4, host_blocks=4)
    requests = make_requests(np.zeros((2, 40), np.int32), np.array([31, 3]), np.ones(2, int), np.zeros(2), seed=0)

    def park(state):
        """A sequence as large as the memory, of which the scheduler knows nothing but the place."""
        held = dataclasses.replace(
            memory.init().seqs, active=jnp.asarray([True, False]), lengths=jnp.asarray([32, 0], jnp.int32)
        )
        table = state.memory.tables[0]
        table = dataclasses.replace(
            table, ids=table.ids.at[0, :4].set(jnp.arange(4, dtype=jnp.int32)), end=table.end.at[0].set(4)
        )
        pool = memory.take_blocks(state.memory, jnp.ones(4, jnp.bool))[0].pool
        full = dataclasses.replace(state.memory, seqs=held, tables=(table,), pool=pool)
        parked, places, _, _ = memory.swap_out(full, jnp.asarray([True, False]))
        return dataclasses.replace(state, memory=parked, places=state.places.at[0].set(places[0]))

    def step(state):
        return schedule(memory, requests, state, 8, Policy(preemption="swap"))[0]

    state = jax.jit(park, compiler_options=QUICKLY)(init_scheduler(memory, requests))
    assert int(state.memory.swap.pool.num_free) == 0
    state = jax.jit(step, compiler_options=QUICKLY)(state)
    checks.require_invariants(memory, state.memory)
    assert int(state.memory.swap.pool.num_free) == memory.host_blocks
    assert state.places.tolist() == [memory.rows] * 2
    assert state.progress.reason.tolist() == [Reason.REFUSED_NEVER_FITS, Reason.NONE]
    assert state.row_request.tolist() == [1, 2]
