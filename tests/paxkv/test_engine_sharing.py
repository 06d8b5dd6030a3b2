"""The engine with memories that share: every token is that of a model without a cache that shares nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import checks
from paxkv.contiguous import VAttention
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import Reason, make_requests
from tests.paxkv import fake_model
from tests.paxkv.oracles.caches import filled_cache
from tests.paxkv.oracles.jitted import quickly

MAX_LEN, BUDGET, STEPS = 32, 8, 16
MERGE = PrefixCache(publish="on_compute", duplicates="merge")
MEMORIES = {
    "schedule_keep": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=14, cache=PrefixCache()),
    "compute_keep_fifo": Paged(
        rows=4,
        max_len=MAX_LEN,
        block_size=3,
        num_blocks=15,
        free_order="fifo",
        cache=PrefixCache(publish="on_compute", eviction="fifo", explain=True),
    ),
    "compute_merge_lfu": Paged(
        rows=4, max_len=MAX_LEN, block_size=2, num_blocks=23, cache=dataclasses.replace(MERGE, eviction="lfu")
    ),
    "collide": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=14, cache=PrefixCache(collide=True)),
    "lookahead": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=14, cache=PrefixCache(), lookahead=5),
    "swap": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=14, host_blocks=9),
    "swap_cache": Paged(
        rows=4, max_len=MAX_LEN, block_size=4, num_blocks=12, cache=PrefixCache(), forks=True, host_blocks=15
    ),
    "forks": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=22, forks=True),
    "forks_cache": Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=22, cache=PrefixCache(), forks=True),
    "forks_merge": Paged(rows=4, max_len=MAX_LEN, block_size=2, num_blocks=42, cache=MERGE, forks=True),
}


def some_slow(names, quick):
    """All names; those that are not among the quick ones are left out where slow tests are."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


FORKING = some_slow([name for name in MEMORIES if name.startswith("forks")], {"forks_merge"})
POLICIES = {"collide": Policy(victim="least_work"), "lookahead": Policy(overtake=True)}
POLICIES |= {"swap": Policy(preemption="swap"), "swap_cache": Policy(preemption="swap", victim="least_work")}

# Prompts 0, 1, 4 and 6 begin alike, 7 is 1 again, and 3 is a whole number of blocks of 4.
LENGTHS, OUTPUTS = [18, 15, 5, 12, 20, 1, 13, 15], [9, 12, 12, 7, 8, 12, 1, 12]


@functools.cache
def tables():
    return fake_model.make_tables(29, 2, MAX_LEN)


@functools.cache
def prompts():
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, fake_model.VOCAB, (len(LENGTHS), max(LENGTHS)))
    tokens[[1, 4, 6], :13] = tokens[0, :13]
    tokens[7] = tokens[1]
    return tokens


def workload(count=8, **options):
    arrival_ms = np.arange(count) * 0.4
    return make_requests(
        prompts()[:count], np.array(LENGTHS[:count]), np.array(OUTPUTS[:count]), arrival_ms, seed=3, **options
    )


def serve(name, requests):
    """Runs to the end, over a cache in which nothing may be read before it was written."""
    memory = MEMORIES[name]
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    cache = filled_cache(2, shape, jnp.nan)
    engine = Engine(memory, fake_model.decode, BUDGET, policy=POLICIES.get(name, Policy()))
    state = init_engine(engine, requests, cache)
    params = fake_model.as_params(tables())
    lowered = run_steps.lower(engine, params, requests, state, STEPS)
    advance = lowered.compile(compiler_options=quickly())
    records = []
    while not all_ended(state):
        state, record = advance(params, requests, state)
        checks.require_invariants(memory, state.scheduler.memory)
        records.append(jax.tree.map(np.asarray, record))
        assert len(records) * STEPS < 600, "livelock"
    assert int(memory.seqs(state.scheduler.memory).faults.word) == 0
    return state, jax.tree.map(lambda *a: np.concatenate(a), *records)


def expected(i, choose):
    prompt = prompts()[i, : LENGTHS[i]].tolist()
    return fake_model.reference_output(tables(), prompt, min(OUTPUTS[i], MAX_LEN - LENGTHS[i]), choose)[0]


def greedy(index, logits):
    return np.argmax(logits)


def drawn(requests, request):
    """Draws from the request's own keys at a temperature of 1.3."""

    def choose(index, logits):
        key = jax.random.fold_in(requests.keys[request], index)
        return jax.random.categorical(key, jnp.asarray(logits / 1.3, jnp.float32))

    return choose


