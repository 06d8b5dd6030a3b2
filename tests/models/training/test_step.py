import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import by_name, load_checkpoint
from models.decoder import make_decode
from models.names import find_model
from models.training.step import decayed, learning_rate, make_optimizer
from tests.models.families import FAMILIES, random_params
from tests.models.training.tiny import CONFIG

MATRICES = {
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "ffn.gate_proj",
    "ffn.up_proj",
    "ffn.down_proj",
}
# What a family has beside the matrices of its layers, the norms before attention and feed-forward, and the last norm.
NORMS = {"attention_norm.scale", "ffn_norm.scale"}
HEAD_NORMS = {"attention.q_norm.scale", "attention.k_norm.scale"}
POST_NORMS = {"attention_post_norm.scale", "ffn_post_norm.scale"}
BIASES = {"attention.q_bias", "attention.k_bias", "attention.v_bias"}
NOT_DECAYED = {
    "llama": NORMS,
    "llama3": NORMS,
    "qwen2": NORMS | BIASES,
    "qwen3": NORMS | HEAD_NORMS,
    "mistral": NORMS,
    "gemma2": NORMS | POST_NORMS,
    "gemma3": NORMS | POST_NORMS | HEAD_NORMS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_and_embeddings_decay_norms_and_biases_do_not(family):
    config = FAMILIES[family]
    mask = by_name(decayed(random_params(config)))
    layers = range(config.layers)
    outer = {"embedding"} if config.tied_embeddings else {"embedding", "output"}
    assert {name for name, decays in mask.items() if decays} == outer | {
        f"layers.{i}.{name}" for i in layers for name in MATRICES
    }
    assert {name for name, decays in mask.items() if not decays} == {"norm.scale"} | {
        f"layers.{i}.{name}" for i in layers for name in NOT_DECAYED[family]
    }


def test_what_decays_shrinks_in_proportion_and_all_else_stays_where_there_is_no_gradient():
    params = random_params(FAMILIES["qwen2"])
    optimizer = make_optimizer(dataclasses.replace(CONFIG.optimizer, warmup_steps=0, weight_decay=0.5), 10)
    with jax.numpy_dtype_promotion("standard"):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates = jax.jit(lambda params: optimizer.update(zeros, optimizer.init(params), params)[0])(params)
    for (name, update), weight in zip(by_name(updates).items(), jax.tree.leaves(params), strict=True):
        rate = 0.0 if name.endswith(("scale", "bias")) else 1e-2 * 0.5
        np.testing.assert_allclose(update, -rate * np.asarray(weight), rtol=1e-5, err_msg=name)


def test_of_a_model_without_biases_all_that_has_two_axes_decays_as_it_did_when_it_was_trained():
    _, params = make_decode(load_checkpoint(find_model("byte_llama")))
    assert decayed(params) == jax.tree.map(lambda weight: weight.ndim > 1, params)


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    rate = learning_rate(CONFIG.optimizer, 33)
    for step in range(3):
        assert float(rate(step)) == pytest.approx(1e-2 * step / 3), step
    for step in range(3, 34):
        fallen = (1 - math.cos(math.pi * (step - 3) / 30)) / 2
        assert float(rate(step)) == pytest.approx(1e-2 - 9e-3 * fallen, rel=1e-5), step
