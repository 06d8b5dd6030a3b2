"""`config.json` of Hugging Face's transformers, to and from our config."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, get_args

from models.config import Activation, DecoderConfig, Dtype, RopeScaling

Json = Mapping[str, Any]

# Their name of an architecture -> its model_type, and what is true of it without being written anywhere.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = types.MappingProxyType(
    {
        "LlamaForCausalLM": ("llama", {}),
        "Qwen2ForCausalLM": ("qwen2", {"attention_bias": True}),
        "Qwen3ForCausalLM": ("qwen3", {"qk_norm": True}),
        "MistralForCausalLM": ("mistral", {}),
        "Gemma2ForCausalLM": ("gemma2", {"norm_plus_one": True, "post_norms": True, "embedding_scale": True}),
        "Gemma3ForCausalLM": (
            "gemma3_text",
            {"norm_plus_one": True, "post_norms": True, "embedding_scale": True, "qk_norm": True},
        ),
    }
)

# Our names of sizes that every config.json states.
_SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "q_heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}

# What else a config.json can ask for, and the only answers that our decoder has.
_ONLY = {
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "quantization_config": (None,),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "partial_rotary_factor": (1.0,),
}

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# What each kind of RoPE scaling is given.
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

_GEMMAS = ("gemma2", "gemma3_text")
_WINDOWED = ("mistral", *_GEMMAS)


def config_from_json(json: Json) -> DecoderConfig:
    """Our config for a `config.json` of one of `ARCHITECTURES`, in the dtype that it states.

    Raises:
      ValueError: The architecture is unknown, keys are missing (all named), or something is asked for that the decoder
        does not have.
    """
    named = json.get("architectures") or ["none"]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(ARCHITECTURES):
        came = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        raise ValueError(f"architectures: expected one of {', '.join(ARCHITECTURES)}, got {came}")
    kind, implied = ARCHITECTURES[named[0]]
    _require_keys(json, kind)
    for key, known in _ONLY.items():
        if json.get(key) not in (None, *known):
            raise ValueError(f"{key}: expected {known[0]} in a {kind}, got {json[key]!r}")
    for key in _SIZES.values():
        if isinstance(json[key], bool) or not isinstance(json[key], int | float):
            raise ValueError(f"{key}: expected a number, got {json[key]!r}")
    activation = json.get("hidden_activation") or json.get("hidden_act", "silu")
    if activation not in list(_ACTIVATIONS):
        raise ValueError(f"hidden_act: expected one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    head_dim = json.get("head_dim") or json["hidden_size"] // json["num_attention_heads"]
    dtype = json.get("dtype") or json.get("torch_dtype") or "float32"
    if dtype not in get_args(Dtype):
        raise ValueError(f"torch_dtype: expected one of {', '.join(get_args(Dtype))}, got {dtype!r}")
    return DecoderConfig(
        **{ours: json[theirs] for ours, theirs in _SIZES.items()},
        kv_heads=json.get("num_key_value_heads") or json["num_attention_heads"],
        head_dim=head_dim,
        tied_embeddings=kind in _GEMMAS if json.get("tie_word_embeddings") is None else json["tie_word_embeddings"],
        activation=_ACTIVATIONS[activation],
        dtype=dtype,
        param_dtype=dtype,
        **implied,
        **_rope(json, kind),
        **_windows(json, kind),
        **(_gemma(json, head_dim) if kind in _GEMMAS else {}),
    )


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """A `config.json` that `config_from_json`, and transformers, read as this config.

    Raises:
      ValueError: No architecture has this combination of features.
    """
    for architecture in ARCHITECTURES:
        json = _describe(config, architecture)
        # The dtype of activations is not the file's to say.
        if config_from_json(json) == dataclasses.replace(config, dtype=config.param_dtype):
            return json
    raise ValueError(
        f"config: expected a model that one of {', '.join(ARCHITECTURES)} describes, got {config.as_dict()}"
    )


def _describe(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    kind, _ = ARCHITECTURES[architecture]
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation]
    scaling = config.rope_scaling
    json: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": activation,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": scaling.kind, "factor": scaling.factor},
        "torch_dtype": config.param_dtype,
    }
    if scaling is not None and scaling.kind == "llama3":
        json["rope_scaling"] |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
        }
    if kind in _WINDOWED:
        json["sliding_window"] = config.window
    if kind in _GEMMAS:
        scalar = (config.query_scale or config.head_dim**-0.5) ** -2
        kinds = {True: "full_attention", False: "sliding_attention"}
        json |= {
            "hidden_activation": activation,
            "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.final_soft_cap,
            "layer_types": [kinds[config.window_of(layer) is None] for layer in range(config.layers)],
        }
    if kind == "gemma3_text":
        json["rope_local_base_freq"] = config.local_rope_theta
    return json


def _require_keys(json: Json, kind: str) -> None:
    needed = set(_SIZES.values())
    if kind != "llama":  # whose first version had no groups
        needed |= {"num_key_value_heads"}
    if kind == "qwen3" or kind in _GEMMAS:  # whose heads are not a share of the width
        needed |= {"head_dim"}
    if kind in _WINDOWED:
        needed |= {"sliding_window"}
    if kind in _GEMMAS:
        needed |= {"query_pre_attn_scalar"}
    missing = sorted(key for key in needed if key not in json)
    if missing:
        raise ValueError(
            f"config.json of a {kind}: expected {', '.join(sorted(needed))}; missing: {', '.join(missing)}"
        )


def _gemma(json: Json, head_dim: int) -> dict[str, Any]:
    scalar = json["query_pre_attn_scalar"]
    return {
        "query_scale": None if scalar == head_dim else scalar**-0.5,
        "attention_soft_cap": json.get("attn_logit_softcapping"),
        "final_soft_cap": json.get("final_logit_softcapping"),
    }


def _rope(json: Json, kind: str) -> dict[str, Any]:
    """From `rope_theta` and `rope_scaling`, or from the `rope_parameters` that later versions write instead."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(json.get(key) or {}, Mapping):
            raise ValueError(f"{key}: expected an object, got {json[key]!r}")
    parameters = json.get("rope_parameters") or {}
    full = parameters.get("full_attention", parameters) or {}
    local = parameters.get("sliding_attention", {}) or {}
    words = {**full, **(json.get("rope_scaling") or {})}
    found: dict[str, Any] = {
        "rope_theta": json.get("rope_theta", words.get("rope_theta", 10_000.0)),
        "rope_scaling": _scaling(words),
    }
    if kind == "gemma3_text":
        found["local_rope_theta"] = json.get("rope_local_base_freq", local.get("rope_theta", 10_000.0))
    return found


