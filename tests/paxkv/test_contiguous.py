"""vAttention memory in scenarios with known values. Every operation is also compared with the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.outcomes import MemoryFaultError, Outcome, raise_on_fault
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, ask, ints, operations

# Four tokens to a page, twelve groups for four rows of at most 27 tokens, a driver call for each of six buffers.
FOUR_TO_A_PAGE = MEMORIES["vattention_whole"]


def holding(memory: VAttention, lengths: list[int], mapped: list[int]):
    """A state that is given rather than reached: rows with so many tokens, 0 for an idle row, and so many groups."""
    stored = ints(lengths)
    seqs = dataclasses.replace(memory.init().seqs, active=stored > 0, lengths=stored, promised=stored)
    return dataclasses.replace(memory.init(), seqs=seqs, mapped=ints(mapped))


def mapped(pair: Lockstep) -> list[int]:
    return np.asarray(pair.state.mapped).tolist()


def calls(pair: Lockstep) -> tuple[int, int, int]:
    found = pair.memory.map_calls(pair.state)
    return int(found.sync), int(found.background), int(found.unmap)


@pytest.mark.parametrize(
    ("idle", "groups", "row"),
    [
        pytest.param([0, 5, 0, 0], 5, 1, id="exactly enough"),
        pytest.param([0, 4, 7, 0], 3, 1, id="the first idle row has too little"),
        pytest.param([7, 4, 0, 0], 3, 1, id="the first idle row has too much"),
        pytest.param([0, 4, 6, 7], 3, 1, id="the first idle row misses all, and was taken untested elsewhere"),
        pytest.param([2, 3, 1, 0], 5, 1, id="none has enough: the most"),
        pytest.param([3, 3, 3, 3], 2, 0, id="a tie"),
        pytest.param([2, 2, 1, 0], 5, 0, id="a tie of rows that have too little"),
    ],
)
def test_a_request_gets_the_row_that_fits_it_best(idle, groups, row):
    state = holding(FOUR_TO_A_PAGE, [0] * 4, idle)
    _, found, outcome = operations(FOUR_TO_A_PAGE)["admit"](state, ask(4 * groups))
    assert (int(found), int(outcome)) == (row, Outcome.OK)


def test_only_idle_rows_are_considered():
    state = holding(FOUR_TO_A_PAGE, [0] * 4, [3, 0, 5, 0])
    state, row, _ = operations(FOUR_TO_A_PAGE)["admit"](state, ask(12))
    assert int(row) == 0
    _, row, _ = operations(FOUR_TO_A_PAGE)["admit"](state, ask(12))
    assert int(row) == 2


def test_groups_of_a_released_row_stay_mapped_and_cost_the_next_owner_nothing():
    pair = Lockstep(FOUR_TO_A_PAGE)
    row = pair.store(10)
    assert (mapped(pair), calls(pair)) == ([3, 0, 0, 0], (18, 0, 0))
    pair.release([True, False, False, False])
    assert (mapped(pair), int(FOUR_TO_A_PAGE.available(pair.state))) == ([3, 0, 0, 0], 12)
    assert pair.store(9) == row
    assert calls(pair) == (18, 0, 0)


def test_without_deferred_reclaim_a_release_unmaps_at_once():
    pair = Lockstep(MEMORIES["vattention_straddling"])
    pair.store(10)
    pair.release([True, False, False])
    assert (mapped(pair), calls(pair)) == ([0, 0, 0], (4 * 2, 0, 4 * 2))


def test_a_short_pool_takes_whole_surpluses_back_from_the_highest_row_down():
    compiled = operations(FOUR_TO_A_PAGE)
    state = holding(FOUR_TO_A_PAGE, [0] * 4, [0, 3, 7, 0])  # two groups are free
    state, row, _ = compiled["admit"](state, ask(12, final=27))
    assert int(row) == 1
    state, row, _ = compiled["admit"](state, ask(4))
    assert int(row) == 2
    state, outcome = compiled["append"](state, ints([0, 12, 4, 0]))
    assert (int(outcome), np.asarray(state.mapped).tolist()) == (Outcome.OK, [0, 3, 7, 0])
    state, _ = compiled["append"](state, ints([0, 12, 0, 0]))  # three groups more, of which two are free
    assert np.asarray(state.mapped).tolist() == [0, 6, 1, 0]
    assert (int(state.calls.sync), int(state.calls.unmap)) == (3 * 6, 6 * 6)


def test_a_token_may_lie_across_two_pages():
    straddling = VAttention(rows=1, max_len=10, num_groups=4, page_bytes=10, token_bytes=4, buffers=2)
    groups = [int(straddling.groups_for(jnp.int32(n))) for n in range(11)]
    assert groups == [0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert straddling.capacity == 10


def test_a_token_may_be_larger_than_a_page():
    large = VAttention(rows=1, max_len=3, num_groups=7, page_bytes=2, token_bytes=5, buffers=2)
    assert [int(large.groups_for(jnp.int32(n))) for n in range(4)] == [0, 3, 5, 8]
    assert large.capacity == 2


@pytest.mark.parametrize(
    ("kv_heads", "page_bytes", "tokens"),
    [
        pytest.param(4, 64 * 1024, 64, id="Yi-6B, 64 KiB"),
        pytest.param(4, 2 * 1024**2, 2048, id="Yi-6B, 2 MiB"),
        pytest.param(2, 2 * 1024**2, 4096, id="Yi-6B on two devices, 2 MiB"),
        pytest.param(8, 64 * 1024, 32, id="Llama-3-8B, 64 KiB"),
        pytest.param(8, 2 * 1024**2, 1024, id="Llama-3-8B, 2 MiB"),
    ],
)
def test_a_page_holds_as_many_tokens_as_published(kv_heads, page_bytes, tokens):
    memory = VAttention(
        rows=1, max_len=200_000, num_groups=300, page_bytes=page_bytes, token_bytes=kv_heads * 128 * 2, buffers=64
    )
    assert int(memory.groups_for(jnp.int32(tokens))) == 1
    assert int(memory.groups_for(jnp.int32(tokens + 1))) == 2
    assert int(memory.groups_for(jnp.int32(200_000))) == -(-200_000 // tokens)


def test_one_more_group_of_yi_34b_takes_120_driver_calls():
    memory = VAttention(rows=1, max_len=4096, num_groups=8, page_bytes=2**21, token_bytes=1024, buffers=2 * 60)
    before = holding(memory, [2048], mapped=[1])
    after, _ = jax.jit(memory.append, static_argnums=2)(before, ints([1]), 1)
    assert int(after.calls.sync) - int(before.calls.sync) == 120


def test_decoding_waits_for_no_map_once_the_background_runs():
    pair = Lockstep(FOUR_TO_A_PAGE)
    pair.store(5), pair.store(3)
    pair.background()
    after_prefill = calls(pair)[0]
    for _ in range(18):
        assert pair.append([1, 1, 0, 0]) == Outcome.OK
        pair.background()
    assert calls(pair)[0] == after_prefill
    assert calls(pair)[1] > 0


def test_without_the_background_decoding_waits_at_every_boundary():
    pair = Lockstep(FOUR_TO_A_PAGE)
    pair.store(4)
    waited = []
    for _ in range(9):
        before = calls(pair)[0]
        pair.append([1, 0, 0, 0])
        waited.append((calls(pair)[0] - before) // 6)
    assert waited == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_the_background_maps_the_next_token_first_and_then_the_nearest_rows_within_its_budget():
    memory = VAttention(
        rows=5,
        max_len=40,
        num_groups=30,
        page_bytes=8,
        token_bytes=2,
        buffers=1,
        lookahead_steps=3,
        background_groups=2,
    )
    background = jax.jit(memory.background)
    state = background(holding(memory, [8, 7, 6, 6, 4], mapped=[2, 2, 2, 2, 1]))
    # Rows 0 and 4 are full: they get their next group at once, and then have room for four. Rows 1 and 2 run out of
    # room next; row 3 would be the third.
    assert (np.asarray(state.mapped).tolist(), int(state.calls.background)) == ([3, 3, 3, 2, 2], 4)
    assert np.asarray(background(state).mapped).tolist() == [3, 3, 3, 3, 2]


def test_the_background_reclaims_for_the_next_token():
    pair = Lockstep(FOUR_TO_A_PAGE)
    pair.store(20)
    idle = pair.store(16)
    pair.store(12)  # 5 + 4 + 3 groups: the pool is empty
    pair.release([r == idle for r in range(4)])
    assert mapped(pair) == [5, 4, 3, 0]
    pair.background()
    # Rows 0 and 2 are full, so row 1 loses all it had: two groups are needed, and two that are then free mapped ahead.
    assert (mapped(pair), calls(pair)) == ([7, 0, 5, 0], (12 * 6, 4 * 6, 4 * 6))


def test_the_background_does_not_reclaim_to_map_ahead():
    pair = Lockstep(FOUR_TO_A_PAGE)
    pair.store(19)
    idle = pair.store(16)
    pair.store(11)
    pair.release([r == idle for r in range(4)])
    pair.background()
    assert (mapped(pair), calls(pair)) == ([5, 4, 3, 0], (12 * 6, 0, 0))


def test_rows_begin_at_a_multiple_of_the_stride_even_if_a_row_is_shorter_than_a_page():
    short = VAttention(rows=4, max_len=16, num_groups=8, page_bytes=1024, token_bytes=2, buffers=2)
    state = holding(short, [16] * 4, mapped=[1] * 4)
    first = short.slots(state, jnp.arange(4, dtype=jnp.int32), ints([0, 0, 0, 0]))
    last = short.slots(state, jnp.arange(4, dtype=jnp.int32), ints([15, 15, 15, 15]))
    assert np.asarray(first).tolist() == [0, 16, 32, 48]
    assert np.asarray(last).tolist() == [15, 31, 47, 63]
    beyond = short.slots(state, jnp.arange(4, dtype=jnp.int32), ints([16, 16, 16, 16]))
    assert np.asarray(beyond).tolist() == [64] * 4


def test_a_token_past_the_longest_sequence_is_a_fault_and_nothing_is_cut_off():
    pair = Lockstep(FOUR_TO_A_PAGE)
    pair.store(18)
    pair.append([9, 0, 0, 0])
    assert pair.append([1, 0, 0, 0]) == Outcome.OUT_OF_RANGE
    assert pair.oracle.length(0) == 27
    with pytest.raises(MemoryFaultError, match="OUT_OF_RANGE, first at row 0"):
        raise_on_fault(pair.state.seqs.faults)


def test_memory_that_is_not_there_is_a_fault_that_changes_nothing():
    pair = Lockstep(FOUR_TO_A_PAGE)
    for _ in range(3):
        pair.store(16)
    assert pair.append([0, 1, 0, 0]) == Outcome.OUT_OF_BLOCKS
    assert mapped(pair) == [4, 4, 4, 0]


def test_what_can_never_fit_is_refused_and_what_cannot_fit_now_waits():
    pair = Lockstep(MEMORIES["vattention_large_token"])  # twelve groups of 3 bytes hold 7 tokens of 5 bytes
    assert pair.admit(8)[1] == Outcome.NEVER
    assert pair.admit(1, final=8)[1] == Outcome.NEVER
    assert pair.admit(10)[1] == Outcome.NEVER
    assert pair.admit(4) == (0, Outcome.OK)
    assert pair.admit(2)[1] == Outcome.LATER  # 7 promised, though nothing is mapped yet, 4 asked for, 2 kept back
    assert pair.admit(1) == (1, Outcome.OK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": 0}, "page_bytes must be at least 1, got 0"),
        ({"lookahead_steps": -1}, "lookahead_steps must be at least 0"),
        ({"rows": 2**20, "max_len": 2**12}, "virtual_slots must be below 2"),
        (
            {"rows": 1, "token_bytes": 4097, "max_len": 2**20},
            "max_len_in_common_units_of_token_and_page must be below 2",
        ),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FOUR_TO_A_PAGE, **change)
