"""Prompts share tokens exactly where a trace says so, or where a conversation repeats what was said."""

import itertools

import numpy as np
import pytest

from experiments.prefix_prompts import SyntheticPrompts, synthetic_prompts, trace_prompts
from experiments.workloads import Provenance, Workload

CHATS = SyntheticPrompts(
    conversations=7,
    turns=3,
    open_conversations=3,
    system_prompts=2,
    system_tokens=5,
    popularity=1.0,
    question_tokens=(1, 4),
    answer_tokens=(0, 3),
)


def workload(prompt_len, hash_ids, size):
    return Workload(
        Provenance(source="mooncake", rows_read=len(prompt_len), lengths="", arrivals=""),
        arrival_ms=np.zeros(len(prompt_len)),
        prompt_len=np.array(prompt_len, np.int32),
        output_len=np.ones(len(prompt_len), np.int32),
        hash_ids=None if hash_ids is None else tuple(np.array(ids, np.int64) for ids in hash_ids),
        hash_block_size=size,
    )


def common(a, b):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_prompts_of_a_trace_share_what_their_ids_share_and_nothing_else():
    prompts = trace_prompts(workload([10, 7, 4], [[2**62, 5, 9], [2**62, 5], [7]], 4))
    first, second, third = (tokens.tolist() for tokens in prompts.tokens())
    assert (len(first), len(second), len(third)) == (10, 7, 4)
    assert common(first, second) == 7
    assert len(set(first) | set(third)) == 14
    assert prompts.priorities.tolist() == [0, 0, 0]


def test_whole_pieces_count_a_partly_filled_one_as_a_token():
    prompts = trace_prompts(workload([10, 7], [[3, 5, 9], [3, 8]], 4), whole_pieces=True)
    first, second = (tokens.tolist() for tokens in prompts.tokens())
    assert (len(first), len(second), common(first, second), len({*first, *second})) == (3, 2, 1, 4)


def test_a_trace_without_hash_ids_or_with_too_many_tokens_is_refused():
    with pytest.raises(ValueError, match="share a beginning"):
        trace_prompts(workload([3], None, 0))
    with pytest.raises(ValueError, match=r"at most 2\*\*31 different tokens, got 3 pieces of 1073741824"):
        trace_prompts(workload([2**30 + 1, 1], [[0, 1], [2]], 2**30))


def test_every_turn_repeats_its_conversation_and_shares_a_system_prompt_with_others():
    prompts = [tokens.tolist() for tokens in synthetic_prompts(CHATS, 1).tokens()]
    priorities = synthetic_prompts(CHATS, 1).priorities.tolist()
    assert len(prompts) == 21
    conversations = {}
    for tokens, priority in zip(prompts, priorities, strict=True):
        assert len(set(tokens)) == len(tokens)
        opened = conversations.setdefault(tokens[5], [])  # the first token of the first question is its own
        if opened:
            # All of the turn before, then an answer of 0 to 3 tokens and a question of 1 to 4.
            assert common(opened[-1][0], tokens) == len(opened[-1][0])
            assert 1 <= len(tokens) - len(opened[-1][0]) <= 7
        opened.append((tokens, priority))
    assert [len(turns) for turns in conversations.values()] == [3] * 7
    for a, b in itertools.combinations(conversations.values(), 2):
        alike = a[0][1] == b[0][1]
        assert common(a[-1][0], b[-1][0]) == (5 if alike else 0)
    assert set(priorities) == {1, 2}


def test_conversations_interleave_within_the_number_that_are_open():
    prompts = [tokens.tolist() for tokens in synthetic_prompts(CHATS, 1).tokens()]
    order = [tokens[5] for tokens in prompts]
    span = {c: (order.index(c), len(order) - 1 - order[::-1].index(c)) for c in order}
    in_progress = [sum(first <= at <= last for first, last in span.values()) for at in range(len(order))]
    assert max(in_progress) == 3
    one = SyntheticPrompts(conversations=3, turns=2, question_tokens=(2, 2), answer_tokens=(1, 1))
    assert [tokens.tolist() for tokens in synthetic_prompts(one, 0).tokens()] == [
        [0, 1], [0, 1, 2, 3, 4], [6, 7], [6, 7, 8, 9, 10], [12, 13], [12, 13, 14, 15, 16],
    ]  # fmt: skip


def test_a_seed_draws_the_same_prompts_and_another_one_others():
    first, again, other = (synthetic_prompts(CHATS, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.lengths, other.lengths)


def test_popular_system_prompts_open_more_conversations():
    many = SyntheticPrompts(conversations=600, system_prompts=3, system_tokens=2, popularity=1.0)
    priorities = synthetic_prompts(many, 0).priorities
    shares = [np.mean(priorities == priority) for priority in (3, 2, 1)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.06)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conversations": 0}, "synthetic.conversations must be at least 1"),
        ({"system_tokens": -1}, "synthetic.system_tokens must be at least 0"),
        ({"popularity": float("nan")}, "synthetic.popularity must be a finite exponent"),
        ({"question_tokens": (0, 3)}, "synthetic.question_tokens .* 1 <= shortest"),
        ({"answer_tokens": (3, 2)}, "synthetic.answer_tokens .* got 3 and 2"),
    ],
)
def test_prompts_that_cannot_be_drawn_are_refused_by_name(change, said):
    with pytest.raises(ValueError, match=said):
        SyntheticPrompts(**({"conversations": 1} | change)).check()
