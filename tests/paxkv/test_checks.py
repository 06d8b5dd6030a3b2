"""Every invariant is broken once by hand, and says so under its name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from paxkv.checks import InvariantError, require_invariants, violations
from paxkv.lifecycle import fork
from paxkv.memory import content
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, ask, ints

NAMES = ["paged_16", "cached", "forked", "vattention_whole", "reserved_whole_tree"]
SHARING = {
    "cached": Paged(rows=4, max_len=40, block_size=4, num_blocks=10, cache=PrefixCache()),
    "forked": Paged(rows=4, max_len=40, block_size=4, num_blocks=10, forks=True),
}
CORRUPTIONS = []


def corruption(name: str, *broken: str):
    def register(corrupt):
        CORRUPTIONS.append(pytest.param(name, corrupt, set(broken), id=f"{name}-{corrupt.__name__}"))
        return corrupt

    return register


def memory_of(name: str):
    return SHARING.get(name) or MEMORIES[name]


def sound(name: str):
    """Rows 0 and 1 hold sequences, row 2 did. In paged memory they have blocks 0, 1 and 2, 3, 4; 5 to 9 are free."""
    if name in SHARING:
        return shared(SHARING[name])
    pair = Lockstep(MEMORIES[name])
    for tokens in {"paged_16": [20, 40, 10], "vattention_whole": [9, 5, 7], "reserved_whole_tree": [5, 3, 2]}[name]:
        pair.store(tokens)
    pair.release([row == 2 for row in range(pair.memory.rows)])
    return pair.state


@functools.cache
def shared(memory: Paged):
    """Row 0 holds ten tokens in blocks 0 to 2. Row 1 begins with eight of them, from the cache or as a fork."""
    tokens = jnp.arange(memory.max_len, dtype=jnp.int32)
    asked = ask(10)._replace(content=content(tokens) if memory.cache else None)
    state, _, _ = jax.jit(memory.admit)(memory.init(), asked)
    state, _ = jax.jit(memory.append, static_argnums=2)(state, ints([10, 0, 0, 0]), 10)
    state = jax.jit(memory.publish, static_argnums=3)(state, tokens[:10], ints([0, 10, 10, 10, 10]), 10)
    if memory.cache:
        state, _, outcome = jax.jit(memory.admit)(state, asked)
    else:
        counts = jnp.int32(0), jnp.int32(8), jnp.int32(10)
        state, _, outcome = jax.jit(fork, static_argnums=0)(memory, state, *counts)
    assert int(outcome) == 0
    assert state.pool.ref_counts[:3].tolist() == [2, 2, 1]
    return state


def replace(state, **changes):
    return dataclasses.replace(state, **changes)


def in_seqs(state, **changes):
    return replace(state, seqs=replace(state.seqs, **changes))


def in_pool(state, **changes):
    return replace(state, pool=replace(state.pool, **changes))


@corruption("paged_16", "lengths_are_possible", "tables_cover_lengths")
def a_length_past_the_longest(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[0].set(177))


@corruption("paged_16", "lengths_are_possible")
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


@corruption("paged_16", "usage_is_not_negative", "tables_cover_lengths")
def more_tokens_than_there_are_slots(state):
    return in_seqs(state, lengths=state.seqs.lengths.at[:2].set(100))


def in_queue(state, place: int, block: int):
    """Puts a block on a place of the queue, counted from its front."""
    return in_pool(state, queue=state.pool.queue.at[state.pool.head + place].set(block))


def in_table(state, row: int, column: int, block: int):
    (table,) = state.tables
    return replace(state, tables=(replace(table, ids=table.ids.at[row, column].set(block)),))


def extra_references(state, block: int, count: int):
    return in_pool(state, marks=state.pool.marks.at[block, 1].set(count))


def in_contents(state, **changes):
    return replace(state, contents=replace(state.contents, **changes))


def in_record(state, block: int, column: int, value: int):
    return in_contents(state, records=state.contents.records.at[block, column].set(value))


def in_chains(state, **changes):
    return replace(state, chains=replace(state.chains, **changes))


@corruption("paged_16", "free_ids_are_unique_blocks", "free_blocks_have_no_references")
def a_free_id_twice(state):
    return in_queue(state, 0, int(state.pool.queue[state.pool.head + 1]))


@corruption("paged_16", "free_ids_are_unique_blocks", "free_blocks_have_no_references")
def a_free_id_that_is_no_block(state):
    return in_queue(state, 0, -1)


@corruption("paged_16", "free_ids_are_unique_blocks", "free_blocks_have_no_references")
def a_hole_that_was_not_counted(state):
    return in_queue(state, 2, 10)


@corruption("paged_16", "free_blocks_have_no_references", "free_blocks_know_their_places")
def a_held_block_in_the_queue(state):
    return in_queue(state, 0, 3)


@corruption("paged_16", "references_are_table_entries", "free_and_used_are_all", "free_blocks_have_no_references")
def a_free_block_that_believes_it_is_held(state):
    return in_pool(state, marks=state.pool.marks.at[7, 0].set(-1))


@corruption("paged_16", "references_are_table_entries", "free_and_used_are_all")
def a_held_block_that_believes_it_is_free(state):
    return in_pool(state, marks=state.pool.marks.at[0, 0].set(int(state.pool.head)))


@corruption("paged_16", "free_blocks_know_their_places")
def a_free_block_that_does_not_know_its_place(state):
    return in_pool(state, marks=state.pool.marks.at[7, 0].add(1))


@corruption("paged_16", "free_ids_are_unique_blocks", "free_blocks_have_no_references")
def a_leaked_block(state):
    return in_pool(state, head=state.pool.head + 1)


@corruption("paged_16", "free_ids_are_unique_blocks", "free_and_used_are_all")
def a_count_of_free_blocks_that_is_off(state):
    return in_pool(state, num_free=state.pool.num_free - 1)


@corruption("paged_16", "references_are_table_entries")
def a_reference_that_no_table_has(state):
    return extra_references(state, 0, 1)


@corruption("paged_16", "free_blocks_were_not_shared")
def a_free_block_that_remembers_sharing(state):
    return extra_references(state, 9, 1)


@corruption("paged_16", "free_blocks_were_not_shared")
def a_block_with_less_than_no_reference(state):
    return extra_references(state, 0, -1)


@corruption("paged_16", "tables_cover_lengths", "references_are_table_entries")
def a_token_without_a_block(state):
    return in_table(state, 0, 1, 10)


@corruption("paged_16", "tables_hold_no_old_ids", "references_are_table_entries")
def an_old_id_in_a_free_row(state):
    return in_table(state, 2, 0, 5)


@corruption("paged_16", "tables_hold_no_old_ids")
def a_free_row_that_claims_columns(state):
    (table,) = state.tables
    return replace(state, tables=(replace(table, end=table.end.at[2].set(1)),))


@corruption("paged_16", "tables_hold_no_old_ids")
def a_row_that_begins_behind_its_end(state):
    (table,) = state.tables
    return replace(state, tables=(replace(table, first=table.first.at[0].set(3)),))


@corruption("paged_16", "no_block_twice_in_a_table", "references_are_table_entries")
def a_block_twice_in_a_table(state):
    return in_table(state, 0, 1, 0)


@corruption("paged_16", "shared_blocks_are_full_unless_forked")
def two_rows_in_one_half_full_block(state):
    return extra_references(in_table(state, 0, 1, 4), 4, 1)


@corruption("paged_16", "shared_blocks_hold_tokens")
def two_rows_in_one_block_that_neither_has_reached(state):
    (table,) = state.tables
    state = extra_references(in_table(state, 0, 2, 4), 4, 1)
    return replace(state, tables=(replace(state.tables[0], end=table.end.at[0].set(3)),))


@corruption("cached", "cached_blocks_are_marked")
def a_cached_block_that_nobody_knows_to_keep(state):
    return in_pool(state, marks=state.pool.marks.at[0, 2].set(0))


@corruption("cached", "references_are_table_entries")
def a_pin_that_holds_nothing(state):
    return replace(state, pins=state.pins.at[0].add(1))


@corruption("forked", "references_are_table_entries")
def a_copy_that_holds_nothing(state):
    return replace(state, copies=replace(state.copies, sources=state.copies.sources.at[0].set(0)))


@corruption("cached", "cached_blocks_are_listed_once", "entries_lead_to_their_blocks")
def a_cached_block_that_nobody_can_find(state):
    table = state.contents.table
    return in_contents(state, table=jnp.where(table == 1, 10, table))


@corruption("cached", "cached_blocks_are_listed_once", "uncached_blocks_have_no_record")
def a_listed_block_that_holds_nothing(state):
    return in_record(state, 0, 0, 0)


@corruption("cached", "cached_blocks_are_listed_once")
def a_block_in_two_entries(state):
    table = state.contents.table
    row, column = (int(i[0]) for i in jnp.nonzero(table[:, 8:] == 10))
    return in_contents(state, table=table.at[row, 8 + column].set(1))


@corruption("cached", "entries_lead_to_their_blocks")
def a_record_of_another_entry(state):
    return in_record(state, 1, 2, int(state.contents.records[0, 2]))


@corruption("cached", "no_entry_is_left_claimed")
def an_entry_that_is_no_block(state):
    table = state.contents.table
    row, column = (int(i[0]) for i in jnp.nonzero(table[:, 8:] == 10))
    return in_contents(state, table=table.at[row, 8 + column].set(-1))


@corruption("cached", "contents_are_younger_than_their_parents")
def a_content_that_continues_itself(state):
    return in_record(state, 1, 1, int(state.contents.records[1, 0]))


@corruption("cached", "contents_were_given_out")
def a_content_that_was_never_given_out(state):
    return in_contents(state, next_content=state.contents.records[1, 0])


@corruption("cached", "contents_were_given_out")
def a_row_that_continues_what_was_never_given_out(state):
    return in_chains(state, contents=state.chains.contents.at[0, 0].set(state.contents.next_content))


@corruption("cached", "uncached_blocks_have_no_record")
def an_empty_block_that_remembers_tokens(state):
    return in_record(state, 9, 7, 5)


@corruption("cached", "chains_cover_stored_tokens")
def a_chain_of_tokens_that_were_not_stored(state):
    return in_chains(state, hashed=state.chains.hashed + 1)


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
    counts = violations(memory_of(name), corrupt(sound(name)))
    named = {invariant for invariant, count in counts.items() if int(count) != 0}
    assert named >= broken
    assert all(int(count) >= 0 for count in counts.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_state_breaks_nothing(name):
    memory = memory_of(name)
    require_invariants(memory, sound(name))
    require_invariants(memory, memory.init())


def test_every_invariant_was_broken():
    known = {invariant for name in NAMES for invariant in violations(memory_of(name), memory_of(name).init())}
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
