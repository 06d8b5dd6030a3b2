import dataclasses
import json

import draccus
import pytest

from models.config import DecoderConfig, RopeScaling
from tests.models.families import FAMILIES
from tests.paxkv import unchecked

SIZES = {"vocab": 256, "width": 16, "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 32}


def test_a_config_is_hashable_and_equal_by_value():
    assert hash(DecoderConfig(**SIZES)) == hash(DecoderConfig(**SIZES))
    assert DecoderConfig(**SIZES) == DecoderConfig(**SIZES)


@pytest.mark.parametrize("name", ["vocab", "width", "layers", "q_heads", "kv_heads", "head_dim", "ffn", "max_len"])
def test_a_size_below_one_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DecoderConfig(**(SIZES | {name: 0}))


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_constant_that_is_not_positive_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        DecoderConfig(**SIZES, **{name: value})


def test_query_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ValueError, match="kv_heads must divide q_heads, got q_heads=4 and kv_heads=3"):
        dataclasses.replace(DecoderConfig(**SIZES), kv_heads=3)


def test_an_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim must be even, RoPE turns pairs; got 7"):
        DecoderConfig(**(SIZES | {"head_dim": 7}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 4, "full_every": 0}, "full_every must be at least 1, got 0"),
        ({"full_every": 2}, "full_every is of models with windowed layers, got 2 and no window"),
        ({"local_rope_theta": 1e4}, "local_rope_theta is of models with windowed layers, got 10000.0 and no window"),
        ({"attention_soft_cap": 0.0}, "attention_soft_cap must be above 0, got 0.0"),
        ({"final_soft_cap": -1.0}, "final_soft_cap must be above 0, got -1.0"),
        ({"query_scale": float("nan")}, "query_scale must be above 0, got nan"),
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, got 'relu'"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got 'float64'"),
        ({"param_dtype": "int8"}, "param_dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_a_feature_that_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(DecoderConfig(**SIZES), **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, "kind must be one of linear, llama3, got 'yarn'"),
        ({"kind": "linear", "factor": 0.0}, "factor must be above 0, got 0.0"),
        ({"kind": "linear", "factor": float("inf")}, "factor must be above 0 and finite, got inf"),
        ({"kind": "linear", "factor": "2"}, "factor must be a number, got '2'"),
        (
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 4.0},
            "high_freq_factor must be above low_freq_factor=4.0",
        ),
        ({"kind": "llama3", "factor": 8.0, "original_max_len": 0}, "original_max_len must be at least 1, got 0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(RopeScaling("linear", 2.0), **fields)


def test_windows_lie_in_the_layers_where_the_families_have_them():
    def windows(config):
        return [config.window_of(layer) for layer in range(7)]

    assert windows(DecoderConfig.mistral_7b()) == [4096] * 7
    assert windows(DecoderConfig.gemma2_2b()) == [4096, None, 4096, None, 4096, None, 4096]
    assert windows(DecoderConfig.gemma3_1b()) == [512, 512, 512, 512, 512, None, 512]
    assert windows(DecoderConfig.llama3_8b()) == [None] * 7


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_json_and_yaml(family):
    described = json.loads(json.dumps(FAMILIES[family].as_dict()))
    assert DecoderConfig.of_dict(described) == FAMILIES[family]
    assert draccus.decode(DecoderConfig, described) == FAMILIES[family]


def test_a_feature_that_is_off_goes_without_saying():
    described = DecoderConfig(**SIZES).as_dict()
    assert described == SIZES | {"max_len": 1024, "rope_theta": 1e4, "norm_eps": 1e-5, "tied_embeddings": True}
    assert DecoderConfig(**SIZES, window=8).as_dict() == described | {"window": 8}


def test_a_description_of_something_else_is_refused_by_its_fields():
    with pytest.raises(ValueError, match=r"unknown: \['experts'\], missing: \['ffn', 'vocab'\]"):
        DecoderConfig.of_dict({k: v for k, v in SIZES.items() if k not in ("vocab", "ffn")} | {"experts": 8})


@pytest.mark.parametrize("rope_scaling", [3, {"speed": 2}])
def test_a_scaling_that_is_none_is_refused_with_what_came(rope_scaling):
    with pytest.raises(ValueError, match="rope_scaling: expected the fields of a RopeScaling, got"):
        DecoderConfig.of_dict({**SIZES, "rope_scaling": rope_scaling})


@pytest.mark.parametrize(
    "change", [{"vocab": 1.5}, {"layers": True}, {"window": "8"}, {"norm_eps": None}, {"tied_embeddings": [1]}]
)
def test_what_is_of_another_kind_is_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must be "):
        unchecked.replace(DecoderConfig(**SIZES), **change)
