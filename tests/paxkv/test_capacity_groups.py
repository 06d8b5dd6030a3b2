"""Blocks and concurrency of models whose layers see different tokens: values that serving systems are known to give."""

import math
from fractions import Fraction

import pytest

from paxkv.capacity import pool_concurrency, request_blocks
from paxkv.windows import Group


@pytest.mark.parametrize(
    ("group", "tokens", "max_chunk", "blocks"),
    [
        (Group(16), 1024, 128, 64),
        (Group(16, window=64), 1024, 128, 13),
        (Group(16, chunk=64), 1024, 128, 12),
        (Group(16, window=1024), 16_384, 1024, 129),
        (Group(16, window=64), 100, 128, 7),  # never more than the tokens fill
        (Group(4, window=4), 1000, 1, 2),  # a window of one block straddles two
    ],
)
def test_most_blocks_of_a_request(group, tokens, max_chunk, blocks):
    assert request_blocks([group], tokens, max_chunk) == blocks


def test_a_request_takes_the_blocks_of_all_groups():
    full, window = Group(16), Group(16, window=64)
    assert request_blocks([full, window], 512, 128) == 32 + 13 == 45
    assert pool_concurrency(78, [full, window], 512, 128) == Fraction(78, 45)


@pytest.mark.parametrize(
    ("num_blocks", "groups", "concurrency"),
    [
        (1536, [Group(16)], Fraction(3, 2)),
        (387, [Group(16, window=1024)], Fraction(3)),
        (3459, [Group(16), Group(16, window=1024)], Fraction(3)),
    ],
)
def test_requests_of_the_longest_length_that_a_pool_holds(num_blocks, groups, concurrency):
    assert pool_concurrency(num_blocks, groups, 16_384, 1024) == concurrency
    assert math.floor(concurrency) == num_blocks // request_blocks(groups, 16_384, 1024)


def test_without_a_bound_on_a_step_a_window_may_hold_everything():
    assert request_blocks([Group(16, window=64)], 1024) == 64


@pytest.mark.parametrize(("num_blocks", "tokens"), [(0, 1), (1, 0)])
def test_nothing_is_no_size(num_blocks, tokens):
    with pytest.raises(ValueError, match="at least 1"):
        pool_concurrency(num_blocks, [Group(16)], tokens)
