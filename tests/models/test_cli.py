import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from models.__main__ import main
from models.decoder import forward, make_decode
from models.formats import load_model, load_tokenizer, save_hugging_face
from models.generate import Generation
from paxkv.kv_format import scheme
from tests.models.families import FAMILIES, TINY, by_name, random_model
from tests.models.formats.files import write_llama2c

BYTES = dataclasses.replace(TINY, vocab=256, layers=1, max_len=64)


def greedy(model, prompt, count):
    """By the whole text each time, without a cache."""
    decode, params = make_decode(model)
    ids = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, : len(ids)] = ids
        ids.append(int(np.argmax(forward(decode, params, jnp.asarray(tokens))[0, len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_through_paged_memory_are_those_without_a_cache(family):
    model = random_model(FAMILIES[family])
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]  # more than one block
    generation = Generation(model, prompt, max_tokens=9)
    expected = greedy(model, prompt, 9)
    assert list(generation) == expected
    assert (generation.speed.prompt_tokens, generation.speed.new_tokens) == (17, 9)
    assert generation.speed.decode_per_second > 0
    # It ends before the first id that ends a text.
    assert list(Generation(model, prompt, max_tokens=9, eos=[expected[4]])) == expected[: expected.index(expected[4])]


def test_draws_depend_on_the_seed_alone():
    model = random_model(TINY)

    def draw(seed):
        return list(Generation(model, [1, 2], max_tokens=12, temperature=2.0, seed=seed))

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"prompt": []}, "prompt: expected at least one id"),
        ({"prompt": [19]}, r"each in \[0, 19\), got \[19\]"),
        ({"max_tokens": 1024}, "at most 1022, as the model reads 1024 tokens, got 1024"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"temperature": float("nan")}, "temperature: expected at least 0, got nan"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_name(words, told):
    with pytest.raises(ValueError, match=told):
        Generation(random_model(TINY), **({"prompt": [1, 2], "max_tokens": 3} | words))


def test_a_text_is_told_with_its_speed(capsys, tmp_path):
    save_hugging_face(tmp_path / "model", random_model(BYTES))
    (tmp_path / "model" / "tokenizer_llama2c.json").write_text("{}")
    assert main(["generate", "ab", "--model", str(tmp_path / "model")]) == 2
    assert "expected pieces, bos and eos" in capsys.readouterr().err
    assert main(["generate", "ab", "--model", "byte_llama", "--max_tokens", "5", "--kv_format", "int8_token_head"]) == 0
    out, err = capsys.readouterr()
    model = load_model("models/checkpoints/byte_llama")
    ids = list(Generation(model, [97, 98], max_tokens=5, kv_format=scheme("int8_token_head")))
    assert out == f"ab{bytes(ids).decode(errors='replace')}\n"
    assert "prefill: 2 tokens" in err
    assert "decode: 5 tokens" in err


def test_a_model_is_converted_to_each_format_and_back(capsys, tmp_path):
    write_llama2c(tmp_path / "model.bin", dataclasses.replace(TINY, width=48))
    assert main(["convert", str(tmp_path / "model.bin"), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "checkpoint"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0
    first, last = (by_name(make_decode(load_model(tmp_path / name))[1]) for name in ("model.bin", "ours"))
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, last[name], err_msg=name)
    assert load_model(tmp_path / "bf16").config.param_dtype == "bfloat16"
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "checkpoint"]) == 2
    assert "ours exists" in capsys.readouterr().err


def test_a_tokenizer_goes_with_its_model(tmp_path):
    write_llama2c(tmp_path / "model.bin", dataclasses.replace(TINY, width=48))
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", " ", "h", "i", "hi", " hi", *"abcdefgjklm"]
    found = {"bos": 1, "eos": 2, "pieces": [[piece, -float(i)] for i, piece in enumerate(pieces)]}
    assert main(["convert", str(tmp_path / "model.bin"), str(tmp_path / "hf")]) == 0
    (tmp_path / "hf" / "tokenizer_llama2c.json").write_text(json.dumps(found))
    for target in ("checkpoint", "hugging_face"):
        assert main(["convert", str(tmp_path / "hf"), str(tmp_path / target), "--to", target]) == 0
        tokenizer = load_tokenizer(tmp_path / target)
        assert (tokenizer.bos, tokenizer.eos) == (1, (2,))
        assert tokenizer.encode("hi hi") == [1, 7, 7]
        assert tokenizer.decode([1, 7, 7, 2]) == "hi hi"


def test_info_says_what_a_model_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["info", "byte_llama"]) == 0
    out = capsys.readouterr().out
    model = load_model("models/checkpoints/byte_llama")
    count = sum(weight.size for weight in by_name(make_decode(model)[1]).values())
    for words in ("checkpoint", f"{count:,}", f"{4 * count:,}", "KV bytes per token", "Bytes, 256 ids", "float32"):
        assert words in out
    assert main(["info", "nowhere"]) == 2