def _scaling(words: Json) -> RopeScaling | None:
    kind = words.get("rope_type", words.get("type", "default"))
    if kind == "default":
        return None
    if kind not in list(_SCALINGS):
        raise ValueError(f"rope_type: expected default, {' or '.join(_SCALINGS)}, got {kind!r}")
    names = _SCALINGS[kind]
    missing = [name for name in names if name not in words]
    if missing:
        raise ValueError(f"rope_scaling of type {kind}: expected {', '.join(names)}; missing: {', '.join(missing)}")
    return RopeScaling(kind, *(words[name] for name in names))


def _windows(json: Json, kind: str) -> dict[str, Any]:
    """The window, and which layers see past it."""
    layers, types_of_layers = json["num_hidden_layers"], json.get("layer_types")
    if kind not in _WINDOWED:
        if set(types_of_layers or ()) - {"full_attention"}:
            raise ValueError(f"layer_types: expected full_attention everywhere in a {kind}, got {types_of_layers}")
        return {}
    window = json["sliding_window"]
    if window is None:
        return {}
    if types_of_layers is None:
        default = {"mistral": None, "gemma2": 2, "gemma3_text": 6}[kind]
        return {"window": window, "full_every": json.get("sliding_window_pattern", default)}
    if len(types_of_layers) != layers:
        raise ValueError(f"layer_types: expected one for each of {layers} layers, got {len(types_of_layers)}")
    full = [kind == "full_attention" for kind in types_of_layers]
    for every in (None, *range(1, layers + 1)):
        if full == [every is not None and (layer + 1) % every == 0 for layer in range(layers)]:
            return {"window": window, "full_every": every}
    raise ValueError(f"layer_types: expected every k-th of {layers} layers to be full_attention, got {types_of_layers}")
