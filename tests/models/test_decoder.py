"""The decoder against a float64 decoder written apart from it, and under a cache small enough to read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import DecoderConfig
from models.decoder import Decoder, DenseAttend, forward, make_decode, rope
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, LayerCache, no_cache

# Three query heads to a KV head, and sizes that all differ, so that no two axes can be confused.
CONFIG = DecoderConfig(vocab=19, width=20, layers=2, q_heads=6, kv_heads=2, head_dim=8, ffn=28, rope_theta=100.0)


@functools.cache
def make_model(config: DecoderConfig = CONFIG, seed: int = 0) -> Decoder:
    """Random weights, larger than training starts with: attention is peaked, norms are not all one."""
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    leaves, structure = jax.tree.flatten(nnx.as_pure(state))
    rng = np.random.default_rng(seed)
    larger = [np.float32(2) * np.asarray(x) if x.ndim > 1 else rng.uniform(0.5, 2, x.shape) for x in leaves]
    return nnx.merge(graph, structure.unflatten(jnp.asarray(x, jnp.float32) for x in larger))


def reference_logits(model: Decoder, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One sequence in float64: a loop over heads, RoPE by complex numbers, the whole score matrix."""
    config = model.config

    def weight(param):
        return np.asarray(param[...], np.float64)

    def norm(x, module):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight(module.scale)

    def turn(x):
        half = config.head_dim // 2
        angles = np.outer(positions, [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)])
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = weight(model.embedding)[tokens]
    for layer in model.layers:
        h = norm(x, layer.attention_norm)
        q_proj, k_proj, v_proj, o_proj = (
            weight(getattr(layer.attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        for q_head in range(config.q_heads):
            kv_head = q_head // (config.q_heads // config.kv_heads)
            q, k, v = turn(h @ q_proj[:, q_head]), turn(h @ k_proj[:, kv_head]), h @ v_proj[:, kv_head]
            scores = q @ k.T / np.sqrt(config.head_dim)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            x = x + p / p.sum(-1, keepdims=True) @ v @ o_proj[q_head]
        h = norm(x, layer.ffn_norm)
        gate, up = h @ weight(layer.ffn.gate_proj), h @ weight(layer.ffn.up_proj)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(layer.ffn.down_proj)
    output = model.embedding if config.tied_embeddings else model.output
    return norm(x, model.norm) @ weight(output).T


@dataclasses.dataclass(frozen=True)
class RowsAttend:
    """An `Attend` over `[seqs * max_len]` slots: token t belongs to sequence seq_ids[t]. Unused slots may be NaN."""

    seq_ids: jax.Array
    positions: jax.Array
    max_len: int

    def of_layer(self, layer):
        return self, layer

    def __call__(self, q, k, v, cache, spec):
        seq_ids, positions, max_len = self.seq_ids, self.positions, self.max_len
        slots = seq_ids * max_len + positions
        new_k, new_v = cache.k.data.at[slots].set(k), cache.v.data.at[slots].set(v)
        group = q.shape[1] // k.shape[1]
        rows = (seq_ids * max_len)[:, None] + jnp.arange(max_len)[None, :]
        seen = (jnp.arange(max_len)[None, :] <= positions[:, None])[:, :, None]
        keys = jnp.where(seen[..., None], jnp.repeat(new_k[rows], group, axis=2), 0)
        values = jnp.where(seen[..., None], jnp.repeat(new_v[rows], group, axis=2), 0)
        scores = jnp.where(seen, jnp.einsum("tnh,tsnh->tsn", q, keys) / q.shape[-1] ** 0.5, -jnp.inf)
        out = jnp.einsum("tsn,tsnh->tnh", jax.nn.softmax(scores, axis=1), values)
        return out, LayerCache(KVPool(new_k), KVPool(new_v), cache.clipped)


def empty_cache(config: DecoderConfig, slots: int) -> KVCache:
    poison = KVPool(jnp.full((slots, config.kv_heads, config.head_dim), jnp.nan, jnp.float32))
    return KVCache((LayerCache(poison, poison, jnp.int32(0)),) * config.layers)


@jax.jit(static_argnames=("decode", "max_len"))
def decode_rows(decode, params, tokens, seq_ids, positions, select, cache, max_len):
    return decode(params, tokens, positions, select, cache, RowsAttend(seq_ids, positions, max_len))


def run(model, tokens, seq_ids, positions, cache, max_len, select=None):
    """One decode call over a ragged batch; logits of every token unless some are selected."""
    select = range(len(tokens)) if select is None else select
    arrays = (np.array(x, np.int32) for x in (tokens, seq_ids, positions, select))
    logits, cache = decode_rows(*make_decode(model), *arrays, cache, max_len)
    return np.asarray(logits), cache


forward_jit = jax.jit(forward, static_argnames=("decode",))


def run_dense(model, tokens):
    return np.asarray(forward_jit(*make_decode(model), np.asarray(tokens, np.int32)))


@jax.jit(static_argnames=("decode",))
def decode_one(decode, params, tokens, positions, select):
    return decode(params, tokens, positions, select, no_cache(decode.config.layers), DenseAttend(batch=1))[0]


def run_at(model, tokens, positions):
    arrays = (np.array(x, np.int32) for x in (tokens, positions, range(len(tokens))))
    return np.asarray(decode_one(*make_decode(model), *arrays))


def random_tokens(count: int, seed: int = 0, vocab: int = CONFIG.vocab) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False}, {"q_heads": 2}, {"kv_heads": 1}, {"rope_theta": 1e4, "norm_eps": 0.1}],
    ids=["tied", "untied", "one query head per KV head", "one KV head", "other constants"],
)
def test_logits_equal_those_of_a_float64_decoder(changes):
    model = make_model(dataclasses.replace(CONFIG, **changes))
    tokens = random_tokens(2 * 12).reshape(2, 12)
    logits = run_dense(model, tokens)
    for row in range(2):
        expected = reference_logits(model, tokens[row], np.arange(12))
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=1e-4)


