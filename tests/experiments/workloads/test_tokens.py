"""Prompts: realised lengths, and tokens shared exactly where hash ids are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.workloads import Provenance, Workload, fit_lengths, prompt_tokens, scale_lengths

TEXT = bytes(np.random.default_rng(0).integers(1, 256, 5000, np.uint8))  # no zero, so padding shows


def _workload(prompt, hash_ids=None, hash_block_size=0):
    return Workload(
        Provenance(source="test", rows_read=len(prompt), lengths="given", arrivals="given"),
        arrival_ms=np.zeros(len(prompt)),
        prompt_len=np.array(prompt, np.int32),
        output_len=np.ones(len(prompt), np.int32),
        hash_ids=None if hash_ids is None else tuple(np.array(ids, np.int64) for ids in hash_ids),
        hash_block_size=hash_block_size,
    )


def test_prompts_have_exactly_their_lengths_and_zeros_after():
    prompt = [1, 500, 37, 4999, 5000]
    tokens = prompt_tokens(_workload(prompt), 0, TEXT)
    assert tokens.shape == (5, 5000)
    assert tokens.dtype == np.int32
    assert (tokens != 0).sum(axis=1).tolist() == prompt
    assert all((tokens[i, :n] != 0).all() for i, n in enumerate(prompt))


def test_prompts_of_a_text_are_windows_of_it():
    tokens = prompt_tokens(_workload([200] * 30), 3, TEXT)
    starts = [(TEXT + TEXT).find(bytes(row.tolist())) for row in tokens.astype(int)]
    assert min(starts) >= 0
    assert len(set(starts)) == 30
    assert max(starts) - min(starts) > 2500  # spread over the text


@pytest.mark.parametrize("seed", range(6))
def test_no_two_requests_share_a_window_by_chance(seed):
    # As many windows as the text has places: drawn freely, some would meet.
    tokens = prompt_tokens(_workload([20] * 60), seed, TEXT[:60])
    assert len({tuple(row) for row in tokens.tolist()}) == 60


@pytest.mark.parametrize("source", [TEXT, 32_000], ids=["text", "vocabulary"])
def test_a_prompt_depends_on_seed_and_place_alone(source):
    tokens = prompt_tokens(_workload([50, 60, 70]), 1, source)
    other = prompt_tokens(_workload([90, 60, 10, 80]), 1, source)
    for i, shared in enumerate([50, 60, 10]):
        assert tokens[i, :shared].tolist() == other[i, :shared].tolist()
    reseeded = prompt_tokens(_workload([50, 60, 70]), 2, source)
    assert all((tokens[i, :50] != reseeded[i, :50]).any() for i in range(3))


def test_vocabulary_ids_are_uniform():
    tokens = prompt_tokens(_workload([5000] * 20), 0, 50)
    counts = np.bincount(tokens.ravel(), minlength=50)
    assert len(counts) == 50
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


def _shared_prefix(x, y):
    same = x == y
    return int(len(same) if same.all() else np.argmin(same))


@settings(max_examples=40)
@given(st.data(), st.sampled_from([TEXT, 32_000]))
def test_prompts_share_tokens_exactly_where_they_share_hash_ids(data, source):
    # A random forest of blocks: each request walks from a root, so equal ids imply equal histories.
    size = 8
    children, chains, lengths = {}, [], []
    for _ in range(data.draw(st.integers(2, 6))):
        length = data.draw(st.integers(1, 40))
        chain, parent = [], None
        for i in range(-(-length // size)):
            # The last id of a prompt names its partial block, so it is its own.
            branch = data.draw(st.integers(0, 1)) if (i + 1) * size <= length else ("end", len(chains))
            parent = children.setdefault((parent, branch), len(children))
            chain.append(parent)
        chains.append(chain)
        lengths.append(length)
    tokens = prompt_tokens(_workload(lengths, chains, size), 0, source)
    for i in range(len(chains)):
        for j in range(i):
            ids = sum(a == b for a, b in zip(chains[i], chains[j], strict=False))
            n = min(lengths[i], lengths[j])
            shared = _shared_prefix(tokens[i, :n], tokens[j, :n])
            assert shared >= min(ids * size, n)
            # Beyond the common ids tokens agree by chance only: a few at most.
            assert shared <= ids * size + 3


def test_hash_id_s_tokens_do_not_depend_on_the_workload_around_them():
    alone = prompt_tokens(_workload([16], [[7, 2**62]], 8), 5, 1000)
    among = prompt_tokens(_workload([24, 8, 12], [[7, 2**62, 9], [3], [7, 11]], 8), 5, 1000)
    assert among[0, :16].tolist() == alone[0].tolist()
    assert among[2, :8].tolist() == alone[0, :8].tolist()
    far = [[7], [7 + 1000], [7 + 2**32], [7 + 2**62]]
    assert len({tuple(row) for row in prompt_tokens(_workload([8] * 4, far, 8), 5, 1000).tolist()}) == 4


def test_asked_prefix_share_is_the_realised_one_after_scaling_and_cutting():
    # 4,096 shared and 1,024 own tokens each: 80 % of the second prompt is in the cache.
    chains = [[*range(8), 100, 101], [*range(8), 200, 201]]
    workload = scale_lengths(_workload([5120, 5120], chains, 512), 1 / 16)
    tokens = prompt_tokens(workload, 0, 32_000)
    assert workload.prompt_len.tolist() == [320, 320]
    assert _shared_prefix(tokens[0], tokens[1]) / 320 == 0.80
    cut = prompt_tokens(fit_lengths(workload, 281, "truncate"), 0, 32_000)
    assert cut.tolist() == tokens[:, :280].tolist()


def test_source_too_small_is_refused():
    with pytest.raises(ValueError, match="at least one piece of 11 tokens, got a text of 10 bytes"):
        prompt_tokens(_workload([11]), 0, b"0123456789")
    with pytest.raises(ValueError, match="vocabulary of at least 1 token, got 0"):
        prompt_tokens(_workload([11]), 0, 0)
    assert bytes(prompt_tokens(_workload([10]), 0, b"0123456789")[0].astype(np.uint8)) in b"0123456789" * 2
