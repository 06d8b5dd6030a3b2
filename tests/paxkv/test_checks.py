"""Every invariant is broken once by hand, and says so under its name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from paxkv.checks import InvariantError, require_invariants, violations
from paxkv.paged import Paged
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep

NAMES = ["paged_16", "vattention_whole", "reserved_whole_tree"]
CORRUPTIONS = []


def corruption(name: str, *broken: str):
    def register(corrupt):
        CORRUPTIONS.append(pytest.param(name, corrupt, set(broken), id=f"{name}-{corrupt.__name__}"))
        return corrupt

    return register


def sound(name: str):
    """Rows 0 and 1 hold sequences, row 2 did. In paged memory they have blocks 0, 1 and 2, 3, 4; 5 to 9 are free."""
    pair = Lockstep(MEMORIES[name])
    for tokens in {"paged_16": [20, 40, 10], "vattention_whole": [9, 5, 7], "reserved_whole_tree": [5, 3, 2]}[name]:
        pair.store(tokens)
    pair.release([row == 2 for row in range(pair.memory.rows)])
    return pair.state


def replace(state, **changes):
    return dataclasses.replace(state, **changes)


def in_seqs(state, **changes):
    return replace(state, seqs=replace(state.seqs, **changes))


def in_pool(state, **changes):
    return replace(state, pool=replace(state.pool, **changes))


@corruption("paged_16", "lengths_are_possible", "tables_cover_lengths")
def a_length_past_the_longest(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[0].set(177))


@corruption("paged_16", "lengths_are_possible", "tables_hold_no_old_ids")
def a_negative_length(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[0].set(-1))


@corruption("vattention_whole", "promises_are_possible")
def a_promise_past_the_longest(state):
    return in_seqs(state, promised=state.seqs.promised.at[0].set(28))


@corruption("vattention_whole", "free_rows_hold_nothing")
def a_free_row_with_a_promise(state):
    return in_seqs(state, promised=state.seqs.promised.at[2].set(1))


@corruption("vattention_whole", "free_rows_hold_nothing", "mapped_groups_cover_lengths")
def a_free_row_with_a_length(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[3].set(1))


@corruption("paged_16", "usage_is_not_negative", "tables_cover_lengths", "allocated_covers_what_was_given")
def more_tokens_than_there_are_slots(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[:2].set(100))


@corruption("paged_16", "free_ids_are_unique_blocks", "free_and_used_are_all", "references_are_table_entries")
def a_free_id_twice(state):
    return in_pool(state, free_ids=state.pool.free_ids.at[0].set(state.pool.free_ids[1]))


@corruption("paged_16", "free_ids_are_unique_blocks", "free_and_used_are_all", "references_are_table_entries")
def a_free_id_that_is_no_block(state):
    return in_pool(state, free_ids=state.pool.free_ids.at[0].set(-1))


@corruption("paged_16", "free_blocks_have_no_references", "references_are_table_entries", "free_and_used_are_all")
def a_held_block_on_the_free_stack(state):
    return in_pool(state, free_ids=state.pool.free_ids.at[0].set(3))


@corruption("paged_16", "references_are_table_entries")
def a_leaked_block(state):
    return in_pool(state, num_free=state.pool.num_free - 1)


@corruption("paged_16", "references_are_table_entries")
def a_reference_that_no_table_has(state):
    return in_pool(state, extra_refs=state.pool.extra_refs.at[0].set(1))


@corruption("paged_16", "free_blocks_were_not_shared")
def a_free_block_that_remembers_sharing(state):
    return in_pool(state, extra_refs=state.pool.extra_refs.at[9].set(1))


@corruption("paged_16", "tables_cover_lengths", "references_are_table_entries")
def a_token_without_a_block(state):
    return replace(state, tables=state.tables.at[0, 1].set(10))


@corruption("paged_16", "tables_hold_no_old_ids", "references_are_table_entries")
def an_old_id_in_a_free_row(state):
    return replace(state, tables=state.tables.at[2, 0].set(5))


@corruption("paged_16", "no_block_twice_in_a_table", "references_are_table_entries")
def a_block_twice_in_a_table(state):
    return replace(state, tables=state.tables.at[0, 1].set(0))


@corruption("vattention_whole", "mapped_groups_exist", "calls_account_for_mapped_groups")
def more_groups_mapped_than_there_are(state):
    return replace(state, mapped=state.mapped.at[2:].set(6))


@corruption("vattention_whole", "mapped_groups_cover_lengths", "calls_account_for_mapped_groups")
def a_token_without_a_group(state):
    return replace(state, mapped=state.mapped.at[0].set(2))


@corruption("vattention_whole", "mapped_groups_lie_in_their_row", "calls_account_for_mapped_groups")
def groups_past_the_end_of_a_row(state):
    return replace(state, mapped=state.mapped.at[3].set(8))


@corruption("vattention_whole", "calls_account_for_mapped_groups")
def an_unmap_that_was_not_counted(state):
    return replace(state, calls=replace(state.calls, unmap=state.calls.unmap - 6))


@corruption("reserved_whole_tree", "ranges_lie_in_the_arena")
def a_range_past_the_end_of_the_arena(state):
    return replace(state, starts=state.starts.at[0].set(32))


@corruption("reserved_whole_tree", "ranges_are_aligned")
def a_range_that_is_no_buddy_block(state):
    return replace(state, starts=state.starts.at[0].set(20))


@corruption("reserved_whole_tree", "ranges_are_disjoint")
def two_ranges_in_one_place(state):
    return replace(state, starts=state.starts.at[1].set(state.starts[0] + 4))


@corruption("reserved_whole_tree", "ranges_cover_lengths")
def a_token_past_the_reservation(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[1].set(4))


@corruption("reserved_whole_tree", "ranges_cover_lengths", "allocated_covers_what_was_given")
def a_reservation_larger_than_its_block(state):
    return replace(state, sizes=state.sizes.at[1].set(9))


@corruption("reserved_whole_tree", "free_rows_reserve_nothing")
def a_free_row_that_kept_its_range(state):
    return replace(state, orders=state.orders.at[2].set(1))


@pytest.mark.parametrize(("name", "corrupt", "broken"), CORRUPTIONS)
def test_a_broken_invariant_is_named(name, corrupt, broken):
    counts = violations(MEMORIES[name], corrupt(sound(name)))
    named = {invariant for invariant, count in counts.items() if int(count) != 0}
    assert named >= broken
    assert all(int(count) >= 0 for count in counts.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_state_breaks_nothing(name):
    require_invariants(MEMORIES[name], sound(name))
    require_invariants(MEMORIES[name], MEMORIES[name].init())


def test_every_invariant_was_broken():
    known = {invariant for name in NAMES for invariant in violations(MEMORIES[name], MEMORIES[name].init())}
    assert known == set().union(*(broken for _, _, broken in (case.values for case in CORRUPTIONS)))


def test_the_exception_says_what_and_how_often():
    state = a_free_row_with_a_promise(sound("vattention_whole"))
    state = in_seqs(state, promised=state.seqs.promised.at[3].set(1))
    with pytest.raises(InvariantError, match=r"VAttention memory .* free_rows_hold_nothing \(2\)$"):
        require_invariants(MEMORIES["vattention_whole"], state)


def test_checks_run_inside_a_jitted_step():
    memory = MEMORIES["vattention_whole"]

    @jax.jit
    def step(state):
        state = memory.background(state)
        return state, jnp.stack(list(violations(memory, state).values()))

    _, counts = step(sound("vattention_whole"))
    assert int(jnp.sum(counts)) == 0


def test_a_memory_of_another_kind_is_refused():
    class Other(Paged):
        pass

    memory = Other(rows=1, max_len=2, block_size=1, num_blocks=2)
    with pytest.raises(TypeError, match="memory must be one of Paged, VAttention, Reserved, got Other"):
        violations(memory, memory.init())
