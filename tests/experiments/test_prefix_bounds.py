"""The bounds against brute force: sets of whole prefixes, and every choice a cache could make."""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.prefix_bounds import block_chains, optimal_hits, unbounded_hits
from experiments.prefix_prompts import Prompts


def prompts_of(*prompts):
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, tokens in enumerate(prompts):
        ids[row, : len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in prompts], np.int32)
    return Prompts(ids, 1, lengths, np.zeros(len(prompts), np.int32))


def test_blocks_are_equal_exactly_where_all_up_to_them_is_equal():
    chains = block_chains(prompts_of([1, 2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 3, 4], [1, 2, 3, 5], [1]), 2)
    first, second = chains[0]
    assert chains[1] == [first, second]
    assert chains[2][0] not in (first, second)  # equal to the second block of others, but after nothing
    assert chains[2][1] != second
    assert chains[3][0] == first
    assert chains[3][1] not in (first, second)
    assert chains[4] == []


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 3)
)
def test_unbounded_hits_are_the_prefixes_seen_before(prompts, block_size):
    lookups = [(len(tokens) - 1) // block_size for tokens in prompts]
    hits = unbounded_hits(block_chains(prompts_of(*prompts), block_size), lookups)
    seen, expected = set(), []
    for tokens, looked_up in zip(prompts, lookups, strict=True):
        ends = range(block_size, len(tokens) + 1, block_size)
        expected.append(sum(tuple(tokens[:end]) in seen for end in ends[:looked_up]))
        seen |= {tuple(tokens[:end]) for end in ends}
    assert hits == expected


def best_of_all(accesses, capacity):
    """Tries, after every access, every set of at most `capacity` blocks that a cache could go on with."""

    @functools.cache
    def best(time, cache):
        if time == len(accesses):
            return 0
        block, counts = accesses[time]
        reach = cache | {block}
        kept = [reach] if len(reach) <= capacity else [reach - {out} for out in reach]
        return (counts and block in cache) + max(best(time + 1, next_cache) for next_cache in kept)

    return best(0, frozenset())


@hypothesis.given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 4)), max_size=6), st.integers(1, 3)
)
def test_no_choice_of_what_to_keep_beats_the_optimum_and_one_reaches_it(asked, capacity):
    chains = [chain for chain, _ in asked]
    lookups = [min(looked_up, len(chain)) for chain, looked_up in asked]
    accesses = [(block, n < m) for chain, m in zip(chains, lookups, strict=True) for n, block in enumerate(chain)]
    assert optimal_hits(chains, lookups, capacity) == best_of_all(accesses, capacity)


def test_the_optimum_grows_with_the_cache_up_to_the_unbounded_count():
    rng = np.random.default_rng(0)
    chains = block_chains(prompts_of(*(rng.integers(0, 2, size=rng.integers(1, 40)).tolist() for _ in range(200))), 2)
    lookups = [len(chain) for chain in chains]
    found = [optimal_hits(chains, lookups, capacity) for capacity in (1, 4, 16, 64, 256, 10_000)]
    assert found == sorted(found)
    assert len(set(found[:-1])) == len(found) - 1
    assert found[-1] == sum(unbounded_hits(chains, lookups))


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_block_needed_later_than_all_that_is_kept_is_not_kept(capacity):
    # 0 and 1 come back at once, 2 to 5 only much later: with room for two, keeping any of these costs a hit.
    chains = [[0], [1], [2], [3], [0], [1], [4], [5], [0], [1], [2], [3]]
    assert optimal_hits(chains, [1] * len(chains), capacity) == {1: 2, 2: 4}[capacity]
