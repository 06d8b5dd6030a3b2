import random

import jax
import jax.numpy as jnp
import pytest

from paxkv.cost_model import MAX_COST_NS, StepCost, StepWork

TICK_NS = 10_000


def work(tokens, kv_tokens, map_calls, swapped_blocks=0):
    zero = jnp.int32(0)
    return StepWork(
        tokens=jnp.int32(tokens),
        samples=zero,
        kv_tokens=jnp.int32(kv_tokens),
        pairs=zero,
        sync_map_calls=jnp.int32(map_calls),
        swapped_blocks=jnp.int32(swapped_blocks),
    )


def exact_ticks(cost, tokens, kv_tokens, calls):
    ns = cost.step_ns + cost.token_ns * tokens + cost.kv_token_ns * kv_tokens + cost.map_call_ns * calls
    return -(-ns // TICK_NS)


def test_a_step_costs_what_its_parts_cost_rounded_up():
    cost = StepCost(step_ns=5_000_000, token_ns=20_000, kv_token_ns=20, map_call_ns=40_000)
    # 5 ms, 128 * 20 us, 1000 * 20 ns and 8 * 40 us: 7.9 ms are 790 ticks.
    assert int(cost.ticks(work(128, 1000, 8))) == 500 + 256 + 2 + 32
    assert int(cost.ticks(work(0, 1, 0))) == 501
    assert int(StepCost(step_ns=1).ticks(work(0, 0, 0))) == 1
    assert int(StepCost(swap_block_ns=15_000).ticks(work(0, 0, 0, swapped_blocks=3))) == 505  # 5 ms and 45 us


def test_the_sum_is_rounded_once_and_stays_exact_beyond_two_seconds():
    step = jax.jit(lambda cost, work: cost.ticks(work), static_argnums=0)
    rng = random.Random(1)
    for cost in (StepCost(9_999, 9_999, 9_999, 9_999), StepCost(1, 3_333, 7, 123_456_789), StepCost()):
        most = 2**30 * TICK_NS // (3 * max(cost.token_ns, cost.kv_token_ns, cost.map_call_ns))
        for _ in range(30):
            counts = [rng.randrange(min(2**31, 10 ** rng.randint(1, 10), most)) for _ in range(3)]
            assert int(step(cost, work(*counts))) == exact_ticks(cost, *counts), counts


def test_300_map_calls_of_a_deep_model_do_not_wrap_around():
    calls = 300 * 2 * 126  # page groups of a model of 126 layers; 3.0 s in which int32 has no more nanoseconds
    assert int(StepCost().ticks(work(1, 0, calls))) == 500 + 2 + 4 * calls


@pytest.mark.parametrize(
    ("knob", "value"), [("step_ns", 0), ("token_ns", -1), ("kv_token_ns", -20), ("map_call_ns", -40_000)]
)
def test_a_cost_that_is_no_time_is_refused(knob, value):
    with pytest.raises(ValueError, match=f"^{knob} must be"):
        StepCost(**{knob: value})


@pytest.mark.parametrize("name", ["step_ns", "token_ns", "kv_token_ns", "map_call_ns", "swap_block_ns"])
def test_a_cost_beyond_an_hour_is_refused(name):
    StepCost(**{name: MAX_COST_NS})
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        StepCost(**{name: MAX_COST_NS + 1})
