"""Tokens of whole requests: equal exactly where their sources say so."""

import dataclasses

import numpy as np
import pytest

from experiments.workloads import Provenance, Workload
from experiments.workloads.transcripts import SystemPrompts, transcripts, with_system_prompts


def workload(prompt, output, hash_ids=None, unit=0):
    return Workload(
        Provenance(source="test", rows_read=len(prompt), lengths="given", arrivals="given"),
        arrival_ms=np.zeros(len(prompt)),
        prompt_len=np.array(prompt, np.int32),
        output_len=np.array(output, np.int32),
        hash_ids=None if hash_ids is None else tuple(np.array(ids, np.int64) for ids in hash_ids),
        hash_block_size=unit,
    )


def test_prompts_share_the_pieces_that_they_name_and_answers_nothing():
    asked = workload([5, 8, 3], [2, 0, 3], [[70, 11], [70, 12], [9]], unit=4)
    found = transcripts(asked)
    assert found.shape == (3, 8)
    assert found.dtype == np.int32
    assert found[0, :4].tolist() == found[1, :4].tolist()
    said = [found[row, : p + o].tolist() for row, (p, o) in enumerate(zip([5, 8, 3], [2, 0, 3], strict=True))]
    assert not found[0, 7:].any()
    assert not found[2, 6:].any()
    # Of 21 tokens in all, four are there twice.
    assert len({token for row in said for token in row}) == 21 - 4
    assert len(set(said[0])) == 7


def test_every_prompt_begins_with_one_of_the_texts():
    system = SystemPrompts(count=3, tokens=6, popularity=1.0)
    before = workload([1, 6, 7, 13] * 250, [1] * 1000)
    after = with_system_prompts(before, system, 64, seed=2)
    assert (after.prompt_len - before.prompt_len == 6).all()
    found = transcripts(after)
    texts, drawn = np.unique(found[:, :6], axis=0, return_counts=True)
    assert len(texts) == 3
    # Weights 1, 1/2, 1/3 of 11/6.
    assert sorted(drawn / 1000, reverse=True) == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.05)
    own = [found[row, 6 : n + 1] for row, n in enumerate(after.prompt_len)]
    assert len(np.unique(np.concatenate(own))) == sum(map(len, own)) == before.prompt_len.sum() + 1000
    again = with_system_prompts(before, system, 64, seed=2)
    assert (transcripts(again) == found).all()
    assert (transcripts(with_system_prompts(before, system, 64, seed=3)) != found).any()


@pytest.mark.parametrize(
    ("system", "asked", "message"),
    [
        (SystemPrompts(1, 20), workload([10], [3]), r"max_model_len = 32, got 20, with which a request comes to 33"),
        (SystemPrompts(1, 4), workload([4], [1], [[1]], 4), "system_prompts: expected null with test, which says what"),
    ],
)
def test_texts_that_do_not_go_with_the_requests_are_refused(system, asked, message):
    with pytest.raises(ValueError, match=message):
        with_system_prompts(asked, system, 32, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "system_prompts.count must be"),
        ({"count": 3 * 10**9}, "system_prompts.count: expected at most 1,048,576, got 3,000,000,000"),
        ({"tokens": 0}, "system_prompts.tokens must be"),
        ({"popularity": -1.0}, "system_prompts.popularity: expected a finite exponent, 0 or more, got -1.0"),
        ({"popularity": float("inf")}, "system_prompts.popularity: expected a finite"),
    ],
)
def test_texts_that_are_none_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SystemPrompts(2, 8), **changes).check()


def test_tokens_that_nobody_could_tell_apart_are_refused():
    with pytest.raises(ValueError, match="expected a workload that says what its prompts share, got test"):
        transcripts(workload([3], [1]))
    with pytest.raises(ValueError, match=r"expected less than 2\*\*31 different tokens, got 2,147,483,648"):
        transcripts(workload([3], [0], [[1]], 2**31))
