"""Pass keys: where they are hidden, what asks for them, and how answers are scored."""

import re

import numpy as np
import polars as pl
import pytest

from experiments.quality_passkey import Prompt, hide, score, summarise

FILLER = np.frombuffer(("It was a bright cold day in April, and nothing was said. " * 60).encode(), np.uint8)
DEPTHS = (0.1, 0.5, 0.9)


def _bytes(text):
    return list(text.encode())


def _hide(seed, context=600, depths=DEPTHS, encode=_bytes):
    return hide(encode, FILLER.astype(np.int32), context, depths, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(8))
def test_every_key_stands_once_before_it_is_asked_for_and_at_its_depth(seed):
    prompt = _hide(seed)
    assert len(prompt.tokens) == len(prompt.answers) == 600
    text = bytes(prompt.tokens.tolist()).decode()
    lines = list(re.finditer(r"\nThe pass key of (\w+) is (\d{5})\.\n", text))
    hidden, asked = lines[:3], lines[3:]
    said = {line[1]: line[2] for line in hidden}
    assert len(said) == len(set(said.values())) == 3
    assert {line[1]: line[2] for line in asked} == said
    question = asked[0].start()
    assert all(text[:question].count(key) == 1 for key in said.values())
    assert question == 600 - 3 * len(hidden[0][0]) - sum(len(line[1]) - len(hidden[0][1]) for line in asked)
    assert "".join(line[0] for line in asked) == text[question:]
    size = question - sum(len(line[0]) for line in hidden)
    for i, line in enumerate(hidden):
        before = line.start() - sum(len(earlier[0]) for earlier in hidden[:i])
        assert before / size == pytest.approx(DEPTHS[i], abs=0.5 / size)
    rest = "".join(re.split(r"\nThe pass key of \w+ is \d{5}\.\n", text[:question])).encode()
    assert rest in FILLER.tobytes()
    for i, line in enumerate(hidden):
        digits = [bytes([t]) for t, owner in zip(prompt.tokens.tolist(), prompt.answers, strict=True) if owner == i]
        assert b"".join(digits).decode() == line[2]
    assert prompt.asked_tokens == 600 - asked[0].start(2)


def test_prompts_differ_by_seed_alone():
    first, again, other = (_hide(seed).tokens for seed in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()
    orders = {tuple(dict.fromkeys(x for x in _hide(seed).answers.tolist() if x >= 0)) for seed in range(20)}
    assert len(orders) > 3


def test_a_prompt_is_as_long_as_asked_whatever_a_token_is():
    def by_words(text):
        return [hash(word) % 1000 for word in re.split(r"(?<=\W)", text)]

    prompt = _hide(3, context=90, encode=by_words)
    assert len(prompt.tokens) == 90
    assert sorted(set(prompt.answers.tolist())) == [-1, 0, 1, 2]


@pytest.mark.parametrize("context", [150, 5000])
def test_a_context_that_holds_the_keys_alone_or_needs_more_text_is_refused(context):
    with pytest.raises(ValueError, match=f"passkey_contexts: expected .* 3 pass keys twice .*, got {context}"):
        _hide(0, context=context)


def _asked():
    """Two keys of two digits of a vocabulary of 4: first `2 3` of key 1, a filler 0, then `1 1` of key 0."""
    return Prompt(np.array([0, 0, 2, 3, 0, 1, 1], np.int32), np.array([-1, -1, 1, 1, -1, 0, 0], np.int32))


def test_scores_by_hand():
    assert _asked().asked_tokens == 5
    logits = np.zeros((5, 4), np.float32)
    logits[0, 2] = logits[1, 3] = logits[3, 1] = np.log(3)  # 3 of 6
    logits[4, 2] = np.log(3)  # the last digit of key 0 is another one's
    key0, key1 = score(logits, _asked())
    assert key1 == {"exact": True, "digit_logprob": pytest.approx(np.log(0.5))}
    assert key0 == {"exact": False, "digit_logprob": pytest.approx((np.log(0.5) + np.log(1 / 6)) / 2)}


def test_what_a_filler_token_gets_is_not_scored():
    logits = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    changed = logits.copy()
    changed[2] = np.nan
    assert score(changed, _asked()) == score(logits, _asked())


def test_a_broken_cache_shows_in_the_log_probability_before_it_shows_in_exact_matches():
    right = np.zeros((5, 4), np.float32)
    right[[0, 1, 3, 4], [2, 3, 1, 1]] = 3
    keys, reference, lost = (
        pl.DataFrame([{"context": 7, **told} for told in score(factor * right, _asked())]) for factor in (0.9, 1, -1)
    )
    found = summarise("a", keys, reference)["passkey_7/a"]
    assert (found["keys"], found["exact_match"], found["exact_match_se"]) == (2, 1.0, 0.0)
    expected = (2.7 - np.log(3 + np.exp(2.7))) - (3 - np.log(3 + np.exp(3)))
    assert found["digit_logprob_change"] == pytest.approx(expected, rel=1e-5)
    assert found["digit_logprob_change_se"] == pytest.approx(0, abs=1e-7)
    gone = summarise("b", lost, reference)["passkey_7/b"]
    assert gone["exact_match"] == 0
    assert gone["digit_logprob_change"] < -3


def test_contexts_are_summed_up_apart():
    keys = pl.DataFrame({"context": [8, 8, 16], "exact": [True, False, True], "digit_logprob": [-1.0, -3.0, -0.5]})
    reference = keys.with_columns(digit_logprob=pl.Series([-1.0, -1.0, -1.0]))
    found = summarise("s", keys, reference)
    assert list(found) == ["passkey_8/s", "passkey_16/s"]
    assert found["passkey_8/s"]["exact_match"] == 0.5
    assert found["passkey_8/s"]["digit_logprob_se"] == pytest.approx(1.0)
    assert found["passkey_8/s"]["digit_logprob_change"] == pytest.approx(-1.0)
    assert found["passkey_16/s"]["digit_logprob_change"] == pytest.approx(0.5)
    assert found["passkey_16/s"]["digit_logprob_se"] is None
