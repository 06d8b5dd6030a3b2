"""Text that is continued through paged memory, against a model that has no cache."""

import functools
import itertools
import re
import time

import jax
import jax.numpy as jnp
import pytest

from models import cli
from models.decoder import forward, make_decode
from models.formats import load_model
from models.generate import Sampling, generate
from models.names import find_model
from models.stream import compile_clock
from models.tokenizer import Bytes
from paxkv.kv_format import scheme

# With any of the prompts and numbers below, one program of prompts and one of single tokens, of 32 tokens in all.
PROMPT = "The import "
TOKENS = 12
WIDTH = 32
GENERATE = ["generate", "--model", "byte_llama", PROMPT, "--max_tokens", str(TOKENS), "--kv_format", "f32"]


@functools.cache
def model():
    return make_decode(load_model(find_model("byte_llama")))


def continued(prompt=PROMPT, max_tokens=TOKENS, kv_format="f32", block_size=16, **choice):
    ids = Bytes().encode(prompt)
    sampling = Sampling(max_tokens, **choice)
    return list(generate(*model(), ids, sampling, kv_format=scheme(kv_format), block_size=block_size))


@functools.cache
def without_cache(prompt, tokens):
    """The best byte each time, everything computed anew for every byte."""
    ids = Bytes().encode(prompt)
    for _ in range(tokens):
        padded = jnp.asarray([ids + [0] * (WIDTH - len(ids))], jnp.int32)
        ids.append(int(jnp.argmax(forward(*model(), padded)[0, len(ids) - 1])))
    return ids[-tokens:]


@pytest.mark.parametrize("block_size", [16, 5])
def test_the_best_tokens_are_those_of_the_model_without_a_cache(block_size):
    assert continued(block_size=block_size) == without_cache(PROMPT, TOKENS)


def test_a_prompt_that_fills_its_batch_exactly_is_continued_alike():
    prompt = "The import state"
    assert continued(prompt, 3) == without_cache(prompt, 3)


def test_draws_depend_on_the_seed_alone():
    first, again, other = (continued(temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_draws_at_a_low_temperature_are_the_best_tokens():
    assert continued(temperature=1e-6, seed=3) == without_cache(PROMPT, TOKENS)


def test_tokens_come_as_soon_as_they_are_known():
    ids = Bytes().encode(PROMPT)
    endless = generate(*model(), ids, Sampling(max_tokens=20), kv_format=scheme("f32"))
    assert list(itertools.islice(endless, 2)) == without_cache(PROMPT, TOKENS)[:2]


def test_the_command_writes_the_text_alone_and_its_speed_aside(capsys):
    assert cli.main(GENERATE) == 0
    out, err = capsys.readouterr()
    assert out == Bytes().decode(without_cache(PROMPT, TOKENS)) + "\n"
    assert re.fullmatch(
        r"load [\d.]+ s, compile [\d.]+ s; prefill 11 tokens in [\d.]+ s, [\d.]+ tokens/s; "
        r"decode 11 tokens in [\d.]+ s, [\d.]+ tokens/s\n",
        err,
    )


@pytest.mark.parametrize("at", [0, 4])
def test_the_command_stops_where_the_model_ends_the_text(capsys, monkeypatch, at):
    tokens = without_cache(PROMPT, TOKENS)
    monkeypatch.setattr("models.stream.load_tokenizer", lambda path: Bytes(eos=(tokens[at],)))
    end = tokens.index(tokens[at])
    assert cli.main(GENERATE) == 0
    out, err = capsys.readouterr()
    assert out == Bytes().decode(tokens[:end]) + "\n"
    assert f"decode {end} tokens" in err


@pytest.mark.parametrize(
    ("ids", "max_tokens", "said"),
    [
        ([], 1, "prompt: expected at least one token, got none"),
        ([3, 256], 1, "prompt: expected ids from 0 to 255, got 3 to 256"),
        ([-1], 1, "prompt: expected ids from 0 to 255, got -1 to -1"),
        ([1] * 1000, 25, "max_tokens: expected at most 24 behind a prompt of 1000 tokens"),
    ],
)
def test_what_the_model_cannot_read_is_refused(ids, max_tokens, said):
    with pytest.raises(ValueError, match=said):
        next(generate(*model(), ids, Sampling(max_tokens), kv_format=scheme("f32")))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"temperature": -0.5}, r"temperature: expected 0 or more, got -0\.5"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more, got nan"),
    ],
)
def test_choices_that_mean_nothing_are_refused(choice, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**choice)


def test_compilation_is_timed_and_nothing_else_is():
    @jax.jit
    def inner(x):
        time.sleep(0.05)  # while it is traced
        return x + 1

    @jax.jit
    def outer(x):
        return inner(x) * 2

    x = jnp.float32(1)
    with compile_clock() as compiled:
        assert compiled() == 0
        start = time.perf_counter()
        outer(x)
        # One span lies within another, and counts once.
        assert 0.05 < compiled() <= time.perf_counter() - start
        before = compiled()
        time.sleep(0.05)
        outer(x)
        assert compiled() == before
    jax.jit(lambda x: x - 1)(x)
    assert compiled() == before


def test_weights_that_make_no_numbers_are_told_and_not_continued():
    decode, params = model()
    broken = jax.tree.map(lambda weight: weight * jnp.nan, params)
    with pytest.raises(ValueError, match="logits: expected numbers, got NaN"):
        next(generate(decode, broken, Bytes().encode(PROMPT), Sampling(TOKENS), kv_format=scheme("f32")))
