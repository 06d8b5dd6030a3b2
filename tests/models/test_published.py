"""The published sizes: as many weights as their releases count, and the keys and values that the library knows of."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from models.config import DecoderConfig
from models.decoder import abstract_decoder
from paxkv.model_shapes import MODEL_SHAPES
from paxkv.model_sizes import MODEL_SIZES

# All weights, those of a tied head once; of Gemma 3 from 4B on the text decoder's.
WEIGHTS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "mistral_7b": 7_241_732_096,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
}

LIBRARY_NAMES = {
    "llama2_13b": "Llama-2-13B",
    "llama2_70b": "Llama-2-70B",
    "llama3_8b": "Llama-3-8B",
    "llama3_70b": "Llama-3-70B",
}


def published(name: str) -> DecoderConfig:
    return getattr(DecoderConfig, name)()


def count_weights(config: DecoderConfig) -> int:
    """From decoders of one and two layers: layers have equally many."""

    def count(layers):
        state = nnx.state(abstract_decoder(dataclasses.replace(config, layers=layers)))
        return sum(math.prod(array.shape) for array in jax.tree.leaves(nnx.as_pure(state)))

    one, two = count(1), count(2)
    return one + (config.layers - 1) * (two - one)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_published_size_has_as_many_weights_as_its_release_counts(name):
    assert count_weights(published(name)) == WEIGHTS[name]


def test_every_published_size_is_counted():
    methods = {name for name, value in vars(DecoderConfig).items() if isinstance(value, classmethod)}
    assert methods - {"of_dict"} == WEIGHTS.keys()


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_the_library_knows_the_same_keys_and_values(name):
    config, shape = published(name), MODEL_SHAPES[LIBRARY_NAMES[name]]
    assert (config.layers, config.kv_heads, config.head_dim) == (shape.layers, shape.kv_heads, shape.head_dim)


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_the_library_knows_the_same_size(name):
    config, size = published(name), MODEL_SIZES[LIBRARY_NAMES[name]]
    assert (size.parameters, size.width, size.q_heads) == (WEIGHTS[name], config.width, config.q_heads)
    assert (size.vocab, size.tied_embeddings) == (config.vocab, config.tied_embeddings)
