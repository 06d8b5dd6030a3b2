import dataclasses

import pytest

from models.config import DecoderConfig

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
