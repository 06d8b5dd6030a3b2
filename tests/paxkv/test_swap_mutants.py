"""Mistakes in swapping, each of which the oracle notices."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from paxkv import block_pool, checks, swap, swap_state
from paxkv.paged import Paged
from tests.paxkv.oracles.swap_server import MEMORIES, TIGHT, operations, play_tight
from tests.paxkv.oracles.swapping import SwapOperations, SwapTwins, drive_swaps

pytestmark = pytest.mark.soak

MUTANTS = []


def mutant(name: str, *mutated: str):
    """Registers a patch of code, the memory that it is tried on, and the operations in which that code runs."""

    def register(apply):
        MUTANTS.append(pytest.param(name, mutated, apply, id=apply.__name__))
        return apply

    return register


@mutant("shared", "swap_out")
def copies_what_is_on_the_host_already(patch):
    patch.setattr(swap, "twins_on_host", lambda state, ids: jnp.full_like(ids, state.device_twins.shape[0]))


@mutant("shared", "append", "append_one", "swap_in")
def forgets_that_a_taken_block_is_written(patch):
    patch.setattr(swap_state, "part_twins", lambda state, ids: state)


@mutant("plain", "append", "append_one")
def forgets_that_a_last_block_is_written(patch):
    patch.setattr(swap_state, "part_written", lambda state, *of: state)


@mutant("plain", "append", "append_one")
def looks_for_the_written_block_where_the_row_ends(patch):
    right = swap_state.part_written
    patch.setattr(swap_state, "part_written", lambda s, g, t, lengths, grows: right(s, g, t, lengths + 1, grows))


@mutant("shared", "swap_in")
def trusts_a_name_that_is_not_returned(patch):
    def one_sided(state, ids):
        return state.device_twins.at[ids].get(mode="fill", fill_value=state.host_twins.shape[0])

    patch.setattr(swap, "twins_on_device", one_sided)


@mutant("shared", "swap_in")
def relies_on_free_blocks_that_are_not_cached(patch):
    patch.setattr(swap, "is_free", lambda pool, ids: jnp.zeros(ids.shape, jnp.bool))


@mutant("shared", "swap_in")
def copies_back_what_is_cached(patch):
    patch.setattr(swap, "prefix_cache", types.SimpleNamespace(content_of=lambda contents, ids: jnp.zeros_like(ids)))


@mutant("shared", "swap_in")
def takes_cached_blocks_without_a_reference(patch):
    patch.setattr(swap, "retain", lambda pool, ids, *, distinct: pool)


@mutant("shared", "swap_in", "discard")
def keeps_the_host_blocks_of_who_left(patch):
    patch.setattr(swap, "give_back", lambda pool, ids, to_back, *, distinct: (pool, jnp.bool(True)))


@mutant("shared", "swap_in", "discard")
def writes_over_the_newest_copy_first(patch):
    right = block_pool.give_back
    patch.setattr(swap, "give_back", lambda pool, ids, to_back, *, distinct: right(pool, ids, None, distinct=distinct))


@mutant("plain", "swap_out")
def swaps_blocks_that_hold_nothing_yet(patch):
    right = swap.blocks_for
    patch.setattr(swap, "blocks_for", lambda tokens, size: right(tokens, size) + 1)


@mutant("tight", "swap_out")
def counts_a_shared_block_for_each_of_its_rows(patch):
    right = swap._count_blocks

    def one_by_one(memory, state, swap_now, rows):
        each = [right(memory, state, swap_now, rows & (jnp.arange(memory.rows) == row)) for row in range(memory.rows)]
        return sum(blocks for blocks, _ in each), sum(fresh for _, fresh in each)

    patch.setattr(swap, "_count_blocks", one_by_one)


@mutant("tight", "swap_out")
def counts_free_copies_as_if_they_took_no_room(patch):
    patch.setattr(swap, "is_free", lambda pool, ids: jnp.zeros(ids.shape, jnp.bool))


@mutant("shared", "swap_out")
def keeps_the_rows_of_who_left(patch):
    patch.setattr(Paged, "release", lambda self, state, rows: state)


@mutant("plain", "swap_in")
def ignores_what_was_promised_to_others(patch):
    patch.setattr(Paged, "owed", lambda self, state: jnp.int32(0))


@mutant("plain", "swap_in")
def asks_for_no_room_beyond_what_is_stored(patch):
    patch.setattr(Paged, "most_held", lambda self, tokens, first: jnp.zeros_like(first))


@mutant("plain", "swap_in")
def uses_the_watermark_up(patch):
    right = swap.swap_in
    patch.setattr(swap, "swap_in", lambda memory, *of: right(dataclasses.replace(memory, watermark_blocks=0), *of))


@mutant("shared", "swap_out")
def parks_without_the_chain(patch):
    right = swap.swap_out

    def unchained(memory, state, rows):
        state, *rest = right(memory, state, rows)
        bare = dataclasses.replace(state.swap, chains=jax.tree.map(jnp.zeros_like, state.swap.chains))
        return dataclasses.replace(state, swap=bare), *rest

    patch.setattr(swap, "swap_out", unchained)


@mutant("two groups", "swap_out")
def forgets_where_the_window_begins(patch):
    right = swap.begin_row
    patch.setattr(swap, "begin_row", lambda table, row, ids, first, *of: right(table, row, ids, 0 * first, *of))


@mutant("two groups", "swap_in")
def gives_the_second_group_the_blocks_of_the_first(patch):
    right = swap._by_group
    patch.setattr(swap, "_by_group", lambda tables, entries: [right(tables, entries)[0]] * len(tables))


@pytest.mark.parametrize(("name", "mutated", "apply"), MUTANTS)
def test_mutant_is_noticed(name, mutated, apply, monkeypatch):
    memory, play = (TIGHT, play_tight) if name == "tight" else (MEMORIES[name], drive_for_long)
    compiled = SwapOperations(memory)
    compiled.compiled = {op: run for op, run in operations(memory).compiled.items() if op not in mutated}
    apply(monkeypatch)
    with pytest.raises((AssertionError, checks.InvariantError)):
        play(memory, compiled)


def drive_for_long(memory: Paged, compiled: SwapOperations) -> None:
    for seed in range(10):
        drive_swaps(SwapTwins(memory, compiled), seed, steps=100)
