"""A tiny model of each family, with weights that make every part of it matter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import DecoderConfig, RopeScaling
from models.decoder import Decode, abstract_decoder

# Three query heads to a KV head, and sizes that all differ, so that no two axes can be confused.
TINY = DecoderConfig(vocab=19, width=20, layers=2, q_heads=6, kv_heads=2, head_dim=8, ffn=28, rope_theta=100.0)

# Of RoPE's four pairs one turns often over 40 positions and is left alone, one seldom, and two are in between.
LLAMA3_SCALING = RopeScaling("llama3", factor=8.0, low_freq_factor=0.5, high_freq_factor=4.0, original_max_len=40)

_GEMMA = {
    "norm_plus_one": True,
    "post_norms": True,
    "embedding_scale": True,
    "activation": "gelu_tanh",
    "query_scale": 12**-0.5,
    "norm_eps": 1e-6,
}

# Windows are shorter than the texts, soft caps low enough to bend logits, and no constant is the default.
FAMILIES = {
    "llama": TINY,
    "llama3": dataclasses.replace(TINY, rope_scaling=LLAMA3_SCALING, tied_embeddings=False, kv_heads=1),
    "qwen2": dataclasses.replace(TINY, attention_bias=True, norm_eps=1e-6),
    "qwen3": dataclasses.replace(TINY, qk_norm=True, norm_eps=1e-6, q_heads=4, head_dim=12),
    "mistral": dataclasses.replace(TINY, window=5, tied_embeddings=False),
    "gemma2": dataclasses.replace(
        TINY, **_GEMMA, layers=3, window=4, full_every=2, attention_soft_cap=3.0, final_soft_cap=5.0
    ),
    "gemma3": dataclasses.replace(
        TINY,
        **_GEMMA,
        layers=4,
        qk_norm=True,
        window=4,
        full_every=3,
        rope_theta=1000.0,
        local_rope_theta=30.0,
        rope_scaling=RopeScaling("linear", factor=4.0),
    ),
}


def by_name(params) -> dict:
    """Weights under their paths in the model, in float32 at least."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@functools.cache
def random_params(config: DecoderConfig, seed: int = 0):
    """Weights larger than training starts with, so that attention is peaked; norms are not one, biases not zero.

    A weight depends on its name and shape only: models of configs that differ share what they have in common.
    """
    abstract = nnx.as_pure(nnx.state(abstract_decoder(config)))

    def draw(path, like):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        rng = np.random.default_rng([seed, *name.encode()])
        if name.endswith("scale"):
            drawn = rng.uniform(0.5, 2.0, like.shape)
        elif name.endswith("bias"):
            drawn = rng.normal(size=like.shape)
        else:
            fan_in = (
                like.shape[-1]
                if name in ("embedding", "output")
                else np.prod(like.shape[: -1 if "o_proj" in name else 1])
            )
            drawn = 1.5 * rng.normal(size=like.shape) * fan_in**-0.5
        return jnp.asarray(drawn, like.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def random_model(config: DecoderConfig, seed: int = 0):
    """A model with `random_params`."""
    return Decode(config).model(random_params(config, seed))


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """A text."""
    return np.random.default_rng(seed).integers(0, TINY.vocab, count)
