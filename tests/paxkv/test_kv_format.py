"""Formats: what can be said, what is refused, and what a token takes."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from paxkv.calibration import Calibration, load_calibration, save_calibration
from paxkv.config import MemoryConfig, make_memory
from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import KVFormat, TensorFormat, scheme

LAYERS, HEADS, WIDTH = 30, 3, 64  # SmolLM2-135M


@pytest.mark.parametrize(
    ("name", "token_bytes", "block_bytes"),
    [
        ("f32", 46_080, 737_280),
        ("bf16", 23_040, 368_640),
        ("e4m3_none", 11_520, 184_320),
        ("e4m3_layer", 11_520, 184_320),
        ("int8_head", 11_520, 184_320),
        ("e4m3_block_head", 11_520, 184_320 + 30 * 2 * 3 * 4),
        ("e4m3_token_head", 11_520 + 30 * 2 * 3 * 4, 16 * (11_520 + 720)),
        ("int4_token_head", 5_760 + 720, 16 * 6_480),
        ("int8_token_head_k", 11_520 + 30 * 3 * (64 + 4), 16 * 17_640),
        ("e5m2_none_v", 17_280, 16 * 17_280),
    ],
)
def test_bytes_of_a_token_and_of_a_block_with_their_scales(name, token_bytes, block_bytes):
    shape = scheme(name).shape(LAYERS, HEADS, WIDTH)
    assert (shape.token_bytes, shape.block_bytes(16)) == (token_bytes, block_bytes)


def test_smaller_scales_and_precise_layers_count():
    token = TensorFormat("int8", "token_head", "pow2")
    fmt = KVFormat(token, dataclasses.replace(token, scale_type="bf16"), precise="f32", precise_layers=(0, 29))
    assert fmt.shape(LAYERS, HEADS, WIDTH).token_bytes == 28 * 3 * (64 + 1 + 64 + 2) + 2 * 3 * 2 * 64 * 4


def test_tensors_that_differ_have_no_size_in_common():
    """vAttention maps the keys of a layer and its values by pages of one size."""
    assert scheme("e4m3_token_head").shape(LAYERS, HEADS, WIDTH).tensor_token_bytes == 3 * 68
    with pytest.raises(ValueError, match="must take the same bytes"):
        _ = scheme("e4m3_token_head_k").shape(LAYERS, HEADS, WIDTH).tensor_token_bytes
    assert TensorFormat("int4", "head").element_bytes == Fraction(1, 2)


def test_a_name_tells_a_format_from_every_other():
    for name in ("f32", "bf16", "e4m3_token_head", "int8_head", "e5m2_none"):
        assert scheme(name).name == name.removesuffix("_none")
    token = TensorFormat("int8", "token_head", "pow2")
    fmt = KVFormat(token, TensorFormat("e4m3", "block_head", calibration="first_write"), "f16", (1, 3), rotate=True)
    assert fmt.name == "int8_token_head:pow2+e4m3_block_head:first_write:layers1-3:precise_f16:rotated"
    assert KVFormat(k=TensorFormat("int8", "channel", channels=4)).name == "int8_channel:4+bf16"
    assert KVFormat(token, token, precise_tokens=4).name == "int8_token_head:pow2:first4"


TENSORS = st.builds(
    lambda element, granularity, scale_type, calibration, channels: (
        element,
        granularity,
        scale_type,
        calibration,
        channels,
    ),
    st.sampled_from(["f32", "bf16", "f16", "e4m3", "e5m2", "int8", "int4"]),
    st.sampled_from(["none", "layer", "head", "channel", "block_head", "token_head"]),
    st.sampled_from(["f32", "bf16", "pow2"]),
    st.sampled_from([None, "static", "first_write", "dynamic"]),
    st.sampled_from([1, 2, 8]),
)


@given(TENSORS, TENSORS, st.booleans(), st.sampled_from(["bf16", "f32"]), st.sets(st.integers(0, 3)), st.integers(0, 2))
def test_every_format_is_read_back_from_its_name(k, v, rotate, precise, layers, tokens):
    try:
        fmt = KVFormat(TensorFormat(*k), TensorFormat(*v), precise, tuple(sorted(layers)), tokens, rotate)
    except ValueError:
        reject()
    assert scheme(fmt.name) == fmt


@pytest.mark.parametrize(
    "name",
    [
        "", "fp8", "e4m3_k_v", "e4m3:pow2:f32", "e4m3_layer:rotated+bf16", "e4m3+bf16+bf16", "int8_head_k+bf16",
        "int8_head:", "int8_head:layers", "int8_head:first", "int8_head:first1:first2",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_told(name):
    with pytest.raises(ValueError, match="scheme: expected ELEMENT"):
        scheme(name)


def test_first_tokens_take_bytes_of_every_row_and_none_of_the_blocks():
    plain, precise = (
        scheme(name).shape(LAYERS, HEADS, WIDTH) for name in ("e4m3_layer", "e4m3_layer:first4:layers0-29")
    )
    assert plain.row_bytes == 0
    assert precise.row_bytes == 4 * (LAYERS - 2) * 2 * HEADS * WIDTH * 2
    assert precise.block_bytes(16) == scheme("e4m3_layer:layers0-29").shape(LAYERS, HEADS, WIDTH).block_bytes(16)
    memory = make_memory(MemoryConfig("paged", 16), precise, 8 * precise.row_bytes + 5 * precise.block_bytes(16), 8, 64)
    assert memory.num_blocks == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorFormat("bf16", "head"), "granularity: expected 'none' for elements of bf16"),
        (lambda: TensorFormat("int8"), "granularity: expected one with scales for int8"),
        (lambda: TensorFormat("int8", "token_head", calibration="static"), "calibration: expected dynamic for scales"),
        (
            lambda: TensorFormat("e4m3", calibration="static"),
            "calibration: expected None for scales",
        ),
        (lambda: TensorFormat("e4m3", "head", channels=2), "channels: expected 1 unless"),
        (lambda: TensorFormat("e4m3", scale_type="pow2"), "scale_type: expected 'f32' without scales"),
        (lambda: KVFormat(v=TensorFormat("int8", "channel")), "v.granularity: expected another than 'channel'"),
        (lambda: KVFormat(precise="e4m3"), "precise: expected one of f32, bf16, f16, got 'e4m3'"),
        (lambda: KVFormat(precise="f32"), "precise: expected 'bf16' where nothing is kept in it"),
        (lambda: KVFormat(precise_layers=(-1,)), "precise_layers"),
        (lambda: KVFormat(precise_layers=(2, 1)), "precise_layers: expected each once and in order"),
        (lambda: KVFormat(precise_tokens=4), "precise_tokens: expected 0 where all are stored as they are"),
        (lambda: scheme("int8_channel:first_write+bf16:first4"), "k.calibration: expected 'static' for channels"),
        (lambda: init_kv_cache(1, 4, 1, 4, scheme("e4m3:first4")), "rows: expected those of the memory"),
        (
            lambda: KVFormat(precise_layers=(30,)).shape(30, 3, 64),
            r"expected layers below 30, got \[30\]",
        ),
        (lambda: KVFormat(rotate=True).shape(30, 3, 80), "rotate: expected False unless head_dim is a power of two"),
        (
            lambda: KVFormat(k=TensorFormat("int8", "channel", channels=5)).shape(30, 3, 64),
            "expected a divisor",
        ),
        (lambda: scheme("int4_token_head").shape(1, 1, 5), "'int4' packs pairs"),
        (lambda: scheme("e4m3_page"), "scheme: expected ELEMENT .* got 'e4m3_page'"),
        (lambda: init_kv_cache(1, 4, 1, 4, scheme("e4m3_block_head")), "memory without blocks"),
        (
            lambda: init_kv_cache(1, 5, 1, 4, scheme("e4m3_block_head"), block_size=2),
            "whole blocks of 2",
        ),
    ],
)
def test_what_means_nothing_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def amax(*numbers):
    return np.array(numbers, np.float32).reshape(1, -1, 2)


def test_static_scales_come_from_a_file_and_take_the_largest_of_all_that_share_them(tmp_path):
    save_calibration(tmp_path / "amax.json", Calibration(amax(1, 4, 8, 2), amax(3, 3, 3, 6), 10, rotated=False))
    found = load_calibration(tmp_path / "amax.json")
    for granularity, expected in (("layer", 8), ("head", [4, 8]), ("channel", [[1, 4], [8, 2]])):
        factor = found.factor(TensorFormat("e4m3", granularity), 0, "k")
        np.testing.assert_allclose(factor, np.array(expected) / 448, rtol=1e-6)
    np.testing.assert_allclose(
        found.factor(TensorFormat("int8", "channel", channels=2), 0, "k"), [[4 / 127] * 2, [8 / 127] * 2], rtol=1e-6
    )
    np.testing.assert_array_equal(found.factor(TensorFormat("e4m3", "layer", "pow2"), 0, "v"), 2.0**-6)  # above 6/448


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_scales_that_are_no_numbers_or_negative_are_refused(bad):
    with pytest.raises(ValueError, match=r"v_amax: expected finite numbers, 0 or more, got .* in layer 0, head 1"):
        Calibration(amax(1, 1, 1, 1), amax(1, 1, bad, 1), 1, rotated=False)


def test_a_scale_of_zero_is_refused_where_it_would_be_used(tmp_path):
    calibration = Calibration(amax(1, 1, 0, 0), amax(1, 1, 1, 1), 1, rotated=False)
    assert calibration.factor(TensorFormat("e4m3", "layer"), 0, "k") > 0
    with pytest.raises(ValueError, match="k_amax: expected positive numbers for scales of granularity 'head'"):
        calibration.factor(TensorFormat("e4m3", "head"), 0, "k")
    (tmp_path / "amax.json").write_text('{"k_amax": [1]}')
    with pytest.raises(ValueError, match="expected a calibration with k_amax, v_amax"):
        load_calibration(tmp_path / "amax.json")


def test_scales_that_were_defaulted_to_one_are_told():
    with pytest.warns(UserWarning, match="asks for static scales and no calibration was given"):
        cache = init_kv_cache(1, 4, 2, 4, scheme("e4m3_head"))
    np.testing.assert_array_equal(cache.layers[0].k.factor, 1)
    rotated = KVFormat(k=TensorFormat("e4m3", "head"), rotate=True)
    with pytest.raises(ValueError, match="calibration: expected one of keys with rotate=True"):
        init_kv_cache(
            1, 4, 2, 2, rotated, calibration=Calibration(amax(1, 1, 1, 1), amax(1, 1, 1, 1), 1, rotated=False)
        )
