"""The engine with a tiny model, against the same model in float64 that has no cache, and an oracle of the schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.cost_model import StepCost
from paxkv.engine import Engine, EngineState, Outputs, all_ended, init_engine, output_tokens, run_steps
from paxkv.paged import Paged
from paxkv.requests import Reason, make_requests
from paxkv.reserved import Reserved
from paxkv.scheduler_state import init_scheduler
from tests.paxkv import fake_model
from tests.paxkv.oracles.caches import filled_cache
from tests.paxkv.oracles.lockstep import ORACLES
from tests.paxkv.scheduler_oracle import Request, SchedulerOracle

MAX_LEN, BUDGET, STOP, STEPS = 32, 6, 16, 16
COST = StepCost(step_ns=70_001, token_ns=11_003, kv_token_ns=507, map_call_ns=40_000)
MEMORIES = {
    "paged_1": Paged(rows=4, max_len=MAX_LEN, block_size=1, num_blocks=41),
    "paged_3": Paged(rows=4, max_len=MAX_LEN, block_size=3, num_blocks=14),
    "paged_16": Paged(rows=4, max_len=MAX_LEN, block_size=16, num_blocks=3),
    "vattention": VAttention(4, MAX_LEN, num_groups=14, page_bytes=48, token_bytes=16, buffers=2),
    "reserved_pow2": Reserved(rows=4, max_len=MAX_LEN, num_slots=90, policy="pow2"),
}
TWO_LAYERS = ("paged_16", "vattention")
GREEDY = np.zeros(10, np.float32)

# Prompt and output lengths, and arrivals in ticks. Together far more than any of the memories holds at once.
PROMPTS = [9, 1, 14, 4, 28, 6, 2, 16, 7, 31]
OUTPUTS = [14, 14, 14, 11, 14, 14, 1, 14, 0, 14]
ARRIVALS = [0, 0, 0, 40, 41, 41, 200, 200, 700, 40_000]


@functools.cache
def tables(layers):
    return fake_model.make_tables(29, layers, MAX_LEN)


def layers_of(name):
    return 2 if name in TWO_LAYERS else 1


def engine_of(name):
    return Engine(MEMORIES[name], fake_model.decode, BUDGET, COST)


def poisoned_cache(name):
    """Nothing may be read before it was written."""
    shape = (MEMORIES[name].num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    return filled_cache(layers_of(name), shape, jnp.nan)


@functools.cache
def prompts():
    """Random tokens; behind the end of a prompt there is one that is never right."""
    tokens = np.random.default_rng(3).integers(0, fake_model.VOCAB, (len(PROMPTS), max(PROMPTS)))
    return np.where(np.arange(max(PROMPTS)) < np.array(PROMPTS)[:, None], tokens, fake_model.VOCAB)


def workload(outputs=OUTPUTS, temperatures=GREEDY, seed=11):
    arrival_ms = np.array(ARRIVALS) / 100
    requests = make_requests(prompts(), np.array(PROMPTS), np.array(outputs), arrival_ms, seed=seed, stop_token=STOP)
    return dataclasses.replace(requests, temperatures=jnp.asarray(temperatures))


@functools.cache
def compiled(name, num_steps=STEPS):
    requests = workload()
    state = init_engine(engine_of(name), requests, poisoned_cache(name))
    params = fake_model.as_params(tables(layers_of(name)))
    lowered = run_steps.lower(engine_of(name), params, requests, state, num_steps)
    # A quarter of the time of a full compilation, for a program that runs for milliseconds.
    advance = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return functools.partial(advance, params)


def serve(name, requests, num_steps=STEPS):
    """Runs to the end; the state and records as NumPy arrays, one entry a step."""
    state = init_engine(engine_of(name), requests, poisoned_cache(name))
    records = []
    while not all_ended(state):
        state, record = compiled(name, num_steps)(requests, state)
        records.append(jax.tree.map(np.asarray, record))
        behind = np.arange(max(OUTPUTS)) >= np.asarray(state.scheduler.progress.generated)[:, None]
        assert not any(np.asarray(array)[behind].any() for array in (state.outputs.ticks, state.outputs.margins))
        assert len(records) * num_steps < 500, "livelock"
    assert int(engine_of(name).memory.seqs(state.scheduler.memory).faults.word) == 0
    return jax.tree.map(np.asarray, state), jax.tree.map(lambda *a: np.concatenate(a), *records)


def final_output_lens():
    """Tokens that each request would get without a stop token."""
    return [min(n, max(0, MAX_LEN - p)) if p < MAX_LEN else 0 for p, n in zip(PROMPTS, OUTPUTS, strict=True)]


def greedy(index, logits):
    return np.argmax(logits)


@functools.cache
def expected(layers):
    """Tokens and margins of every request, cut behind the stop token."""
    found = []
    for i, count in enumerate(final_output_lens()):
        tokens, margins = fake_model.reference_output(
            tables(layers), prompts()[i, : PROMPTS[i]].tolist(), count, greedy
        )
        end = tokens.index(STOP) + 1 if STOP in tokens else count
        found.append((tokens[:end], margins[:end]))
    return found


def test_the_reference_decides_clearly():
    """What the other tests compare is not a matter of rounding, and every kind of end occurs."""
    for layers in (1, 2):
        assert min(min(margins, default=1) for _, margins in expected(layers)) > 1e-2
        tokens = [t for out, _ in expected(layers) for t in out]
        assert len(set(tokens)) > 8
        assert STOP in tokens


@pytest.mark.parametrize("name", MEMORIES)
def test_greedy_tokens_are_those_of_a_model_without_a_cache(name):
    requests = workload()
    state, records = serve(name, requests)
    outputs, progress = state.outputs, state.scheduler.progress
    generated = output_tokens(requests, state)
    for i, (tokens, margins) in enumerate(expected(layers_of(name))):
        count = len(tokens)
        assert int(progress.generated[i]) == count, f"request {i}"
        assert generated[i] == tokens, f"request {i}"
        np.testing.assert_allclose(outputs.margins[i, :count], margins, atol=2e-5)
        if count:
            assert (np.diff(outputs.ticks[i, :count]) > 0).all()
            assert outputs.ticks[i, 0] == progress.first_token_at[i]
            assert outputs.ticks[i, count - 1] == progress.ended_at[i]
    if name != "reserved_pow2":
        assert progress.preemptions.sum() >= (1 if name == "paged_16" else 2)
    assert (records.new_tokens > 1).any()


@pytest.mark.parametrize("name", MEMORIES)
def test_every_record_is_that_of_the_oracle(name):
    memory = MEMORIES[name]
    state, records = serve(name, workload())
    found = [
        Request(i, PROMPTS[i], OUTPUTS[i], ARRIVALS[i], tokens)
        for i, (tokens, _) in enumerate(expected(layers_of(name)))
    ]
    oracle = SchedulerOracle(ORACLES[type(memory)](memory), found, BUDGET, STOP, modelled_ticks)
    for i in range(len(records.clock)):
        record = jax.tree.map(lambda a, i=i: int(a[i]), records)
        step = oracle.step()
        assert dataclasses.asdict(record) == {
            "clock": step.clock,
            "ticks": step.ticks,
            "running": len(step.rows),
            "waiting": step.waiting,
            "new_tokens": sum(step.new_tokens.values()),
            "prefill_tokens": step.prefill_tokens,
            "sampled": len(step.samples),
            "admitted": step.admitted,
            "refused": step.refused,
            "preempted": step.preempted,
            "recompute_tokens": step.recompute_tokens,
            "ended": step.ended,
            "kv_tokens": step.kv_tokens,
            "hit_tokens": 0,
            "swapped_out_blocks": 0,
            "swapped_in_blocks": 0,
            "copied_blocks": 0,
            "usage": {
                "saved": 0,
                **dict(zip(("tokens", "reserved", "internal", "external", "allocated"), step.usage, strict=True)),
            },
            "sync_map_calls": step.calls[0],
            "background_map_calls": step.calls[1],
            "unmap_calls": step.calls[2],
        }, f"step {i}"
    progress = state.scheduler.progress
    assert progress.reason.tolist() == [Reason[r.reason] for r in found]
    for field in ("admitted_at", "first_token_at", "ended_at", "preemptions"):
        assert getattr(progress, field).tolist() == [getattr(r, field) for r in found], field
    if name != "reserved_pow2":
        assert max(r.recomputed_output for r in found) > 1


@pytest.mark.parametrize("names", [("paged_1", "paged_3", "reserved_pow2"), ("paged_16", "vattention")])
def test_memories_agree_bit_for_bit_where_none_is_short(names):
    few = [n if i in (0, 3, 6, 9) else 0 for i, n in enumerate(OUTPUTS)]
    first, *others = (serve(name, workload(few))[0] for name in names)
    assert first.scheduler.progress.generated.sum() > 15
    assert first.scheduler.progress.preemptions.sum() == 0
    for other in others:
        assert_equal_bits((first.transcripts, first.outputs.margins), (other.transcripts, other.outputs.margins))


def modelled_ticks(tokens, kv_tokens, sync_map_calls, *others):
    ns = COST.step_ns + COST.token_ns * tokens + COST.kv_token_ns * kv_tokens + COST.map_call_ns * sync_map_calls
    return -(-ns // 10_000)


def test_the_whole_is_traced_once_whatever_is_asked_for():
    requests = workload()
    other = dataclasses.replace(
        workload(temperatures=SAMPLED, seed=12),
        prompt_lens=jnp.asarray(PROMPTS[::-1], jnp.int32),
        output_lens=jnp.asarray(OUTPUTS[::-1], jnp.int32),
    )
    state, _ = compiled("paged_3")(requests, init_engine(engine_of("paged_3"), requests, poisoned_cache("paged_3")))
    params = fake_model.as_params(tables(1))
    traced = len(fake_model.traces)
    run_steps.lower(engine_of("paged_3"), params, requests, state, STEPS)
    run_steps.lower(engine_of("paged_3"), params, other, state, STEPS)
    assert len(fake_model.traces) == traced
    run_steps.lower(engine_of("paged_3"), params, requests, state, STEPS + 1)
    assert len(fake_model.traces) > traced


def test_many_steps_on_the_device_are_single_steps_one_after_another():
    requests = workload(temperatures=np.linspace(0, 2, 10, dtype=np.float32))
    many, many_records = serve("paged_3", requests)
    ones, one_records = serve("paged_3", requests, num_steps=1)
    assert_equal_bits(many, ones)
    assert_equal_bits(jax.tree.map(lambda a: a[: len(one_records.clock)], many_records), one_records)
    assert len(one_records.clock) > 3 * STEPS


def assert_equal_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.tobytes() == y.tobytes()


SAMPLED = np.array([0.5, 1, 2, 1, 1, 1.5, 3, 1, 1, 1], np.float32)


def replay(requests, i, layers=1):
    """Request i drawn as documented, from its own key folded with the index of each token."""

    def choose(index, logits):
        key = jax.random.fold_in(requests.keys[i], index)
        return jax.random.categorical(key, jnp.asarray(logits / float(SAMPLED[i]), jnp.float32))

    prompt = prompts()[i, : PROMPTS[i]].tolist()
    tokens, _ = fake_model.reference_output(tables(layers), prompt, final_output_lens()[i], choose)
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens


def tokens_of(state):
    return output_tokens(workload(), state)


def test_sampled_tokens_are_drawn_from_each_requests_own_keys():
    requests = workload(temperatures=SAMPLED)
    state, _ = serve("paged_3", requests)
    assert state.scheduler.progress.preemptions.sum() >= 2
    assert tokens_of(state) == [replay(requests, i) for i in range(len(PROMPTS))]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    first, again, other = (serve("paged_3", workload(temperatures=SAMPLED, seed=s))[0] for s in (4, 4, 5))
    assert_equal_bits((first.outputs, first.transcripts), (again.outputs, again.transcripts))
    assert tokens_of(first) != tokens_of(other)


def test_a_request_gets_the_same_tokens_alone_and_in_company():
    company = tokens_of(serve("paged_3", workload(temperatures=SAMPLED))[0])
    for i in (0, 5, 7):  # of the longest outputs, so that the arrays of outputs keep their width
        alone = [n if j == i else 0 for j, n in enumerate(OUTPUTS)]
        assert tokens_of(serve("paged_3", workload(alone, SAMPLED))[0])[i] == company[i]


@pytest.mark.parametrize(
    "memory",
    [
        Paged(rows=4, max_len=MAX_LEN, block_size=16, num_blocks=1 << 15),
        VAttention(4, 1 << 17, num_groups=1 << 15, page_bytes=256, token_bytes=16, buffers=2),
    ],
    ids=["paged", "vattention"],
)
def test_a_step_makes_no_copy_of_the_cache(memory):
    """Compiled for arrays that are never allocated: 16 MiB of keys and values."""
    engine = Engine(memory, fake_model.decode, BUDGET)
    requests = workload()
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    cache = jax.eval_shape(lambda: filled_cache(1, shape, 0))
    small = (len(PROMPTS), max(OUTPUTS))
    outputs = Outputs(
        ticks=jax.ShapeDtypeStruct(small, jnp.int32),
        margins=jax.ShapeDtypeStruct(small, jnp.float32),
        scores=jax.ShapeDtypeStruct(small[:1], jnp.float32),
    )
    scheduler = jax.eval_shape(lambda: init_scheduler(memory, requests))
    transcripts = jax.ShapeDtypeStruct((small[0], requests.prompts.shape[1] + small[1]), jnp.int32)
    state = EngineState(scheduler, cache, None, transcripts, outputs)
    lowered = run_steps.lower(engine, fake_model.as_params(tables(1)), requests, state, STEPS)
    sizes = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
    kv_bytes = 2 * 4 * int(np.prod(shape))
    assert kv_bytes >= 1 << 24
    assert sizes.alias_size_in_bytes > kv_bytes
    assert sizes.temp_size_in_bytes < kv_bytes / 100


def test_a_budget_that_could_starve_a_running_request_is_refused():
    with pytest.raises(ValueError, match=r"token_budget: expected at least rows = 4.*got 3"):
        Engine(MEMORIES["paged_3"], fake_model.decode, 3)
    Engine(MEMORIES["paged_3"], fake_model.decode, 4)


def test_a_cache_of_another_size_is_refused():
    cache = poisoned_cache("paged_1")
    with pytest.raises(ValueError, match=r"cache: expected 42 slots.*got 41"):
        init_engine(engine_of("paged_3"), workload(), cache)
