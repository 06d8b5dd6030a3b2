import dataclasses
import struct

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from models.config import RopeScaling
from models.decoder import make_decode
from models.formats import load_model, load_tokenizer
from tests.models.families import FAMILIES, TINY, by_name
from tests.models.formats.files import gguf_tensors, numpy_weights, write_gguf

KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
WIDE = dataclasses.replace(TINY, width=64, ffn=96)  # rows of whole blocks of 32, for all but o_proj


def weights_of(model):
    return {name: np.asarray(weight) for name, weight in by_name(make_decode(model)[1]).items()}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_is_read_bit_for_bit(tmp_path, family, tied):
    config = dataclasses.replace(FAMILIES[family], tied_embeddings=tied)
    write_gguf(tmp_path / "model", KINDS[family], config, gguf_tensors(KINDS[family], config))
    model = load_model(tmp_path / "model")
    assert model.config == config
    for name, weight in numpy_weights(config).items():
        np.testing.assert_array_equal(weights_of(model)[name], weight, err_msg=name)


def encode(kind, rng, rows, columns):
    """Random bytes of a tensor in a quantised type, and the numbers that they stand for, by the format's definition."""
    blocks = rows * columns // 32
    scale = rng.uniform(0.5, 2, blocks).astype("<f2")
    offset = rng.normal(size=blocks).astype("<f2")
    d, m = scale.astype(np.float32)[:, None], offset.astype(np.float32)[:, None]
    if kind == "Q8_0":
        q = rng.integers(-127, 128, (blocks, 32)).astype(np.int8)
        packed, numbers = [scale.view(np.uint8).reshape(blocks, 2), q.view(np.uint8)], d * q
    else:
        q = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
        nibbles = q[:, :16] | (q[:, 16:] << 4)  # the first half of a block in the low bits
        packed = [scale.view(np.uint8).reshape(blocks, 2)]
        packed += [offset.view(np.uint8).reshape(blocks, 2)] if kind == "Q4_1" else []
        packed += [nibbles]
        numbers = d * q + m if kind == "Q4_1" else d * (q.astype(np.int32) - 8)
    data = np.concatenate(packed, axis=1).reshape(rows, -1)
    return data, numbers.astype(np.float32).reshape(rows, columns)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_quantisation_stands_for_the_numbers_of_its_definition(tmp_path, kind):
    rng = np.random.default_rng(0)
    tensors, expected = gguf_tensors("llama", WIDE), {}
    for name in ("token_embd.weight", "blk.1.ffn_gate.weight", "blk.0.ffn_down.weight", "blk.0.attn_v.weight"):
        weight = tensors[name]
        if kind in ("F32", "F16"):
            tensors[name] = weight.astype(np.float16 if kind == "F16" else np.float32)
            expected[name] = tensors[name].astype(np.float32)
        elif kind == "BF16":
            rounded = weight.astype(ml_dtypes.bfloat16)
            tensors[name] = (gguf.GGMLQuantizationType.BF16, rounded.view(np.uint8).reshape(weight.shape[0], -1))
            expected[name] = rounded.astype(np.float32)
        else:
            data, expected[name] = encode(kind, rng, *weight.shape)
            tensors[name] = (gguf.GGMLQuantizationType[kind], data)
    write_gguf(tmp_path / "model", "llama", WIDE, tensors)
    found = weights_of(load_model(tmp_path / "model"))
    ours = {
        "token_embd.weight": found["embedding"],
        "blk.1.ffn_gate.weight": found["layers.1.ffn.gate_proj"].T,
        "blk.0.ffn_down.weight": found["layers.0.ffn.down_proj"].T,
        "blk.0.attn_v.weight": found["layers.0.attention.v_proj"].reshape(WIDE.width, -1).T,
    }
    for name, weight in expected.items():
        np.testing.assert_array_equal(ours[name], weight, err_msg=name)


def test_a_quantised_weight_is_read_for_each_device_by_itself(tmp_path):
    tensors = gguf_tensors("llama", WIDE)
    data, expected = encode("Q4_1", np.random.default_rng(1), *tensors["blk.0.ffn_up.weight"].shape)
    tensors["blk.0.ffn_up.weight"] = (gguf.GGMLQuantizationType.Q4_1, data)
    write_gguf(tmp_path / "model", "llama", WIDE, tensors)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    of = {"up_proj": spec("a", "b"), "q_proj": spec(None, "a", "b")}
    model = load_model(
        tmp_path / "model",
        shardings=lambda path: jax.sharding.NamedSharding(mesh, of.get(path.rsplit(".", 1)[-1], spec())),
    )
    np.testing.assert_array_equal(weights_of(model)["layers.0.ffn.up_proj"], expected.T)
    name = "layers.0.attention.q_proj"
    np.testing.assert_array_equal(weights_of(model)[name], numpy_weights(WIDE)[name])


