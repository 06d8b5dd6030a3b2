"""Each family against a float64 decoder written apart from it: read at once, and through paged memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import Decode, forward
from models.layers import run_layer
from paxkv.attend import MemoryAttend, slots_by_group
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.forward import Reader, begin, extend
from paxkv.kv_format import scheme
from paxkv.memory import Ask
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.ragged import ragged
from paxkv.requests import make_requests
from paxkv.windows import group_layers, num_places
from tests.models.decoder_oracle import oracle_logits
from tests.models.families import FAMILIES, LLAMA3_SCALING, TINY, by_name, random_params, random_tokens
from tests.paxkv.oracles.caches import filled_cache

TOLERANCE = 1e-5  # of the largest logit
CONTEXT = 24  # several windows


# Compiling is all that takes time here.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_forward = jax.jit(forward, static_argnames=("decode",), compiler_options=QUICKLY)


@functools.cache
def expected_logits(config, context=CONTEXT, seed=0):
    return oracle_logits(config, by_name(random_params(config)), random_tokens(context, seed))


def dense_logits(config, context=CONTEXT, forward=quick_forward):
    return np.asarray(
        forward(Decode(config), random_params(config), jnp.asarray(random_tokens(context)[None], jnp.int32))
    )[0]


def error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_read_at_once_gets_the_logits_of_a_float64_decoder(family):
    expected = expected_logits(FAMILIES[family])
    assert np.ptp(expected) > 2
    assert error(dense_logits(FAMILIES[family]), expected) < TOLERANCE


OFF = [
    ("llama", {"rope_theta": 120.0}),
    ("llama", {"norm_eps": 1e-2}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": dataclasses.replace(LLAMA3_SCALING, kind="linear")}),
    ("llama3", {"rope_scaling": dataclasses.replace(LLAMA3_SCALING, low_freq_factor=1.0)}),
    ("llama3", {"rope_scaling": dataclasses.replace(LLAMA3_SCALING, high_freq_factor=3.0)}),
    ("qwen2", {"attention_bias": False}),
    ("qwen3", {"qk_norm": False}),
    ("mistral", {"window": None}),
    ("mistral", {"window": 4}),
    ("mistral", {"window": 6}),
    ("mistral", {"full_every": 2}),
    ("gemma2", {"full_every": None}),
    ("gemma2", {"full_every": 3}),
    ("gemma2", {"window": None, "full_every": None}),
    ("gemma2", {"attention_soft_cap": None}),
    ("gemma2", {"final_soft_cap": None}),
    ("gemma2", {"query_scale": None}),
    ("gemma2", {"norm_plus_one": False}),
    ("gemma2", {"post_norms": False}),
    ("gemma2", {"embedding_scale": False}),
    ("gemma2", {"activation": "silu"}),
    ("gemma3", {"qk_norm": False}),
    ("gemma3", {"local_rope_theta": None}),
    ("gemma3", {"local_rope_theta": 36.0}),
    ("gemma3", {"rope_theta": 1200.0}),
    ("gemma3", {"rope_scaling": None}),
]


@pytest.mark.parametrize(("family", "change"), OFF, ids=[f"{family}: {change}" for family, change in OFF])
def test_a_decoder_without_one_of_the_familys_features_would_be_found_out(family, change):
    """The comparison above can only vouch for what moves logits far beyond its tolerance."""
    without = dataclasses.replace(FAMILIES[family], **change)
    weights = by_name(random_params(FAMILIES[family]))
    changed = oracle_logits(without, weights, random_tokens(CONTEXT))
    assert error(changed, expected_logits(FAMILIES[family])) > 100 * TOLERANCE


# ---- through paged memory ------------------------------------------------------------------------------------------

MEMORY = Paged(rows=2, max_len=18, block_size=3, num_blocks=12)
LENGTHS = (17, 11)  # of two texts side by side; windows are shorter, blocks shorter still


@jax.jit
def plan(texts, counts, state):
    """Makes room for `counts` more tokens of each row; the tokens, and how to attend to what is stored."""
    starts = MEMORY.seqs(state).lengths
    state, outcome = MEMORY.append(state, counts, LENGTHS[0])
    batch = ragged(starts, counts, sum(LENGTHS))
    tokens = texts.at[batch.row, batch.position].get(mode="fill", fill_value=0)
    slots = slots_by_group(MEMORY, state, batch)
    return (
        batch,
        tokens,
        MemoryAttend(state, slots, batch.cu_lens, MEMORY, scheme("f32"), max_q_len=LENGTHS[0]),
        outcome,
    )


@jax.jit(static_argnames=("decode",), compiler_options=QUICKLY)
def step(decode, params, tokens, positions, cache, attend):
    every = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return decode(params, tokens, positions, every, cache, attend)


def empty_cache(config, memory):
    """Nothing may be read before it was written."""
    entries = num_places(memory.layer_groups, config.layers)
    return filled_cache(entries, (memory.num_slots, config.kv_heads, config.head_dim), jnp.nan)


def paged_logits(config, chunks):
    """Logits of two texts that arrive one after the other, whose steps are the `chunks` and then single tokens."""
    texts = np.zeros((2, LENGTHS[0]), np.int32)
    for row, length in enumerate(LENGTHS):
        texts[row, :length] = random_tokens(length, seed=row)
    state = MEMORY.init()
    for length in LENGTHS:
        state, _, outcome = MEMORY.admit(state, Ask(jnp.int32(length), jnp.int32(length), jnp.int32(length)))
        assert outcome == Outcome.OK
    cache = empty_cache(config, MEMORY)
    found = np.full((2, LENGTHS[0], config.vocab), np.nan)
    done = np.zeros(2, np.int32)
    chunks = iter(chunks)
    while (done < LENGTHS).any():
        counts = np.minimum(next(chunks, (1, 1)), LENGTHS - done).astype(np.int32)
        batch, tokens, attend, outcome = plan(texts, counts, state)
        assert outcome == Outcome.OK
        state = attend.state
        logits, cache = step(Decode(config), random_params(config), tokens, batch.position, cache, attend)
        used = int(counts.sum())
        found[np.asarray(batch.row)[:used], np.asarray(batch.position)[:used]] = np.asarray(logits)[:used]
        done += counts
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_comes_in_chunks_and_then_token_by_token_gets_the_same_logits(family):
    """Both at once but for the last tokens; in sevens, one text behind the other; and one by one from the first."""
    config = FAMILIES[family]
    for chunks in ([(14, 8)], [(7, 0), (7, 7), (1, 3)], []):
        found = paged_logits(config, chunks)
        for row, length in enumerate(LENGTHS):
            assert error(found[row, :length], expected_logits(config, length, seed=row)) < TOLERANCE


# ---- element types -------------------------------------------------------------------------------------------------


def test_weights_may_be_shorter_than_the_arithmetic():
    config = dataclasses.replace(FAMILIES["gemma3"], param_dtype="bfloat16")
    assert {array.dtype for array in by_name(random_params(config)).values()} == {jnp.dtype("bfloat16")}
    assert error(dense_logits(config), expected_logits(config)) < TOLERANCE


def test_activations_in_bfloat16_give_float32_logits_that_are_near():
    config = dataclasses.replace(FAMILIES["gemma3"], dtype="bfloat16", param_dtype="bfloat16")
    logits = dense_logits(config)
    assert logits.dtype == np.float32
    assert 100 * TOLERANCE < error(logits, expected_logits(config)) < 0.05
    every_layer = jax.eval_shape(
        lambda p: Decode(config).model(p).layers[0].ffn(jnp.ones((3, 20), jnp.bfloat16)), random_params(config)
    )
    assert every_layer.dtype == jnp.bfloat16


# ---- compiled once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "kinds", "change"), [(30, 1, {}), (7, 2, {"window": 4, "full_every": 6})])
def test_each_kind_of_layer_is_compiled_once_however_many_there_are(layers, kinds, change):
    """Outside of a jitted function too, where every layer is a call of its own."""
    config = dataclasses.replace(TINY, layers=layers, **change)
    run_layer.clear_cache()
    dense_logits(config, forward=forward)
    assert run_layer._cache_size() == kinds
    dense_logits(config, forward=forward)
    assert run_layer._cache_size() == kinds


def test_layers_of_a_kind_are_compiled_once_though_their_groups_differ():
    """A text many windows long, in a memory that has room for it only as windows give back what has left them."""
    config, length, chunk = FAMILIES["gemma3"], 24, 6
    groups = group_layers(config.windows, 2)
    assert [group.window for group in groups] == [None, 4, 4, 4]
    memory = Paged(rows=1, max_len=length, block_size=2, num_blocks=12 + 3 * 6, groups=groups, max_chunk=chunk)
    reader = Reader(memory, Decode(config), scheme("f32"))
    state, _, outcome = begin(reader, memory.init(), length, length)
    assert outcome == Outcome.OK
    cache, text = empty_cache(config, memory), jnp.asarray(random_tokens(length), jnp.int32)
    every, counts = jnp.arange(chunk, dtype=jnp.int32), jnp.full(1, chunk, jnp.int32)
    run_layer.clear_cache()
    found = []
    for first in range(0, length, chunk):
        state, cache, logits, outcome = extend(
            reader, random_params(config), state, cache, text[first : first + chunk], counts, every, max_q_len=chunk
        )
        assert outcome == Outcome.OK
        found.append(logits)
    assert run_layer._cache_size() == 2
    assert error(np.concatenate(found), expected_logits(config, length)) < TOLERANCE


# ---- in the engine -------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_the_engine_serves_the_greedy_tokens_of_a_float64_decoder(family, grouped):
    """Windows, soft caps and scales reach the kernels; prompts come in chunks, beside others' decode steps.

    With groups of layers, what leaves a window is given back and poisoned.
    """
    # Untied: a random model whose output is its embedding repeats itself.
    config, outputs = dataclasses.replace(FAMILIES[family], tied_embeddings=False), 6
    groups = {"groups": group_layers(config.windows, 3), "max_chunk": 7} if grouped else {}
    memory = Paged(rows=2, max_len=32, block_size=3, num_blocks=21, **groups)
    engine = Engine(memory, Decode(config), token_budget=7, on_free="poison")
    prompts = np.stack([random_tokens(13, seed=i) for i in range(3)]).astype(np.int32)
    requests = make_requests(prompts, np.array([13, 9, 11]), np.full(3, outputs), np.zeros(3), seed=0)
    state = init_engine(engine, requests, empty_cache(config, memory))
    state, _ = run_steps(engine, random_params(config), requests, state, 24)
    assert all_ended(state)
    for prompt, length, found in zip(prompts, (13, 9, 11), output_tokens(requests, state), strict=True):
        text = prompt[:length].tolist()
        for _ in range(outputs):
            text.append(int(oracle_logits(config, by_name(random_params(config)), text)[-1].argmax()))
        assert found == text[length:]
        assert len(set(found)) > 1
