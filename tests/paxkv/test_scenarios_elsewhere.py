"""Known situations with known answers that are not the block manager's: sizes, rates, the scheduler, vAttention."""

import dataclasses
import functools
import itertools
import random
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache_stats import recent_hit_rate
from paxkv.capacity import plan_blocks, pool_concurrency, request_blocks
from paxkv.contiguous import VAttention
from paxkv.model_shapes import KVShape
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.requests import TICK_US, make_requests
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import init_scheduler
from paxkv.windows import Group
from tests.paxkv.oracles.jitted import paged, quickly
from tests.paxkv.oracles.lockstep import ORACLES, ask
from tests.paxkv.oracles.scenario import Scenario, scenarios
from tests.paxkv.scheduler_oracle import PolicyOracle, Request


def played_by(*players):
    found = [scenario for scenario in scenarios() if scenario.plays in players]
    assert {scenario.plays for scenario in found} == set(players)
    return pytest.mark.parametrize("scenario", found, ids=lambda scenario: scenario.name)


def test_every_scenario_is_played():
    assert {scenario.plays for scenario in scenarios()} == {"manager", "arithmetic", "scheduler", "vattention"}


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def groups(step):
    return [Group(step["block_size"], **group) for group in step["groups"]]


def hit_rate(step):
    looks = np.array(step["looks"], np.int32).reshape(-1, 3)
    found = recent_hit_rate(*looks.T, step["most_requests"])
    assert found == pytest.approx(step["hit_rate"])


def concurrency(step):
    found = pool_concurrency(step["num_blocks"], groups(step), step["tokens"], step["max_chunk"])
    assert found == Fraction(step["concurrency"])


def most_blocks(step):
    assert request_blocks(groups(step), step["tokens"], step["max_chunk"]) == step["blocks"]


def plan(step):
    shape = KVShape(
        step["layers"],
        step["kv_heads"],
        step["head_dim"],
        element_bytes=step["element_bytes"],
        scale_bytes_per_token_head=step["scale_bytes"],
    )
    found = plan_blocks(shape, step["block_size"], step["pool_bytes"])
    assert (found.block_bytes, found.num_blocks, found.num_slots) == (
        step["bytes_per_block"],
        step["blocks"],
        step["tokens"],
    )


def alignment(step):
    sizes = step["block_sizes"]
    memory = Paged(
        rows=1, max_len=8192, block_size=sizes[0], num_blocks=16_384, groups=tuple(Group(size) for size in sizes)
    )
    assert memory.alignment == step["alignment"]


def out_of_view(step):
    group = Group(2, **{name: step[name] for name in ("window", "chunk") if name in step})
    assert group.out_of_view(jnp.array(step["tokens"], jnp.int32)).tolist() == step["past"]


ARITHMETIC = {
    "hit_rate": hit_rate,
    "concurrency": concurrency,
    "request_blocks": most_blocks,
    "plan": plan,
    "alignment": alignment,
    "out_of_view": out_of_view,
}


@played_by("arithmetic")
def test_the_numbers_come_out(scenario: Scenario):
    for step in scenario.steps:
        ARITHMETIC[step["do"]](step)


# ---- the scheduler ---------------------------------------------------------------------------------------------------

TOKEN = 5  # whatever is sampled


def ticks_of(tokens, *others):
    return 3 + 2 * tokens


@functools.cache
def scheduled_step(memory: Paged, policy: Policy, token_budget: int):
    def step(requests, state):
        state, plan = schedule(memory, requests, state, token_budget, policy)
        now = state.clock + ticks_of(jnp.sum(plan.new_tokens))
        sampled = jnp.full(memory.rows, TOKEN, jnp.int32)
        return commit(memory, requests, state, plan, sampled, now), (state.row_request, plan)

    return jax.jit(step, compiler_options=quickly())


def jitted_steps(memory, policy, step):
    """Of each step: tokens by request, and those that preemption threw away."""
    asked = list(step["requests"].values())
    requests = make_requests(
        np.zeros((len(asked), memory.max_len), np.int32),
        np.array([request["prompt"] for request in asked]),
        np.array([request["output"] for request in asked]),
        np.array([request.get("arrival", 0) for request in asked]) * (TICK_US / 1000),
        seed=0,
        priorities=np.array([request.get("priority", 0) for request in asked]),
    )
    state, names = init_scheduler(memory, requests), list(step["requests"])
    while True:
        state, (rows, plan) = scheduled_step(memory, policy, step["token_budget"])(requests, state)
        counts = zip(rows.tolist(), plan.new_tokens.tolist(), strict=True)
        yield {names[request]: count for request, count in counts if count}, int(plan.recompute_tokens)


def plain_steps(memory, policy, step):
    requests = [
        Request(
            id=number,
            prompt=request["prompt"],
            output=request["output"],
            arrival=request.get("arrival", 0),
            tokens=[TOKEN] * request["output"],
            priority=request.get("priority", 0),
        )
        for number, request in enumerate(step["requests"].values())
    ]
    oracle = PolicyOracle(ORACLES[Paged](memory), requests, step["token_budget"], -1, ticks_of, policy)
    names = list(step["requests"])
    while True:
        now = oracle.step()
        yield {names[request]: count for request, count in now.new_tokens.items()}, now.recompute_tokens


@pytest.mark.parametrize("steps_of", [jitted_steps, plain_steps])
@played_by("scheduler")
def test_the_scheduler_does_as_the_scenario_says(scenario: Scenario, steps_of):
    memory = paged(scenario.memory)
    for step in scenario.steps:
        expected = list(zip(step["computes"], step["recompute_tokens"], strict=True))
        found = itertools.islice(steps_of(memory, Policy(**step["policy"]), step), len(expected))
        assert list(found) == expected


@pytest.mark.parametrize(
    "policy",
    [
        Policy(victim="least_work"),
        Policy(victim="priority", overtake=True),
        Policy(victim="last_arrived", overtake=True),
    ],
    ids=lambda policy: f"{policy.victim}, overtake {policy.overtake}",
)
def test_under_any_policy_every_step_is_that_of_the_oracle(policy):
    memory = Paged(rows=4, max_len=24, block_size=4, num_blocks=7)
    preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        requests = {
            str(number): {
                "prompt": rng.randint(1, 12),
                "output": rng.randint(1, 10),
                "priority": rng.randrange(3),
                "arrival": number // 3,
            }
            for number in range(9)
        }
        asked = {"requests": requests, "token_budget": 9}
        jitted, plain = (list(itertools.islice(run(memory, policy, asked), 90)) for run in (jitted_steps, plain_steps))
        assert jitted == plain, f"seed {seed}"
        assert not any(computed for computed, _ in plain[-5:]), "somebody is never done"
        preemptions += sum(lost > 0 for _, lost in plain)
    assert preemptions > 10


# ---- vAttention ------------------------------------------------------------------------------------------------------


@played_by("vattention")
def test_idle_rows_are_chosen_as_the_scenario_says(scenario: Scenario):
    for step in scenario.steps:
        memory = VAttention(rows=len(step["mapped"]), **scenario.memory)
        tokens = step["groups"] * memory.page_bytes // memory.token_bytes
        state = dataclasses.replace(memory.init(), mapped=jnp.array(step["mapped"], jnp.int32))
        _, row, outcome = memory.admit(state, ask(tokens))
        assert (int(row), int(outcome)) == (step["row"], Outcome.OK)

        oracle = ORACLES[VAttention](memory)
        for idle, groups in enumerate(step["mapped"]):
            for _ in range(groups):
                oracle.map_one(idle)
        assert oracle.admit(tokens, tokens, tokens) == (step["row"], Outcome.OK)
