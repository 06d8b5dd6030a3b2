"""Logits against Hugging Face's implementations, where they are installed: `uv sync --group reference`."""

import dataclasses
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.decoder import Decode, forward
from tests.models.families import FAMILIES, by_name, random_params, random_tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what others warn of while they are imported
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.filterwarnings("default")

MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "llama3": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def rope_parameters(theta: float, scaling) -> dict:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind == "linear":
        return parameters
    return parameters | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }


def their_config(family: str, config: DecoderConfig):
    """Our config in their words."""
    rope = rope_parameters(config.rope_theta, config.rope_scaling)
    words = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if family == "mistral":
        words["sliding_window"] = config.window
    if family.startswith("gemma"):
        kinds = {None: "full_attention", config.window: "sliding_attention"}
        words |= {
            "sliding_window": config.window,
            "layer_types": [kinds[config.window_of(layer)] for layer in range(config.layers)],
            "query_pre_attn_scalar": round(config.query_scale**-2),
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.final_soft_cap,
        }
    if family == "gemma3":
        local = rope_parameters(config.local_rope_theta, None)
        words["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return getattr(transformers, MODELS[family][0])(**words)


def their_weights(config: DecoderConfig, params) -> dict:
    """Our weights under their names: matrices the other way round, heads side by side."""
    attention_post_norm, ffn_norm = "", "post_attention_layernorm"
    if config.post_norms:
        attention_post_norm, ffn_norm = "post_attention_layernorm", "pre_feedforward_layernorm"
    renamed = {
        "embedding": "model.embed_tokens.weight",
        "norm.scale": "model.norm.weight",
        "output": "lm_head.weight",
        "attention_norm.scale": "input_layernorm.weight",
        "attention_post_norm.scale": f"{attention_post_norm}.weight",
        "ffn_norm.scale": f"{ffn_norm}.weight",
        "ffn_post_norm.scale": "post_feedforward_layernorm.weight",
        **{f"attention.{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkvo"},
        **{f"attention.{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
        **{f"attention.{x}_norm.scale": f"self_attn.{x}_norm.weight" for x in "qk"},
        **{f"ffn.{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    theirs = {}
    for path, array in by_name(params).items():
        weight = np.array(array)
        if path.startswith("layers."):
            _, layer, name = path.split(".", 2)
            theirs_name = f"model.layers.{layer}.{renamed[name]}"
            if name.endswith("o_proj"):
                weight = weight.reshape(-1, config.width).T
            elif name.endswith("_proj"):
                weight = weight.reshape(weight.shape[0], -1).T
            elif name.endswith("_bias"):
                weight = weight.reshape(-1)
        else:
            theirs_name = renamed[path]
        theirs[theirs_name] = torch.tensor(np.ascontiguousarray(weight))
    return theirs


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(family):
    # They insist on a width that the heads could share out, though it is not what a head has.
    config = dataclasses.replace(FAMILIES[family], width=24)
    params, tokens = random_params(config), random_tokens(24)
    model = getattr(transformers, MODELS[family][1])(their_config(family, config)).eval()
    missing, surplus = model.load_state_dict(their_weights(config, params), strict=False)
    assert surplus == []
    assert missing == (["lm_head.weight"] if config.tied_embeddings else [])
    with torch.no_grad():
        theirs = model(torch.tensor(tokens[None])).logits[0].numpy()
    ours = np.asarray(forward(Decode(config), params, jnp.asarray(tokens[None], jnp.int32)))[0]
    difference = np.abs(ours - theirs).max()
    print(f"{family}: largest difference {difference:.1e} of logits up to {np.abs(theirs).max():.1f}")
    assert difference < 1e-4