def test_rope_is_exact_at_the_last_trained_position():
    # theta^(-2i/head_dim) by hand: 1, 1/10, 1/100, 1/1000.
    turned = rope(
        jnp.concatenate([jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4))], axis=-1), jnp.array([1023], jnp.int32), 1e4
    )
    angles = np.array([1023, 102.3, 10.23, 1.023])
    np.testing.assert_allclose(np.asarray(turned)[0, 0], [*np.cos(angles), *np.sin(angles)], atol=1e-5)


def test_a_token_changes_no_earlier_logits_and_every_later_one():
    tokens = random_tokens(16)
    changed = tokens.copy()
    changed[7] = (changed[7] + 1) % CONFIG.vocab
    first, second = run_dense(make_model(), [tokens, changed])
    np.testing.assert_array_equal(first[:7], second[:7])
    assert (np.abs(first[7:] - second[7:]).max(axis=-1) > 1e-3).all()


def test_consecutive_query_heads_share_a_kv_head():
    # Values are the number of their KV head, so the output names the head that was read.
    q = jnp.ones((4, 6, 8))
    v = jnp.broadcast_to(jnp.array([1.0, 2.0])[None, :, None], (4, 2, 8))
    out, cache = DenseAttend(batch=1)(q, jnp.ones((4, 2, 8)), v, None, AttentionSpec())
    np.testing.assert_allclose(out, np.broadcast_to(np.array([1, 1, 1, 2, 2, 2])[None, :, None], (4, 6, 8)))
    assert cache is None


def test_step_by_step_decoding_equals_one_pass():
    model = make_model()
    tokens = random_tokens(10)
    expected = reference_logits(model, tokens, np.arange(10))
    cache = empty_cache(CONFIG, 10)
    for position, token in enumerate(tokens):
        logits, cache = run(model, [token], [0], [position], cache, max_len=10)
        np.testing.assert_allclose(logits[0], expected[position], rtol=0, atol=1e-4)


def test_a_sequence_in_a_ragged_batch_is_unmoved_by_its_neighbours():
    # Two prefill chunks and a decoding sequence, interleaved token by token, in two calls.
    model = make_model()
    lengths = (9, 5, 7)
    texts = [random_tokens(n, seed=n) for n in lengths]
    expected = [reference_logits(model, text, np.arange(len(text))) for text in texts]
    cache = empty_cache(CONFIG, 3 * 9)
    first = [(s, p) for p in range(6) for s in range(3) if p < (4, 5, 6)[s]]
    rest = [(s, p) for p in range(9) for s in range(3) if (4, 5, 6)[s] <= p < lengths[s]]
    for call in (first, rest):
        seq_ids, positions = zip(*call, strict=True)
        logits, cache = run(model, [texts[s][p] for s, p in call], seq_ids, positions, cache, max_len=9)
        for row, (s, p) in enumerate(call):
            np.testing.assert_allclose(logits[row], expected[s][p], rtol=0, atol=1e-4)


def test_positions_are_those_given_and_only_their_distances_matter():
    model = make_model()
    tokens = random_tokens(8)
    at_zero = run_dense(model, [tokens])[0]
    moved, stretched = (run_at(model, tokens, np.arange(8) * step + start) for start, step in ((50, 1), (0, 3)))
    np.testing.assert_allclose(moved, at_zero, atol=1e-4)
    np.testing.assert_allclose(stretched, reference_logits(model, tokens, np.arange(8) * 3), atol=1e-4)
    assert np.abs(stretched - at_zero).max() > 0.1


def test_logits_come_for_the_selected_tokens_in_their_order():
    model = make_model()
    tokens = random_tokens(6)
    every = run(model, tokens, [0] * 6, range(6), empty_cache(CONFIG, 6), max_len=6)[0]
    some = run(model, tokens, [0] * 6, range(6), empty_cache(CONFIG, 6), max_len=6, select=[5, 0, 99, 5])[0]
    np.testing.assert_allclose(some[[0, 1, 3]], every[[5, 0, 5]], atol=1e-6)


@pytest.mark.parametrize("bad", [-1, CONFIG.vocab])
def test_an_id_outside_the_vocabulary_shows_and_harms_no_other_sequence(bad):
    model = make_model()
    tokens = random_tokens(4)
    good = run(model, tokens, [0, 0, 1, 1], [0, 1, 0, 1], empty_cache(CONFIG, 4), max_len=2)[0]
    tokens[1] = bad
    logits = run(model, tokens, [0, 0, 1, 1], [0, 1, 0, 1], empty_cache(CONFIG, 4), max_len=2)[0]
    assert np.isnan(logits[1]).all()
    np.testing.assert_array_equal(logits[[0, 2, 3]], good[[0, 2, 3]])


def test_models_of_one_config_share_a_compiled_program():
    traces = []

    @jax.jit(static_argnames=("decode",))
    def step(decode, params, tokens):
        traces.append(decode)
        return forward(decode, params, tokens)

    tokens = jnp.zeros((1, 4), jnp.int32)
    first, second = (step(*make_decode(make_model(seed=seed)), tokens) for seed in (0, 1))
    assert len(traces) == 1
    assert np.abs(np.asarray(first - second)).max() > 0.1
    step(*make_decode(make_model(dataclasses.replace(CONFIG, rope_theta=50.0))), tokens)
    assert len(traces) == 2
