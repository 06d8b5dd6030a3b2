"""An outlier of a power of two in one RoPE pair of the keys leaves every logit as it was, bit for bit."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoint import load_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder, forward, make_decode
from models.outliers import with_outlier
from models.text import load_corpus

BYTE_LLAMA = pathlib.Path(__file__).parents[2] / "models" / "checkpoints" / "byte_llama"
CONFIG = DecoderConfig(vocab=50, width=24, layers=2, q_heads=4, kv_heads=2, head_dim=8, ffn=32, max_len=64)


@pytest.fixture(scope="module")
def trained():
    decode, params = make_decode(load_checkpoint(BYTE_LLAMA))
    tokens = jnp.asarray(load_corpus().heldout[:96].astype(np.int32))[None]
    return decode, params, tokens, np.asarray(forward(decode, params, tokens))


@pytest.mark.parametrize(("factor", "pair"), [(64.0, 0), (1024.0, 7), (0.25, 15)])
def test_the_logits_of_a_trained_model_stay_bit_identical(trained, factor, pair):
    decode, params, tokens, logits = trained
    changed = with_outlier(decode.config, params, factor, pair)
    np.testing.assert_array_equal(np.asarray(forward(decode, changed, tokens)), logits)


def test_keys_of_one_pair_grow_in_every_layer_and_head_and_nothing_else_does():
    decode, params = make_decode(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    changed = with_outlier(decode.config, params, 8.0, pair=1)
    ratios = jax.tree.map(lambda new, old: np.asarray(new / old), changed, params)
    for layer in range(CONFIG.layers):
        attention = ratios["layers"][layer]["attention"]
        expected = np.ones(8)
        expected[[1, 5]] = 8
        np.testing.assert_array_equal(attention["k_proj"], np.broadcast_to(expected, (24, 2, 8)))
        np.testing.assert_array_equal(attention["q_proj"], np.broadcast_to(1 / expected, (24, 4, 8)))
        np.testing.assert_array_equal(attention["v_proj"], np.ones((24, 2, 8)))
    untouched = [np.all(r == 1) for r in jax.tree.leaves(ratios)]
    assert untouched.count(False) == 2 * CONFIG.layers


@pytest.mark.parametrize("factor", [3.0, 0.0, -2.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_power_of_two_is_refused(factor):
    with pytest.raises(ValueError, match="factor: expected a power of two"):
        with_outlier(CONFIG, {}, factor)


@pytest.mark.parametrize("pair", [-1, 4])
def test_a_pair_that_does_not_exist_is_refused(pair):
    with pytest.raises(ValueError, match="0 to 3, got"):
        with_outlier(CONFIG, {}, 2.0, pair)
