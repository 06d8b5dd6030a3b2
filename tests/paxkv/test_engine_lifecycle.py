"""What happens to memory beside serving: requests that are aborted, and blocks that are wiped."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import checks
from paxkv.contiguous import VAttention
from paxkv.cost_model import StepCost
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import TICK_US, Reason, Status, make_requests
from paxkv.scheduler import abort
from tests.paxkv import fake_model, unchecked
from tests.paxkv.oracles.caches import filled_cache
from tests.paxkv.oracles.jitted import quickly

MAX_LEN = 24
SHORT = Paged(rows=3, max_len=MAX_LEN, block_size=4, num_blocks=8, cache=PrefixCache(), host_blocks=12)
LENGTHS, OUTPUTS = [13, 9, 14, 13, 5], [8, 10, 6, 8, 9]


def tables():
    return fake_model.make_tables(29, 1, MAX_LEN)


def prompts():
    tokens = np.random.default_rng(5).integers(0, fake_model.VOCAB, (len(LENGTHS), max(LENGTHS)))
    tokens[3] = tokens[0]
    return tokens


def workload():
    return make_requests(prompts(), np.array(LENGTHS), np.array(OUTPUTS), np.zeros(len(LENGTHS)), seed=3)


def start(memory, requests, **options):
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    cache = filled_cache(1, shape, 7)  # somebody else's
    engine = Engine(memory, fake_model.decode, 8, **options)
    state = init_engine(engine, requests, cache)
    params = fake_model.as_params(tables())
    lowered = run_steps.lower(engine, params, requests, state, 1)
    compiled = lowered.compile(compiler_options=quickly())
    return state, lambda state: compiled(params, requests, state)[0]


def expected(i):
    return fake_model.reference_output(
        tables(), prompts()[i, : LENGTHS[i]].tolist(), OUTPUTS[i], lambda _, logits: np.argmax(logits)
    )[0]


@pytest.mark.parametrize(
    ("on_free", "preemption"), [pytest.param("zero", "recompute", marks=pytest.mark.slow), ("poison", "swap")]
)
def test_blocks_of_no_use_hold_nothing_and_tokens_stay_the_same(on_free, preemption):
    """With swaps, a block that was wiped is not taken for the one that went to the host."""
    requests = workload()
    memory = dataclasses.replace(SHORT, host_blocks=8 if preemption == "swap" else 0)
    state, step = start(memory, requests, on_free=on_free, policy=Policy(preemption=preemption))
    was_used = np.zeros(memory.num_blocks, bool)
    while not all_ended(state):
        state = step(state)
        marks = np.asarray(state.scheduler.memory.pool.marks)
        of_use = (marks[:, 0] < 0) | (marks[:, 2] > 0)
        was_used |= of_use
        blocks = np.asarray(state.cache.layers[0].k.data).reshape(memory.num_blocks, -1)
        wiped = np.isnan(blocks) if on_free == "poison" else blocks == 0
        assert wiped[was_used & ~of_use].all()
        assert not wiped[of_use].all(axis=1).any()
    assert output_tokens(requests, state) == [expected(i) for i in range(len(LENGTHS))]
    assert (was_used & ~of_use).any()
    if preemption == "swap":
        assert np.asarray(state.host_cache.layers[0].k.data).any()


@pytest.mark.slow
def test_who_aborts_a_beam_aborts_its_search_and_no_token_of_another():
    memory = Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=20, forks=True)
    lengths, arrival_ms = np.array([1, 9]), np.array([0, 0.01])
    requests = make_requests(prompts()[:2], lengths, np.array([8, 8]), arrival_ms, seed=3, samples=2, beams=True)
    fresh, step = start(memory, requests)

    def serve(abort_before=None, unwanted=None):
        state = jax.tree.map(jnp.copy, fresh)
        for count in itertools.count():
            if count == abort_before:
                scheduler = abort(memory, requests, state.scheduler, jnp.arange(4) == unwanted)
                state = dataclasses.replace(state, scheduler=scheduler)
            if all_ended(state):
                break
            state = step(state)
            checks.require_invariants(memory, state.scheduler.memory)
        assert int(state.scheduler.memory.seqs.faults.word) == 0
        assert int(state.scheduler.memory.pool.num_free) == memory.num_blocks
        return output_tokens(requests, state), np.asarray(state.scheduler.progress.reason)

    # In the first step a beam only comes to the other, of whose prompt there is nothing to compute. It takes its time.
    assert int(step(jax.tree.map(jnp.copy, fresh)).scheduler.clock) == StepCost().step_ns // 1000 // TICK_US
    undisturbed, _ = serve()
    for abort_before, unwanted in ((0, 0), (1, 2), (4, 1), (4, 2), (6, 3)):
        tokens, reason = serve(abort_before, unwanted)
        search = [unwanted // 2 * 2, unwanted // 2 * 2 + 1]
        assert reason[search].tolist() == [Reason.ABORTED] * 2
        for request in set(range(4)) - set(search):
            assert (reason[request], tokens[request]) == (Reason.LENGTH, undisturbed[request])


@pytest.mark.parametrize("publish", ["on_schedule", "on_compute"])
def test_a_prefix_cache_serves_requests_that_are_shorter_than_a_block(publish):
    memory = Paged(rows=2, max_len=32, block_size=16, num_blocks=4, cache=PrefixCache(publish=publish))
    requests = make_requests(np.ones((2, 4), int), np.array([2, 4]), np.array([3, 2]), np.zeros(2), seed=3)
    params = fake_model.as_params(fake_model.make_tables(29, 1, 32))
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    engine = Engine(memory, fake_model.decode, 4)
    state = init_engine(engine, requests, filled_cache(1, shape, 0))
    traced, _ = jax.eval_shape(functools.partial(run_steps, engine, num_steps=1), params, requests, state)
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, state)


@pytest.mark.slow
def test_a_request_can_be_aborted_wherever_it_stands():
    """Before every step of a run, one run each, all are aborted that are in one of the states."""
    requests = workload()
    fresh, step = start(SHORT, requests, policy=Policy(preemption="swap"))
    end = jax.jit(abort, static_argnums=0)
    seen = set()
    history = [fresh]
    while not all_ended(history[-1]):
        history.append(step(jax.tree.map(jnp.copy, history[-1])))
    for state in history:
        scheduler = state.scheduler
        status, parked = np.asarray(scheduler.progress.status), np.asarray(scheduler.places) < SHORT.rows
        for where, unwanted in {
            "waiting": (status == Status.WAITING) & ~parked,
            "parked": parked,
            "running": status == Status.RUNNING,
            "every second": np.arange(len(LENGTHS)) % 2 == 0,
        }.items():
            if not (unwanted & (status != Status.ENDED)).any():
                continue
            seen.add(where)
            aborted = end(SHORT, requests, jax.tree.map(jnp.copy, scheduler), jnp.asarray(unwanted))
            checks.require_invariants(SHORT, aborted.memory)
            reason = np.asarray(aborted.progress.reason)
            assert (reason[unwanted & (status != Status.ENDED)] == Reason.ABORTED).all()
            assert (reason[~unwanted] == np.asarray(scheduler.progress.reason)[~unwanted]).all()
            on_host = np.asarray(aborted.places) < SHORT.rows
            assert not (on_host & unwanted).any()
            assert int(aborted.memory.swap.parked.sum()) == on_host.sum()
    assert seen == {"waiting", "parked", "running", "every second"}

    state = dataclasses.replace(history[12], scheduler=end(SHORT, requests, history[12].scheduler, jnp.arange(5) == 2))
    while not all_ended(state):
        state = step(state)
    memory = state.scheduler.memory
    assert int(memory.seqs.faults.word) == 0
    assert int(memory.pool.num_free) == SHORT.num_blocks
    assert int(memory.swap.pool.num_free) == SHORT.host_blocks
    for i in (0, 1, 3, 4):
        assert output_tokens(requests, state)[i] == expected(i)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": True}, "policy: expected a Policy, got True"),
        ({"token_budget": "8"}, "token_budget must be an int, got '8'"),
        ({"token_budget": 2}, "token_budget: expected at least rows = 3.*got 2"),
        ({"on_free": None}, "on_free: expected one of keep, zero, poison, got None"),
    ],
)
def test_engines_that_could_not_serve_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(Engine(SHORT, fake_model.decode, 8), **changes)


def test_memory_without_blocks_cannot_be_wiped():
    memory = VAttention(3, MAX_LEN, num_groups=9, page_bytes=48, token_bytes=16, buffers=2)
    with pytest.raises(ValueError, match="on_free: expected 'keep' with VAttention memory"):
        Engine(memory, fake_model.decode, 8, on_free="zero")
