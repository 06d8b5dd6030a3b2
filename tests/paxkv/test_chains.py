"""What is known of each row's tokens: extended raggedly, one token a row, or in plain Python, it is the same."""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_tables import BlockTable
from paxkv.chain_hash import prefix_hashes, seed
from paxkv.chains import Chains, clear_chains, extend, extend_by_one, filled_rows, init_chains, root_of, start_chain
from paxkv.prefix_cache import PrefixCache
from paxkv.windows import Group
from tests.paxkv.test_chain_hash import plain_hash

ROWS, MOST = 4, 30  # tokens in a call
GROUPS = {
    "one": (Group(4),),
    "single_tokens": (Group(1),),
    "several": (Group(4), Group(2), Group(8)),
    "no_multiples": (Group(3), Group(5)),
}
QUICKLY = {"xla_backend_optimization_level": 0}


def ints(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


@functools.cache
def extension(groups: tuple[Group, ...], width: int, function):
    empty = init_chains(ROWS, groups), jnp.zeros(width, jnp.int32), jnp.zeros(ROWS + 1, jnp.int32)
    return jax.jit(lambda chain, tokens, cu: function(chain, groups, tokens, cu)).lower(*empty).compile(QUICKLY)


def ragged(new: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Tokens row after row, then rubbish, and where each row's begin."""
    flat = [token for row in new for token in row]
    return ints(flat + [-77] * (width - len(flat))), ints(np.cumsum([0] + [len(row) for row in new]))


def filled_in_plain_python(tokens: list[list[int]], new: list[list[int]], size: int) -> list[tuple]:
    """The blocks that the new tokens complete: row, index, whether it is the first of its row, hash, tokens."""
    blocks = []
    for row, added in enumerate(new):
        everything, first = tokens[row] + added, len(tokens[row]) // size
        for index in range(first, len(everything) // size):
            end = (index + 1) * size
            blocks.append((row, index, index == first, plain_hash(everything[:end]), everything[end - size : end]))
    return blocks


def filled(entry: tuple) -> list[tuple]:
    row, index, valid, starts, hashes, tokens = (None if part is None else np.asarray(part).tolist() for part in entry)
    return [
        (row[i], index[i], True if starts is None else starts[i], tuple(hashes[i]), tokens[i])
        for i in range(len(row))
        if valid[i]
    ]


def begin(groups) -> Chains:
    start = seed(jnp.int32(0), jnp.int32(0), jnp.int32(0), "f32")
    chain = init_chains(ROWS, groups)
    return dataclasses.replace(chain, hashes=jnp.broadcast_to(start[None, :], (ROWS, 2)))


def require_is(chain: Chains, tokens: list[list[int]]) -> None:
    assert np.asarray(chain.hashed).tolist() == [len(row) for row in tokens]
    assert [tuple(h) for h in np.asarray(chain.hashes).tolist()] == [plain_hash(row) for row in tokens]
    ring = chain.recent.shape[1]
    for row, known in enumerate(tokens):
        for position in range(max(0, len(known) - ring), len(known)):
            assert int(chain.recent[row, position % ring]) == known[position]


@pytest.mark.parametrize("name", GROUPS)
def test_extending_raggedly_or_by_one_agrees_with_plain_python(name):
    groups, rng = GROUPS[name], random.Random(name)
    raggedly, by_one = extension(groups, MOST, extend), extension(groups, ROWS, extend_by_one)
    tokens: list[list[int]] = [[] for _ in range(ROWS)]
    chain = begin(groups)
    for step in range(25):
        most = MOST if step == 20 else rng.choice([1, 1, 2, 7])
        new = [[rng.randrange(2**17) for _ in range(rng.randint(0, most))] for _ in range(ROWS)]
        if most == MOST:
            new = [[], [rng.randrange(9) for _ in range(MOST)], [], []]  # the whole batch is one row's
        answers = [raggedly(chain, *ragged(new, MOST))]
        if most == 1:
            answers.append(by_one(chain, *ragged(new, ROWS)))
        for answer in answers:
            for group, entry in zip(groups, answer.filled, strict=True):
                assert filled(entry) == filled_in_plain_python(tokens, new, group.block_size)
        tokens = [known + added for known, added in zip(tokens, new, strict=True)]
        for answer in answers:
            require_is(answer.chains, tokens)
        chain = answers[rng.randrange(len(answers))].chains


def test_a_batch_without_a_token_to_spare_fills_all_blocks_that_it_can():
    """Each row is one token short of a block: a row's first token fills one, besides those that the others fill."""
    groups, size, width = (Group(8),), 8, 12
    tokens = [[10 * row + i for i in range(size - 1)] for row in range(ROWS)]
    chain = extension(groups, MOST, extend)(begin(groups), *ragged(tokens, MOST)).chains
    shares = [counts for counts in itertools.product((0, 1, 2, 9, 10, 12), repeat=ROWS) if sum(counts) == width]
    assert (1, 1, 1, 9) in shares  # five blocks of twelve tokens
    for counts in shares:
        new = [[100 + i for i in range(count)] for count in counts]
        answer = extension(groups, width, extend)(chain, *ragged(new, width))
        assert filled(answer.filled[0]) == filled_in_plain_python(tokens, new, size), counts


def test_nothing_new_changes_nothing():
    groups = GROUPS["several"]
    chain = extension(groups, MOST, extend)(begin(groups), *ragged([[1, 2, 3], [], [4] * 9, []], MOST)).chains
    for width, function in ((MOST, extend), (ROWS, extend_by_one)):
        answer = extension(groups, width, function)(chain, *ragged([[], [], [], []], width))
        for old, new in zip(jax.tree.leaves(chain), jax.tree.leaves(answer.chains), strict=True):
            np.testing.assert_array_equal(new, old)
        assert [filled(entry) for entry in answer.filled] == [[], [], []]


def test_extending_keeps_contents_identities_and_priorities():
    groups = GROUPS["no_multiples"]
    chain = start(begin(groups), 1, [5, 6, 7, 8, 9], 3)
    for width, function in ((MOST, extend), (ROWS, extend_by_one)):
        after = extension(groups, width, function)(chain, *ragged([[1], [2], [3], []], width)).chains
        for name in ("contents", "identities", "priorities"):
            np.testing.assert_array_equal(getattr(after, name), getattr(chain, name))


def start(chain: Chains, row: int, tokens: list[int], length: int) -> Chains:
    begin = seed(jnp.int32(0), jnp.int32(0), jnp.int32(0), "f32")
    hash_ = prefix_hashes(ints(tokens[:length]), begin, length)[0] if length else begin
    kept = ints([10 + g for g in range(chain.contents.shape[1])]), ints([2, 3, 4])
    padded = ints(tokens + [-77] * (MOST - len(tokens)))
    return jax.jit(start_chain)(chain, jnp.int32(row), padded, jnp.int32(length), hash_, *kept, jnp.int32(8))


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 17, 24])
def test_a_chain_that_starts_with_cached_tokens_goes_on_as_if_it_had_been_extended(length):
    groups, rng = GROUPS["several"], random.Random(length)
    known = [rng.randrange(1000) for _ in range(length + 3)]  # the hit ends before the prompt does
    chain = start(begin(groups), 2, known, length)
    tokens = [[], [], known[:length], []]
    require_is(chain, tokens)
    assert np.asarray(chain.contents[2]).tolist() == [10, 11, 12]
    assert np.asarray(chain.identities[2]).tolist() == [2, 3, 4]
    assert int(chain.priorities[2]) == 8
    new = [[], [], [*known[length:], 1, 2, 3, 4, 5, 6], []]
    answer = extension(groups, MOST, extend)(chain, *ragged(new, MOST))
    for group, entry in zip(groups, answer.filled, strict=True):
        assert filled(entry) == filled_in_plain_python(tokens, new, group.block_size)
    for token in new[2]:
        answer = extension(groups, ROWS, extend_by_one)(chain, *ragged([[], [], [token], []], ROWS))
        for group, entry in zip(groups, answer.filled, strict=True):
            assert filled(entry) == filled_in_plain_python(tokens, [[], [], [token], []], group.block_size)
        chain, tokens[2] = answer.chains, tokens[2] + [token]


def test_starting_nobodys_chain_changes_nothing():
    chain = start(begin(GROUPS["one"]), 1, [1, 2, 3, 4, 5], 4)
    for old, new in zip(jax.tree.leaves(chain), jax.tree.leaves(start(chain, ROWS, [9] * 8, 8)), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_row_that_starts_keeps_nothing_of_the_one_before_it():
    used = start(begin(GROUPS["several"]), 1, list(range(1, 25)), 24)
    fresh = start(begin(GROUPS["several"]), 1, [7, 7, 7], 2)
    for old, new in zip(jax.tree.leaves(start(used, 1, [7, 7, 7], 2)), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(new, old)


def test_cleared_rows_are_all_zero_and_the_others_stay():
    chain = start(start(init_chains(ROWS, GROUPS["several"]), 1, list(range(1, 20)), 9), 2, [3] * 9, 8)
    after = jax.jit(clear_chains)(chain, jnp.asarray([False, True, False, False]))
    for old, new in zip(jax.tree.leaves(chain), jax.tree.leaves(after), strict=True):
        assert not np.asarray(new[1]).any()
        np.testing.assert_array_equal(np.delete(new, 1, axis=0), np.delete(old, 1, axis=0))


def test_groups_start_from_roots_that_no_content_has():
    roots = [root_of(group) for group in range(3)]
    assert len(set(roots)) == 3
    assert all(root <= 0 for root in roots)  # contents count from 1


def test_what_publishing_needs_is_put_together_by_row():
    groups, config = GROUPS["several"], PrefixCache(explain=True)
    chain = start(begin(groups), 2, list(range(40, 53)), 13)
    identity = seed(jnp.int32(2), jnp.int32(3), jnp.int32(4), "f32")
    chain = dataclasses.replace(chain, hashes=chain.hashes.at[2].set(identity + jnp.asarray([7, 9], jnp.uint32)))
    table = BlockTable(ints(np.arange(ROWS * 9).reshape(ROWS, 9)), ints([0] * ROWS), ints([9] * ROWS))
    answer = extension(groups, ROWS, extend_by_one)(chain, *ragged([[], [], [1], []], ROWS))
    assert [np.asarray(entry[2]).tolist() for entry in answer.filled] == [
        [False] * 4,
        [False, False, True, False],
        [False] * 4,
    ]
    together = filled_rows(config, answer.chains, table, answer.filled[1], 1)
    assert np.asarray(together.valid).tolist() == [False, False, True, False]
    assert int(together.blocks[2]) == 2 * 9 + 6  # of its row, the seventh block of two tokens
    assert np.asarray(together.tokens[2]).tolist() == [52, 1]
    assert (int(together.parents[2]), int(together.priorities[2])) == (11, 8)
    assert np.asarray(together.identities[2]).tolist() == [2, 3, 4]
    hashes = answer.chains.hashes
    np.testing.assert_array_equal(together.keys, config.keys(hashes, 1))
    np.testing.assert_array_equal(together.plain_keys[2], config.keys((hashes[2] - identity)[None], 0)[0])
    assert filled_rows(PrefixCache(), answer.chains, table, answer.filled[1], 1).plain_keys is None
