"""Blocks and concurrency of models whose layers see different tokens: values that serving systems are known to give."""

import math
from fractions import Fraction

import pytest

from paxkv.capacity import (
    KVShape,
    entry_shape,
    grouped_concurrency,
    paged_concurrency,
    pool_concurrency,
    request_blocks,
)
from paxkv.windows import Group, group_layers


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


GEMMA = KVShape(layers=26, kv_heads=1, head_dim=256)  # 1 KiB a token and layer
GEMMA_WINDOWS = [None if layer % 6 == 5 else 512 for layer in range(26)]


def test_a_windowed_model_in_bytes():
    """Four layers see all of 32,768 tokens; 22 others, in six groups of four entries, 512 + 255 of them at most."""
    groups = group_layers(GEMMA_WINDOWS, 16)
    assert entry_shape(GEMMA, groups).block_bytes(16) == 16 * 4 * 1024
    blocks = 2048 + 6 * 49
    assert request_blocks(groups, 32_768, 256) == blocks
    found = grouped_concurrency(GEMMA, 2**34, groups, 32_768, 256)
    assert found == Fraction(2**34, blocks * 2**16)
    assert found / paged_concurrency(GEMMA, 2**34, 32_768, 16) == Fraction(26 * 2048, 4 * blocks)  # 5.7 times as many


def test_within_the_window_nothing_is_won_and_empty_entries_cost():
    groups = group_layers(GEMMA_WINDOWS, 16)
    found = grouped_concurrency(GEMMA, 2**30, groups, 256, 256)
    assert found / paged_concurrency(GEMMA, 2**30, 256, 16) == Fraction(26, 28)


def test_one_group_or_none_takes_what_the_whole_model_does():
    assert entry_shape(GEMMA, ()) == entry_shape(GEMMA, [Group(16)]) == GEMMA
    assert entry_shape(GEMMA, group_layers([512] * 26, 16)) == GEMMA


def test_layers_that_share_blocks_are_stored_alike():
    precise = KVShape(layers=4, kv_heads=1, head_dim=8, element_bytes=1, precise_layers=1)
    assert entry_shape(precise, group_layers([8] * 4, 4)) == precise
    with pytest.raises(ValueError, match="precise_layers: expected 0, as layers share blocks under 2 groups, got 1"):
        entry_shape(precise, group_layers([8, None] * 2, 4))
