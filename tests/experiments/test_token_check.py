import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from flax import nnx

from experiments import token_check
from experiments.token_check import compare_tokens, scores_without_cache
from models.config import DecoderConfig
from models.decoder import Decoder, forward, make_decode

NEAR_TIE = 1e-4


def table(*requests):
    tokens, margins = zip(*requests, strict=True)
    return pl.DataFrame(
        {"tokens": tokens, "margins": margins}, schema={"tokens": pl.List(pl.Int32), "margins": pl.List(pl.Float32)}
    )


def check(a, b):
    return tuple(compare_tokens(table(*a), table(*b), NEAR_TIE))


def test_equal_tokens_are_equal_whatever_the_margins():
    assert check([([1, 2], [0, 0]), ([], [])], [([1, 2], [1, 2]), ([], [])]) == (0, 0)


def test_a_first_difference_between_logits_that_are_all_but_equal_is_accepted_and_counted():
    assert check([([1, 2, 3, 4], [1, 5e-5, 1, 1])], [([1, 7, 8, 9], [1, 9e-5, 1, 1])]) == (1, 0)
    assert check([([1, 2, 3], [1, 5e-5, 1])], [([1, 7], [1, 9e-5])]) == (1, 0)  # what comes after says nothing


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (([1, 2], [1, 5e-5]), ([1, 3], [1, 2e-4])),  # near in one run only
        (([1, 2], [1, 2e-4]), ([1, 3], [1, 5e-5])),
        (([1, 2, 4], [1, 1, 5e-5]), ([1, 3, 5], [1, 1, 5e-5])),  # near where it is too late
        (([1, 2], [5e-5, 1]), ([1, 3], [5e-5, 1])),  # or too early
        (([1, 2], [1, 5e-5]), ([1, 3], [1, float("nan")])),
        (([1, 2], [1, float("nan")]), ([1, 3], [1, 5e-5])),
        (([1, 2], [0, 0]), ([1, 2, 3], [0, 0, 0])),  # one stopped, the other went on
        (([], []), ([1], [0])),
    ],
)
def test_any_other_difference_is_unexplained(a, b):
    assert check([a], [b]) == (0, 1)
    same = ([1], [1])
    assert check([same, a, same], [same, b, same]) == (0, 1)


def test_another_number_of_requests_is_refused():
    with pytest.raises(ValueError, match="zip"):
        check([([1], [1])], [([1], [1]), ([1], [1])])


@pytest.mark.parametrize("batch_tokens", [50, 4096])
def test_a_score_is_the_log_probability_of_the_answer_alone(batch_tokens, monkeypatch):
    monkeypatch.setattr(token_check, "BATCH_TOKENS", batch_tokens)  # three and all at a time
    shape = DecoderConfig(vocab=11, width=8, layers=1, q_heads=2, kv_heads=1, head_dim=4, ffn=8, max_len=32)
    decode, params = make_decode(Decoder(shape, rngs=nnx.Rngs(1)))
    params = jax.tree.map(lambda weights: weights * 20, params)  # far from uniform
    rng = np.random.default_rng(0)
    prompts = rng.integers(11, size=(4, 9)).astype(np.int32)
    lengths, counts = np.array([9, 4, 1, 5], np.int32), [6, 0, 3, 1]
    answers = [rng.integers(11, size=count).tolist() for count in counts]
    table = pl.DataFrame({"prompt_len": lengths, "tokens": answers}, schema_overrides={"tokens": pl.List(pl.Int32)})
    scores = scores_without_cache(decode, params, prompts, table)
    for prompt, length, answer, score in zip(prompts, lengths, answers, scores, strict=True):
        tokens = np.concatenate([prompt[:length], np.array(answer, np.int32)])
        logits = np.asarray(forward(decode, params, jnp.asarray(tokens)[None])[0], np.float64)
        log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        expected = sum(log_p[place - 1, tokens[place]] for place in range(length, len(tokens)))
        assert score == pytest.approx(expected, abs=1e-4)
        assert expected < -1 or not answer