@pytest.mark.parametrize("name", some_slow(MEMORIES, {"swap_cache"}))
def test_shared_prefixes_change_no_token(name):
    requests = workload()
    state, records = serve(name, requests)
    assert output_tokens(requests, state) == [expected(i, greedy) for i in range(len(LENGTHS))]
    memory, stats = MEMORIES[name], state.scheduler.memory.stats
    if memory.cache is not None:
        assert int(stats.hits) >= 12, "prompts 1, 4, 6 and 7 begin like others"
        came_back = records.swapped_in_blocks.sum() * memory.block_size
        found = records.hit_tokens.sum() - int(stats.hits) - int(stats.resumed_hits)
        assert found == 0 or came_back > 0
        assert (records.usage.saved > 0).any()
        assert int(stats.queries) == sum(LENGTHS)
    assert memory.forks or records.preempted.sum() > 0, "memory is meant to be short"
    if memory.host_blocks:
        assert records.swapped_out_blocks.sum() > 0
        assert records.swapped_in_blocks.sum() > 0  # a block that goes out again unchanged is not copied again
    total = records.usage
    parts = total.tokens + total.reserved + total.internal + total.external
    assert (parts == memory.capacity).all()


@pytest.mark.parametrize("name", FORKING)
def test_samples_of_a_prompt_are_drawn_from_their_own_keys_and_share_its_blocks(name):
    requests = workload(count=5, samples=3, temperature=1.3)
    state, records = serve(name, requests)

    for request, tokens in enumerate(output_tokens(requests, state)):
        assert tokens == expected(request // 3, drawn(requests, request)), (
            f"sample {request % 3} of prompt {request // 3}"
        )
    assert (records.usage.saved > 0).any()
    assert len({tuple(t) for t in output_tokens(requests, state)}) > 10
    # Forks share all but the last token of the prompt; where that is in a block with others, all but one copy it.
    torn = sum((length - 1) % MEMORIES[name].block_size != 0 for length in LENGTHS[:5])
    assert records.preempted.sum() == 0
    assert records.copied_blocks.sum() == 2 * torn


def test_samples_that_come_back_share_again_and_are_drawn_as_if_they_had_never_left(monkeypatch):
    short = Paged(rows=6, max_len=MAX_LEN, block_size=4, num_blocks=17, forks=True)
    monkeypatch.setitem(MEMORIES, "short", short)
    requests = workload(count=5, samples=3, temperature=1.3)
    state, records = serve("short", requests)
    assert output_tokens(requests, state) == [expected(i // 3, drawn(requests, i)) for i in range(15)]
    assert records.preempted.sum() > 0
    assert records.recompute_tokens.sum() > 0


def search(prompt, count, width):
    """Beam search in float64 without a cache, all beams scored anew in each step."""
    beams = [(0.0, list(prompt))]
    for _ in range(count):
        children = []
        for score, tokens in beams:
            logits = fake_model.reference_logits(tables(), tokens)
            log_p = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
            children += [(score + log_p[token], [*tokens, token]) for token in range(fake_model.VOCAB)]
        beams = sorted(children, key=lambda child: -child[0])[:width]
    return beams


@pytest.mark.parametrize("name", FORKING)
@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_beams_are_the_best_sequences(name, width):
    requests = workload(count=5, samples=width, beams=True)
    state, _ = serve(name, requests)
    found, scores = output_tokens(requests, state), np.asarray(state.outputs.scores)
    for i in range(5):
        count = min(OUTPUTS[i], MAX_LEN - LENGTHS[i])
        best = search(prompts()[i, : LENGTHS[i]].tolist(), count, width)
        own = range(i * width, (i + 1) * width)
        by_score = sorted(((float(scores[r]), found[r]) for r in own), key=lambda beam: -beam[0])
        assert [tokens for _, tokens in by_score] == [tokens[LENGTHS[i] :] for _, tokens in best]
        np.testing.assert_allclose([s for s, _ in by_score], [s for s, _ in best], atol=2e-5)


def test_more_samples_than_rows_are_refused():
    requests = workload(count=2, samples=5)
    state, _ = serve("forks", requests)
    assert set(np.asarray(state.scheduler.progress.reason)) == {Reason.REFUSED_NEVER_FITS}


@pytest.mark.slow
def test_samples_without_forks_are_requests_like_others():
    requests = workload(count=3, samples=2)
    state, _ = serve("schedule_keep", requests)
    assert output_tokens(requests, state) == [expected(i // 2, greedy) for i in range(6)]


def test_beams_need_a_memory_that_can_fork():
    memory = VAttention(4, MAX_LEN, num_groups=14, page_bytes=48, token_bytes=16, buffers=2)
    cache = filled_cache(1, (memory.num_slots, 1, 4), 0)
    with pytest.raises(ValueError, match="memory: expected one that can fork"):
        init_engine(Engine(memory, fake_model.decode, BUDGET), workload(count=2, samples=2, beams=True), cache)
