"""The simulator: strides against single steps, an oracle in plain Python, and the engine."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.cost_model import NS, StepCost
from paxkv.engine import Engine, init_engine, step
from paxkv.memory import limits
from paxkv.outcomes import MemoryFaultError, Outcome
from paxkv.paged import Paged
from paxkv.policy import FIRST_COME, Policy, choices
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import TICK_US, Reason, Status, make_requests
from paxkv.reserved import Reserved
from paxkv.roofline import Roofline
from paxkv.simulate import Simulator, init_simulation, run, simulate
from tests.paxkv import fake_model, unchecked
from tests.paxkv.oracles.caches import filled_cache
from tests.paxkv.oracles.jitted import quickly
from tests.paxkv.oracles.lockstep import ORACLES
from tests.paxkv.scheduler_oracle import PolicyOracle, Request

MAX_LEN, BUDGET, COUNT = 40, 9, 10
QUICKLY = quickly()
DELIVERED = {"paged", "vattention"}  # there requests bring keys and values
# In nanoseconds. What attention reads costs as part of the tables alone: pairs are never fewer, and cost more.
STEP, WEIGHTS, TOKEN, SAMPLE, PAIR, KV_TOKEN, MAP_CALL = 60_001, 20_000, 9_003, 2_005, 307, 211, 40_000
COST = Roofline(
    step=STEP * NS,
    weights=WEIGHTS * NS,
    token=TOKEN * NS,
    sample=SAMPLE * NS,
    kv_token=KV_TOKEN * NS,
    pair=PAIR * NS,
    exchange_token=0,
    table_token=KV_TOKEN * NS,
    map_call_ns=MAP_CALL,
    swap_block_ns=0,
)
MEMORIES = {
    "paged": Paged(rows=5, max_len=MAX_LEN, block_size=3, num_blocks=20, watermark_blocks=1),
    "vattention": VAttention(5, MAX_LEN, num_groups=12, page_bytes=12, token_bytes=2, buffers=2, lookahead_steps=2),
    "vattention_sync": VAttention(
        5, MAX_LEN, 12, page_bytes=12, token_bytes=2, buffers=2, lookahead_steps=0, background_groups=0
    ),
    "reserved": Reserved(rows=5, max_len=MAX_LEN, num_slots=120, policy="pow2", min_block=2),
}
POLICIES = (
    FIRST_COME,
    Policy(order="shortest", overtake=True, victim="least_work"),
    Policy(first="prefill", chunked=False, overtake=True),
)


def ticks_of(tokens, kv_tokens, sync_map_calls, samples, pairs):
    ns = STEP + max(WEIGHTS, TOKEN * tokens + SAMPLE * samples) + PAIR * pairs + KV_TOKEN * kv_tokens
    return -(-(ns + MAP_CALL * sync_map_calls) // (1000 * TICK_US))


def random_workload(seed):
    """Bursts and long pauses, short and long outputs, some that ask for nothing or for too much."""
    rng = random.Random(seed)
    arrival, requests = 0, []
    for i in range(COUNT):
        arrival += rng.choice([0, 0, 3, 40, 300])
        prompt = rng.choice([rng.randint(1, 6), rng.randint(1, 20), rng.randint(1, MAX_LEN)])
        output = rng.choice([0, 1, rng.randint(1, 8), rng.randint(8, 30), rng.randint(20, 60)])
        requests.append(Request(i, prompt, output, arrival, [0] * 60, predicted=rng.randint(0, 30)))
    for request in requests:
        request.delivered = rng.choice([0, rng.randint(0, request.prompt), request.prompt])
    return requests


def on_device(requests):
    """On the device, with what they bring if anybody does."""
    brings = any(r.delivered for r in requests)
    return make_requests(
        None,
        np.array([r.prompt for r in requests]),
        np.array([r.output for r in requests]),
        np.array([r.arrival for r in requests]) * (TICK_US / 1000),
        seed=0,
        predicted_lens=np.array([r.predicted for r in requests]),
        delivered=np.array([r.delivered for r in requests]) if brings else None,
    )


@functools.cache
def simulator(name, max_stride, max_records=512):
    return Simulator(MEMORIES[name], BUDGET, COST, max_stride=max_stride, max_records=max_records)


def leaves(simulated):
    return [leaf.tolist() for leaf in jax.tree.leaves((simulated.steps, simulated.progress))]


@pytest.mark.parametrize("name", MEMORIES)
def test_every_step_is_that_of_the_oracle_and_strides_change_nothing(name):
    memory, of_steps, of_turns, brought, brought_again = MEMORIES[name], 0, 0, 0, 0
    for seed in range(50):
        policy = POLICIES[seed % len(POLICIES)]
        requests = random_workload(seed)
        if name not in DELIVERED:
            for request in requests:
                request.delivered = 0
        choice = choices(policy, POLICIES)
        found = simulate(simulator(name, 6), on_device(requests), choice=choice)
        oracle = PolicyOracle(ORACLES[type(memory)](memory), requests, BUDGET, -1, ticks_of, policy)
        steps = found.steps
        for i in range(len(steps.clock)):
            step, where = oracle.step(), f"seed {seed}, step {i}"
            new = sum(step.new_tokens.values())
            for field, expected in [
                *[(f, getattr(step, f)) for f in ("clock", "ticks", "waiting", "admitted", "refused", "preempted")],
                *[(f, getattr(step, f)) for f in ("recompute_tokens", "ended", "prefill_tokens", "hit_tokens")],
                ("running", len(step.rows)),
                ("kv_tokens", step.kv_tokens),
                ("new_tokens", new),
                ("sampled", len(step.samples)),
            ]:
                assert getattr(steps, field)[i] == expected, f"{field}, {where}"
            assert tuple(int(leaf[i]) for leaf in jax.tree.leaves(steps.usage))[: len(step.usage)] == step.usage, where
            calls = steps.sync_map_calls, steps.background_map_calls, steps.unmap_calls
            assert tuple(int(leaf[i]) for leaf in calls) == step.calls, where
        assert all(r.ended for r in requests), f"seed {seed}"
        for field in ("generated", "admitted_at", "first_token_at", "ended_at", "preemptions"):
            assert getattr(found.progress, field).tolist() == [getattr(r, field) for r in requests], f"{field}, {seed}"
        assert found.progress.reason.tolist() == [Reason[r.reason] for r in requests]
        of_steps, of_turns = of_steps + len(steps.clock), of_turns + found.turns
        brought += sum(r.delivered > 0 and r.generated > 0 for r in requests)
        brought_again += sum(r.delivered > 0 and r.preemptions > 0 for r in requests)
        if seed % 10 == 0:
            assert leaves(found) == leaves(simulate(simulator(name, 1), on_device(requests), choice=choice))
    assert of_turns < 0.8 * of_steps  # strides were taken
    assert (min(brought, brought_again) > 10) == (name in DELIVERED)


def test_a_record_that_fills_its_room_goes_on_in_the_next_dispatch():
    requests = on_device(random_workload(3))
    whole = simulate(simulator("paged", 6), requests)
    pieces = simulate(simulator("paged", 6, max_records=10), requests)
    assert len(whole.steps.clock) > 30
    assert leaves(whole) == leaves(pieces)


# Prompts 0, 1 and 4 begin alike.
STEPS = 80
LENGTHS, OUTPUTS = [18, 15, 5, 12, 20, 1], [9, 12, 12, 7, 8, 12]
ENGINES = {
    "paged": (Paged(rows=4, max_len=32, block_size=4, num_blocks=11), FIRST_COME),
    "cached": (Paged(rows=4, max_len=32, block_size=4, num_blocks=12, cache=PrefixCache()), Policy(overtake=True)),
    "swap": (Paged(rows=4, max_len=32, block_size=4, num_blocks=11, host_blocks=9), Policy(preemption="swap")),
    "forks": (Paged(rows=4, max_len=32, block_size=4, num_blocks=22, forks=True), FIRST_COME),
    "vattention": (VAttention(4, 32, 12, page_bytes=8, token_bytes=2, buffers=2), Policy(first="prefill")),
    "reserved": (Reserved(rows=4, max_len=32, num_slots=96, policy="oracle", min_block=2), Policy(order="shortest")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("cached", "vattention") else pytest.mark.soak) for name in ENGINES]
)
def test_the_engine_takes_the_same_decisions_step_by_step(name):
    memory, policy = ENGINES[name]
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, fake_model.VOCAB, (len(LENGTHS), max(LENGTHS)))
    prompts[[1, 4], :13] = prompts[0, :13]
    requests = make_requests(
        prompts,
        np.array(LENGTHS),
        np.array(OUTPUTS),
        np.arange(6) * 0.4,
        seed=3,
        samples=2 if name == "forks" else 1,
    )
    engine = Engine(memory, fake_model.decode, 8, COST, policy=policy)
    params = fake_model.as_params(fake_model.make_tables(29, 1, 32))

    state = init_engine(
        engine, requests, filled_cache(1, (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM), 0.0)
    )

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def serve(state):
        def one(state, _):
            state, record = step(engine, params, requests, state)
            return state, (state.scheduler, record)

        return jax.lax.scan(one, state, length=STEPS)

    end, served = serve(state)
    single = Simulator(memory, 8, COST, policy, max_stride=1, max_records=1)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def play(simulation, transcripts):
        def one(simulation, _):
            simulation = run(single, requests, simulation, transcripts)
            return simulation, (simulation.scheduler, jax.tree.map(lambda leaf: leaf[0], simulation.records))

        return jax.lax.scan(one, simulation, length=STEPS)[1]

    played = play(init_simulation(single, requests), end.transcripts)
    ended = np.asarray((served[0].progress.status == Status.ENDED).all(axis=1))
    steps = int(ended.argmax()) + 1
    assert 20 < steps < STEPS
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a)[:steps], np.asarray(b)[:steps]), served, played)
    assert jax.tree.all(same), same
    preempted = int(served[1].preempted.sum())
    assert (preempted > 0) == (name in ("paged", "cached", "swap", "vattention"))


def test_requests_that_nobody_will_ever_serve_are_told_and_do_not_loop():
    class Refuses(Paged):
        def admit(self, state, ask):
            return state, jnp.int32(self.rows), jnp.int32(Outcome.LATER)

    memory = Refuses(rows=2, max_len=40, block_size=4, num_blocks=4)
    with pytest.raises(RuntimeError, match="1 requests wait at 0 ticks, nobody is admitted, and nobody who runs"):
        simulate(Simulator(memory, 8), make_requests(None, np.array([3]), np.array([2]), np.zeros(1), seed=0))


def test_a_clock_that_runs_out_and_a_fault_of_memory_are_told():
    slow = Simulator(MEMORIES["paged"], BUDGET, StepCost(step_ns=3600 * 10**9))
    requests = make_requests(None, np.array([3]), np.array([8]), np.zeros(1), seed=0)  # the sixth would be too many
    with pytest.raises(ValueError, match="the modelled clock passed 21474 s"):
        simulate(slow, requests)

    class Forgets(Paged):
        def demand(self, state, new_lengths):
            return jnp.zeros_like(new_lengths)

    memory = Forgets(rows=2, max_len=40, block_size=4, num_blocks=9)
    two = make_requests(None, np.array([16, 16]), np.array([8, 8]), np.zeros(2), seed=0)
    with pytest.raises(MemoryFaultError, match="OUT_OF_BLOCKS"):
        simulate(Simulator(memory, 40, max_stride=1), two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": "8"}, "token_budget must be an int, got '8'"),
        ({"policy": "swap"}, "policy: expected a Policy, got 'swap'"),
        ({"token_budget": 4}, "token_budget: expected at least rows = 5"),
        ({"max_stride": 0}, "max_stride must be"),
        ({"max_records": 0}, "max_records must be"),
        ({"max_records": 2**24}, "max_records, max_stride: expected at most 16,777,216 together"),
        ({"token_budget": 2**31 // MAX_LEN + 1}, "token_budget: expected less than 2.*31 in all .* max_len = 40"),
        ({"policy": Policy(preemption="swap")}, "policy.preemption: 'swap' needs a memory with host blocks"),
    ],
)
def test_servers_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(simulator("paged", 6), **changes)


@pytest.mark.parametrize(("units", "watermark", "message"), [(0, 0, "units"), (2, -1, "watermark"), (21, 0, "1 to 20")])
def test_limits_that_the_memory_does_not_have_are_refused(units, watermark, message):
    one = make_requests(None, np.array([3]), np.array([2]), np.zeros(1), seed=0)
    with pytest.raises(ValueError, match=message):
        init_simulation(simulator("paged", 6), one, limits(units, watermark))


def test_a_program_is_asked_for_no_policy_that_it_may_not_hold():
    with pytest.raises(ValueError, match=r"among: expected every policy that is chosen, got 1 .*shortest"):
        choices(POLICIES[1], (FIRST_COME,))


def test_what_needs_logits_is_refused():
    stops = make_requests(None, np.array([3]), np.array([2]), np.zeros(1), seed=0, stop_token=3)
    with pytest.raises(ValueError, match="requests: expected none with a stop token, as a simulator has no logits"):
        init_simulation(simulator("paged", 6), stops)


def test_what_is_delivered_is_refused_where_keys_and_values_or_their_tokens_are_looked_at():
    brings = make_requests(None, np.array([3]), np.array([2]), np.zeros(1), seed=0, delivered=np.array([2]))
    cached = Simulator(ENGINES["cached"][0], 8, COST)
    with pytest.raises(ValueError, match="delivered: expected nothing with a prefix cache"):
        init_simulation(cached, brings)
    memory = ENGINES["paged"][0]
    cache = filled_cache(1, (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM), 0.0)
    with pytest.raises(ValueError, match="delivered: expected None, as an engine stores what it computes"):
        init_engine(Engine(memory, fake_model.decode, 8, COST), brings, cache)
