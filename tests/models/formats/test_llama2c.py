import dataclasses
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import forward, make_decode
from models.formats import load_model, load_tokenizer
from models.generate import Sampling, generate
from models.tokenizer import TextStream
from paxkv.kv_format import scheme
from tests.models.families import TINY, by_name
from tests.models.formats.files import WEIGHTS, numpy_weights, write_llama2c

# Heads must share out the width in this format.
SHARED = dataclasses.replace(TINY, width=48, rope_theta=10_000.0, max_len=33)
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)
needs_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="the weights of stories260K are not here")


@pytest.mark.parametrize("tied", [True, False])
def test_a_binary_is_read_bit_for_bit(tmp_path, tied):
    config = dataclasses.replace(SHARED, tied_embeddings=tied)
    write_llama2c(tmp_path / "model.bin", config)
    model = load_model(tmp_path / "model.bin")
    assert model.config == config
    found = by_name(make_decode(model)[1])
    for name, weight in numpy_weights(config).items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_a_broken_binary_is_refused_in_words(tmp_path):
    file = tmp_path / "model.bin"
    write_llama2c(file, SHARED)
    whole = file.read_bytes()
    for broken in (whole[:-4], whole + b"\0\0\0\0"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=f"expected {len(whole):,} bytes, as its header says, got {len(broken):,}"):
            load_model(file)
    file.write_bytes(whole[:10])
    with pytest.raises(ValueError, match="expected a header of 28 bytes, got 10"):
        load_model(file)
    file.write_bytes(struct.pack("<7i", 0x616B3432, 1, 64, 172, 5, 8, 4))  # the header of a later version
    with pytest.raises(ValueError, match=r"expected a llama2.c header: dim, hidden"):
        load_model(file)


def test_what_is_no_model_is_refused_with_what_was_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        load_model(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="a file that begins with b'hell'"):
        load_model(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"found a folder with notes\.txt"):
        load_model(tmp_path)


@needs_weights
@pytest.mark.parametrize("name", ["stories260K.bin", "hf"])
def test_the_story_is_the_known_one(name):
    model, tokenizer = load_model(WEIGHTS / name), load_tokenizer(WEIGHTS / name)
    ids = list(generate(*make_decode(model), tokenizer.encode(""), Sampling(max_tokens=64), kv_format=scheme("f32")))
    text = tokenizer.decode(ids)
    assert text.startswith(STORY)
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.feed, ids), stream.finish()]) == text


@needs_weights
def test_both_forms_hold_the_same_weights_and_lose_as_much_as_was_measured():
    models = [load_model(WEIGHTS / name) for name in ("stories260K.bin", "hf")]
    first, second = (by_name(make_decode(model)[1]) for model in models)
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name], err_msg=name)
    tokens = jnp.asarray(np.load(WEIGHTS / "eval_tokens_8x256.npy"), jnp.int32)
    decode, params = make_decode(models[0])
    log_probs = jax.nn.log_softmax(forward(decode, params, tokens[:, :-1]), axis=-1)
    nats = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    assert float(jnp.mean(nats)) == pytest.approx(1.3032, abs=2e-4)


@needs_weights
def test_the_tokenizer_is_that_of_the_model():
    tokenizer, same = (load_tokenizer(WEIGHTS / name) for name in ("stories260K.bin", "hf"))
    text = "Once upon a time caf\u00e9 \u65e5!\n"
    ids = tokenizer.encode(text)
    assert ids == same.encode(text)
    # Pieces as they stand in the vocabulary; a character without one becomes its bytes, 3 behind the bytes' values.
    assert ids[:5] == [1, 403, 407, 261, 378]
    assert [3 + byte for byte in "\u65e5".encode()] == ids[-5:-2]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab) == (1, (2,), 512)
