"""Which tokens a group of layers can still see, what it can come to hold, and where it can go on from a cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.windows import Group, group_layers, num_places, place_of

FULL = Group(4)


def skipped(group: Group, stored: int) -> int:
    return int(group.out_of_view(jnp.int32(stored)))


def goes_on_after(group: Group, cached: str, linked: str | None = None) -> list[int]:
    """The numbers of blocks after which a prompt can go on; T for a cached block, F for one that is not."""
    present = np.array([c == "T" for c in cached], bool)
    # In a run every block but the first continues the one before; the very first block has none before it.
    before = np.concatenate([[True], present[:-1]])[: len(present)]
    links = present & (before if linked is None else np.array([c == "T" for c in linked], bool))
    run = np.cumprod(links)
    answer = group.can_continue(jnp.asarray(present), jnp.asarray(links), jnp.int32(int(run.sum())))
    return np.flatnonzero(np.asarray(answer)).tolist()


# ---- views ---------------------------------------------------------------------------------------------------------


def test_a_sliding_window_counts_the_token_that_looks_back():
    window_8 = Group(4, window=8)
    assert [skipped(window_8, n) for n in range(8)] == [0] * 8
    assert [skipped(window_8, n) for n in (8, 9, 12, 16)] == [1, 2, 5, 9]


def test_blocks_leave_a_sliding_window_when_their_last_token_does():
    window_4 = Group(2, window=4)
    assert [skipped(window_4, n) // 2 for n in (4, 5, 6, 7, 11)] == [0, 1, 1, 2, 4]


def test_a_chunk_is_left_when_it_is_full():
    chunk_8 = Group(4, chunk=8)
    assert [skipped(chunk_8, n) for n in (0, 7, 8, 13, 15, 16, 17)] == [0, 0, 8, 8, 8, 16, 16]


def test_who_sees_all_lets_nothing_go():
    assert [skipped(FULL, n) for n in (0, 1, 1000)] == [0, 0, 0]
    assert (FULL.sees_all, Group(4, window=8).sees_all, Group(4, chunk=8).sees_all) == (True, False, False)


@pytest.mark.parametrize("group", [Group(3, window=1), Group(3, window=7), Group(3, chunk=5), Group(4, chunk=8), FULL])
def test_what_is_out_of_view_is_what_no_later_token_sees(group):
    def sees(query: int, key: int) -> bool:
        if group.window is not None:
            return query - group.window < key <= query
        if group.chunk is not None:
            return key <= query and key // group.chunk == query // group.chunk
        return key <= query

    for stored in range(40):
        unseen = 0
        while unseen < stored and not any(sees(query, unseen) for query in range(stored, stored + 60)):
            unseen += 1
        assert skipped(group, stored) == unseen


# ---- the most that is held -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "tokens", "max_chunk", "blocks"),
    [
        pytest.param(Group(16, window=64), 1024, 128, 13, id="a window of 64 while 128 are computed"),
        pytest.param(Group(16, chunk=64), 1024, 128, 12, id="a chunk of 64 while 128 are computed"),
        pytest.param(Group(16, window=1024), 16384, 1024, 129, id="a window of 1024 while as many are computed"),
        pytest.param(Group(16, window=1024), 512, 1024, 32, id="a prompt shorter than the window"),
        pytest.param(Group(16), 1024, 128, 64, id="all tokens"),
        pytest.param(Group(16), 0, 128, 0, id="nothing"),
    ],
)
def test_the_most_blocks_held_at_once(group, tokens, max_chunk, blocks):
    assert int(group.most_blocks(jnp.int32(tokens), max_chunk)) == blocks


@pytest.mark.parametrize(
    "group",
    [
        Group(4, window=1),
        Group(4, window=6),
        Group(4, window=8),
        Group(4, chunk=8),
        Group(4, chunk=6),
        Group(1, chunk=3),
    ],
)
@pytest.mark.parametrize("max_chunk", [1, 2, 3, 4, 9])
def test_no_way_to_store_a_sequence_ever_holds_more(group, max_chunk):
    size = group.block_size
    for total in (1, 7, 16, 29):
        most = 0
        for first in range(1, min(max_chunk, total) + 1):  # then always as many as can be
            stored, freed = 0, 0
            while stored < total:
                new = min(first if stored == 0 else max_chunk, total - stored)
                most = max(most, -(-(stored + new) // size) - freed)
                stored += new
                freed = skipped(group, stored) // size
        assert most <= int(group.most_blocks(jnp.int32(total), max_chunk))


def test_a_bound_is_reached_and_so_not_too_careful():
    group = Group(4, window=6)  # five earlier tokens and one new one, in three blocks: of 7 to 12 the last of the first
    assert int(group.most_blocks(jnp.int32(100), 1)) == 3
    assert -(-9 // 4) - skipped(group, 8) // 4 == 3


# ---- going on from a cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "blocks"),
    [
        ("F" * 10, 0),
        ("T", 1),
        ("TF", 1),
        ("TT", 2),
        ("TTF", 2),
        ("TTT", 3),
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("TTFTFFTTFFFT", 8),
    ],
)
def test_a_sliding_window_goes_on_after_the_last_run_that_fills_its_view(cached, blocks):
    assert goes_on_after(Group(2, window=4), cached)[-1] == blocks


def test_a_sliding_window_goes_on_wherever_what_it_sees_is_cached():
    assert goes_on_after(Group(2, window=4), "TTFTFFTTFTTT") == [0, 1, 2, 8, 11, 12]


def test_a_view_that_ends_inside_a_block_needs_that_block():
    # The next token sees three tokens with a window of four, and one of them lies in the second block before it.
    assert goes_on_after(Group(2, window=3), "FTFTT") == [0, 2, 4, 5]  # two tokens: one block
    assert goes_on_after(Group(2, window=4), "FTFTT") == [0, 5]
    assert goes_on_after(Group(2, window=1), "FFF") == [0, 1, 2, 3]  # sees itself only


def test_a_run_that_does_not_continue_itself_is_none():
    assert goes_on_after(Group(2, window=4), "FTTTT", linked="FFTFT") == [0, 3, 5]
    assert goes_on_after(Group(2, window=4), "TTT", linked="TFT") == [0, 1, 3]


def test_a_first_block_that_continues_something_else_is_not_the_beginning():
    """It is present, but not linked to the root: its tokens agree, what it follows does not."""
    assert goes_on_after(Group(2, window=8), "TTT", linked="FTT")[:2] == [0, 1]


@pytest.mark.parametrize(("length", "start"), [(15, 8), (16, 8), (17, 16)])
def test_a_chunk_can_always_begin_though_nothing_is_cached(length, start):
    group = Group(4, chunk=8)
    ends = [blocks * 4 for blocks in goes_on_after(group, "F" * 5) if blocks * 4 <= length - 1]
    assert max(ends) == start


def test_within_a_chunk_all_blocks_from_its_beginning_are_needed():
    assert goes_on_after(Group(4, chunk=8), "TFTTTF") == [0, 1, 2, 3, 4, 5, 6]
    assert goes_on_after(Group(4, chunk=12), "TTFFTT") == [0, 1, 2, 3, 6]
    assert goes_on_after(Group(4, chunk=12), "TTFTTF", linked="TTFTFF") == [0, 1, 2, 3, 4, 6]


def test_who_sees_all_goes_on_where_everything_before_is_linked():
    assert goes_on_after(FULL, "TTFT") == [0, 1, 2]
    assert goes_on_after(FULL, "TTT", linked="TFT") == [0, 1]
    assert goes_on_after(FULL, "TTT") == [0, 1, 2, 3]


# ---- groups of a model's layers -------------------------------------------------------------------------------------


def shapes(groups):
    return [(group.window, len(group.layers)) for group in groups]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([], []),
        ([None] * 4, []),
        ([4096] * 32, [(4096, 32)]),
        ([4096, None] * 13, [(None, 13), (4096, 13)]),
        ([8, 8, None, 8, 8, None, 8], [(None, 2), (8, 2), (8, 2), (8, 1)]),
        ([8] * 5 + [None] * 4, [(None, 4), (8, 5)]),  # five in a group of four would leave three entries empty
        ([8] * 6 + [None] * 4, [(None, 4), (8, 4), (8, 2)]),
        ([2, 8, None, 8, 8, 2], [(None, 1), (8, 1), (8, 1), (8, 1), (2, 1), (2, 1)]),
    ],
)
def test_layers_of_one_kind_are_cut_into_groups_as_large_as_the_rarest_kind(windows, expected):
    groups = group_layers(windows, 16)
    assert shapes(groups) == expected
    assert {group.block_size for group in groups} <= {16}


@pytest.mark.parametrize("windows", [[8] * 3, [8, None] * 4, [8, 8, None, 8, 8, None, 8], [2, 8, None, 8, 8, 2]])
def test_every_layer_has_an_entry_of_its_own_in_its_group_and_sees_what_the_group_sees(windows):
    groups = group_layers(windows, 4)
    found = [place_of(groups, layer) for layer in range(len(windows))]
    assert len(set(found)) == len(windows)
    assert [groups[g].window for g, _ in found] == windows
    entries = num_places(groups, len(windows))
    assert {place for _, place in found} == set(range(entries))
    with pytest.raises(ValueError, match=f"layer: expected one of those in the memory's groups, got {len(windows)}"):
        place_of(groups, len(windows))


def test_a_group_alone_has_all_layers_unless_it_names_them():
    assert [place_of((FULL,), layer) for layer in (0, 7)] == [(0, 0), (0, 7)]
    assert num_places((FULL,), 8) == 8


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"block_size": 4, "window": 0}, "window must be at least 1"),
        ({"block_size": 4, "chunk": -1}, "chunk must be at least 1"),
        ({"block_size": 4, "window": 8, "chunk": 8}, "window, chunk: expected at most one, got 8 and 8"),
        ({"block_size": 4, "layers": (0, -1)}, "layers must be at least 0"),
        ({"block_size": 4, "layers": (2, 0, 2)}, r"layers: expected none twice, got \(2, 0, 2\)"),
    ],
)
def test_impossible_groups_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        Group(**sizes)
