"""The decoder under a cache small enough to read; `test_families.py` has what the families differ in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.decoder import forward, make_decode
from models.dense_attend import DenseAttend
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, LayerCache, no_cache
from tests.models.decoder_oracle import oracle_logits
from tests.models.families import TINY as CONFIG
from tests.models.families import by_name, random_model, random_tokens


def reference_logits(model, tokens, positions) -> np.ndarray:
    return oracle_logits(model.config, by_name(make_decode(model)[1]), tokens, positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsAttend:
    """An `Attend` over `[seqs * max_len]` slots: token t belongs to sequence seq_ids[t]. Unused slots may be NaN."""

    seq_ids: jax.Array
    positions: jax.Array
    max_len: int = dataclasses.field(metadata={"static": True})

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
    return KVCache((LayerCache(poison, poison, jnp.zeros(1, jnp.int32)),) * config.layers)


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


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False}, {"q_heads": 2}, {"kv_heads": 1}, {"rope_theta": 1e4, "norm_eps": 0.1}],
    ids=["tied", "untied", "one query head per KV head", "one KV head", "other constants"],
)
def test_logits_equal_those_of_a_float64_decoder(changes):
    model = random_model(dataclasses.replace(CONFIG, **changes))
    tokens = random_tokens(2 * 12).reshape(2, 12)
    logits = run_dense(model, tokens)
    for row in range(2):
        expected = reference_logits(model, tokens[row], np.arange(12))
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=1e-4)


def test_a_token_changes_no_earlier_logits_and_every_later_one():
    tokens = random_tokens(16)
    changed = tokens.copy()
    changed[7] = (changed[7] + 1) % CONFIG.vocab
    first, second = run_dense(random_model(CONFIG), [tokens, changed])
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
    model = random_model(CONFIG)
    tokens = random_tokens(10)
    expected = reference_logits(model, tokens, np.arange(10))
    cache = empty_cache(CONFIG, 10)
    for position, token in enumerate(tokens):
        logits, cache = run(model, [token], [0], [position], cache, max_len=10)
        np.testing.assert_allclose(logits[0], expected[position], rtol=0, atol=1e-4)


def test_a_sequence_in_a_ragged_batch_is_unmoved_by_its_neighbours():
    # Two prefill chunks and a decoding sequence, interleaved token by token, in two calls.
    model = random_model(CONFIG)
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
    model = random_model(CONFIG)
    tokens = random_tokens(8)
    at_zero = run_dense(model, [tokens])[0]
    moved, stretched = (run_at(model, tokens, np.arange(8) * step + start) for start, step in ((50, 1), (0, 3)))
    np.testing.assert_allclose(moved, at_zero, atol=1e-4)
    np.testing.assert_allclose(stretched, reference_logits(model, tokens, np.arange(8) * 3), atol=1e-4)
    assert np.abs(stretched - at_zero).max() > 0.1


def test_logits_come_for_the_selected_tokens_in_their_order():
    model = random_model(CONFIG)
    tokens = random_tokens(6)
    every = run(model, tokens, [0] * 6, range(6), empty_cache(CONFIG, 6), max_len=6)[0]
    some = run(model, tokens, [0] * 6, range(6), empty_cache(CONFIG, 6), max_len=6, select=[5, 0, 99, 5])[0]
    np.testing.assert_allclose(some[[0, 1, 3]], every[[5, 0, 5]], atol=1e-6)


@pytest.mark.parametrize("bad", [-1, CONFIG.vocab])
def test_an_id_outside_the_vocabulary_shows_and_harms_no_other_sequence(bad):
    model = random_model(CONFIG)
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
    first, second = (step(*make_decode(random_model(CONFIG, seed)), tokens) for seed in (0, 1))
    assert len(traces) == 1
    assert np.abs(np.asarray(first - second)).max() > 0.1
    step(*make_decode(random_model(dataclasses.replace(CONFIG, rope_theta=50.0))), tokens)
    assert len(traces) == 2