def test_hostile_files_are_refused_in_words(tmp_path):
    path = tmp_path / "model"
    write_gguf(path, "llama", TINY, gguf_tensors("llama", TINY))
    whole = path.read_bytes()
    for cut in (4, 20, 200, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="expected a whole GGUF file"):
            load_model(path)
    for broken in (
        whole[:4] + struct.pack("<I", 99) + whole[8:],  # version
        whole[:8] + struct.pack("<Q", 2**62) + whole[16:],  # number of tensors
        whole[:16] + struct.pack("<Q", 2**62) + whole[24:],  # number of words
    ):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="expected a whole GGUF file"):
            load_model(path)


def test_scaled_frequencies_are_recognised(tmp_path):
    config = dataclasses.replace(TINY, head_dim=16, rope_theta=500_000.0)
    path, tensors = tmp_path / "model", gguf_tensors("llama", config)

    def scaling(divisors, more=None):
        extra = {} if divisors is None else {"rope_freqs.weight": np.asarray(divisors, np.float32)}
        write_gguf(path, "llama", config, tensors | extra, more=more)
        return load_model(path).config.rope_scaling

    # The rule as Llama 3.1's model card has it: by wave length over the 8,192 tokens of the first training.
    waves = 2 * np.pi * 500_000 ** (np.arange(8) / 8)
    smooth = (8192 / waves - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    divisors = np.where(waves < 8192 / 4, 1, np.where(waves > 8192, 8, between))
    assert set(divisors) > {1, 8}  # and one between
    assert scaling(np.ones(8)) is None
    assert scaling(divisors) == RopeScaling("llama3", 8.0)
    with pytest.raises(ValueError, match=r"rope_freqs.weight: expected the divisors of Llama 3.1's rule"):
        scaling(1 + np.arange(8))

    def linear(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    def yarn(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")

    assert scaling(None, linear) == RopeScaling("linear", 4.0)
    write_gguf(path, "llama", config, tensors, more=lambda w: w.add_uint32("llama.attention.sliding_window", 24))
    assert load_model(path).config == dataclasses.replace(config, window=24)
    with pytest.raises(ValueError, match="expected none or linear, got 'yarn'"):
        scaling(None, yarn)


def test_what_is_not_known_or_not_there_is_refused_by_name(tmp_path):
    path, tensors = tmp_path / "model", gguf_tensors("llama", TINY)
    write_gguf(path, "mamba", TINY, tensors)
    with pytest.raises(ValueError, match=r"general\.architecture: expected one of llama, qwen2, qwen3, got 'mamba'"):
        load_model(path)
    write_gguf(path, "llama", TINY, tensors, leave_out=["block_count", "vocab_size"])
    with pytest.raises(ValueError, match=r"missing: llama.block_count, llama.vocab_size"):
        load_model(path)
    tall = np.zeros((28, 256), np.float32)
    q6 = (gguf.GGMLQuantizationType.Q6_K, np.zeros((28, 210), np.uint8))
    write_gguf(path, "llama", TINY, tensors | {"blk.0.ffn_up.weight": q6})
    with pytest.raises(ValueError, match=r"expected tensors of type F32.*got blk.0.ffn_up.weight \(Q6_K\)"):
        load_model(path)
    write_gguf(
        path, "llama", TINY, tensors | {"blk.0.ffn_up.weight": tall, "rope_factors.weight": np.ones(4, np.float32)}
    )
    with pytest.raises(ValueError, match="2 tensors are not") as error:
        load_model(path)
    assert "blk.0.ffn_up.weight: expected (28, 20), got (28, 256)" in str(error.value)
    assert "rope_factors.weight: expected none of that name" in str(error.value)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model: expected gpt2 or llama, and its tokens, got None"):
        load_tokenizer(path)


def write_tokenizer(path, cut):
    # GPT-2 writes a space as U+0120; é is the bytes C3 A9, written as these two letters.
    pieces = ["<s>", "h", "i", "hi", "1", "2", "12", "\u0120", "\u0120hi", "\u00c3", "\u00a9"]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(pieces)
        writer.add_token_types([3] + [1] * 10)
        writer.add_token_merges(["h i", "1 2", "\u0120 hi"])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(False)

    write_gguf(path, "llama", TINY, {}, more=add)


@pytest.mark.parametrize(("cut", "digits"), [("smollm", [4, 5]), ("gpt-2", [6])])
def test_the_tokenizer_inside_cuts_texts_as_it_says(tmp_path, cut, digits):
    write_tokenizer(tmp_path / "model", cut)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.encode("hi hi12\u00e9<s>") == [3, 8, *digits, 9, 10, 0]
    assert tokenizer.decode([3, 8, 6, 9, 10, 0]) == "hi hi12\u00e9"
    assert (tokenizer.bos, tokenizer.eos) == (None, (0,))


def test_an_unknown_way_to_cut_texts_is_refused(tmp_path):
    write_tokenizer(tmp_path / "model", "deepseek-llm")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre: expected one of smollm.*got 'deepseek-llm'"):
        load_tokenizer(tmp_path / "model")
