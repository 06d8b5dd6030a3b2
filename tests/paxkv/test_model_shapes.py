import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.model_shapes import MODEL_SHAPES, KVShape, model_shape

quick = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no failure

small = st.integers(1, 6)

# Bytes per token at 2 bytes per element, as published.
PUBLISHED = {
    "Llama-2-13B": 819_200,
    "Llama-2-70B": 327_680,
    "Llama-3-8B": 131_072,
    "Llama-3-70B": 327_680,
    "OPT-13B": 819_200,
    "OPT-66B": 2_359_296,
    "OPT-175B": 4_718_592,
    "Yi-6B": 65_536,
    "Yi-34B": 245_760,
}


def test_published_models_have_their_published_bytes_per_token():
    assert {name: shape.token_bytes for name, shape in MODEL_SHAPES.items()} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_byte_elements_take_exactly_half(name):
    half = dataclasses.replace(model_shape(name), element_bytes=1)
    assert 2 * half.token_bytes == PUBLISHED[name]
    quarter = dataclasses.replace(model_shape(name), element_bytes=Fraction(1, 2))
    assert 4 * quarter.token_bytes == PUBLISHED[name]


def test_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"model must be one of .*, got 'Llama-3-8b'; did you mean 'Llama-3-8B'\?"):
        model_shape("Llama-3-8b")
    with pytest.raises(ValueError, match="give layers, kv_heads and head_dim instead"):
        model_shape("abacus")


@quick
@given(
    layers=small,
    kv_heads=small,
    head_dim=small,
    block_size=small,
    dtype=st.sampled_from(["int8", "float16", "float32"]),
)
def test_block_bytes_are_those_of_arrays(layers, kv_heads, head_dim, block_size, dtype):
    shape = KVShape(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        element_bytes=np.dtype(dtype).itemsize,
        scale_bytes_per_token_head=4,
        scale_bytes_per_block_head=2,
    )
    per_layer = [
        np.zeros((block_size, kv_heads, head_dim), dtype),
        np.zeros((block_size, kv_heads), np.float32),
        np.zeros((kv_heads,), np.float16),
    ]
    block_scales = 2 * layers * per_layer[2].nbytes
    assert shape.block_bytes(block_size) == 2 * layers * sum(array.nbytes for array in per_layer)
    assert shape.token_bytes * block_size == shape.block_bytes(block_size) - block_scales
    assert shape.tensor_token_bytes * 2 * layers == shape.token_bytes


@pytest.mark.parametrize(
    ("element_bytes", "token_scale", "block_bytes"),
    [(4, 0, 131_072), (2, 0, 65_536), (1, 0, 32_768), (1, 4, 32_768 + 2 * 16 * 8 * 4)],
)
def test_one_layer_of_eight_heads_in_blocks_of_16(element_bytes, token_scale, block_bytes):
    # What vLLM 0.33 allocates for such a block.
    shape = KVShape(1, 8, 128, element_bytes=element_bytes, scale_bytes_per_token_head=token_scale)
    assert shape.block_bytes(16) == block_bytes


@quick
@given(kv_heads=st.integers(1, 64), tensor_parallel=st.integers(1, 64))
def test_devices_share_the_heads_out_evenly_or_are_refused(kv_heads, tensor_parallel):
    scales = {"scale_bytes_per_token_head": 4, "scale_bytes_per_block_head": 2}

    def bytes_per_device(replicate):
        devices = {"tensor_parallel": tensor_parallel, "replicate_kv_heads": replicate}
        return KVShape(2, kv_heads, 8, **scales, **devices).block_bytes(16)

    whole = KVShape(2, kv_heads, 8, **scales).block_bytes(16)
    for replicate in (False, True):
        if kv_heads % tensor_parallel == 0:
            assert bytes_per_device(replicate) * tensor_parallel == whole
        elif replicate and tensor_parallel % kv_heads == 0:
            assert bytes_per_device(replicate) * kv_heads == whole  # one head each
        else:
            with pytest.raises(ValueError, match=r"^tensor_parallel must divide kv_heads, got"):
                bytes_per_device(replicate)


VALID = {
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "element_bytes": 2,
    "scale_bytes_per_token_head": 0,
    "scale_bytes_per_block_head": 0,
    "tensor_parallel": 1,
}


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("wrong", [-1, True])
def test_wrong_field_is_refused_by_name(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        KVShape(**VALID | {name: wrong})


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "element_bytes", "tensor_parallel"])
def test_zero_is_refused_where_there_must_be_something(name):
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        KVShape(**VALID | {name: 0})


@pytest.mark.parametrize(
    ("head_dim", "element_bytes"), [(7, Fraction(1, 2)), (8, Fraction(1, 3)), (8, Fraction(-1, 2))]
)
def test_head_that_fills_no_whole_bytes_is_refused(head_dim, element_bytes):
    with pytest.raises(ValueError, match=r"^element_bytes must be positive and fill whole bytes"):
        KVShape(2, 2, head_dim, element_bytes=element_bytes)


@pytest.mark.parametrize("block_size", [0, -16, True])
def test_wrong_block_size_is_refused(block_size):
    with pytest.raises(ValueError, match=r"^block_size must be"):
        KVShape(2, 2, 8).block_bytes(block_size)


def test_shapes_are_hashable_and_compared_by_value():
    assert len({model_shape("Llama-2-70B"), model_shape("Llama-3-70B"), model_shape("Yi-6B")}) == 2
