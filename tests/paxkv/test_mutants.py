"""Wrong memories that the comparison with the oracles must notice: what it would let pass, it does not test.

Each mutant is a mistake that somebody made or could make. It replaces a function by one that makes the mistake.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from paxkv import block_pool, block_tables, contiguous, paged, reserved, seqs
from paxkv.contiguous import VAttention
from paxkv.memory import MapCalls
from paxkv.outcomes import Outcome, record
from paxkv.paged import Paged
from paxkv.reserved import Reserved
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, compile_operations, drive, operations

MUTANTS = []


def mutant(operation, *names):
    """Registers a function `apply(patch)` that breaks an operation of the named memories."""

    def register(apply):
        for name in names:
            MUTANTS.append(pytest.param(name, operation, apply, id=f"{apply.__name__}-{name}"))
        return apply

    return register


def replace(state, **changes):
    return dataclasses.replace(state, **changes)


def upside_down(state):
    """A vAttention state with its rows in the opposite order."""
    turned = replace(state.seqs, active=state.seqs.active[::-1], lengths=state.seqs.lengths[::-1])
    return replace(state, seqs=turned, mapped=state.mapped[::-1])


def turned_around(method):
    """A method of vAttention that goes through the rows the other way."""
    return lambda self, state: replace(upside_down(method(self, upside_down(state))), seqs=state.seqs)


# ---- paged -----------------------------------------------------------------------------------------------------


@mutant("append", "paged_3_watermark")
def rounds_blocks_down(patch):
    for module in (block_tables, paged):
        patch.setattr(module, "blocks_for", lambda tokens, size: tokens // size)


@mutant("append", "paged_3_watermark")
def takes_a_block_too_many_at_the_boundary(patch):
    for module in (block_tables, paged):
        patch.setattr(module, "blocks_for", lambda tokens, size: jnp.where(tokens > 0, tokens // size + 1, 0))


@mutant("release", "paged_3_watermark")
def leaves_the_table_of_a_released_row(patch):
    release = Paged.release
    patch.setattr(Paged, "release", lambda self, state, rows: replace(release(self, state, rows), tables=state.tables))


@mutant("release", "vattention_whole")
def masks_a_double_free(patch):
    def forgive(faults, outcome, bad):
        return faults if outcome == Outcome.DOUBLE_FREE else record(faults, outcome, bad)

    patch.setattr(seqs, "record", forgive)


def giving_back(change):
    """A `give_back` whose ids are changed before."""
    give_back = block_pool.give_back
    return lambda pool, ids, *of, **kw: give_back(pool, change(pool, ids), *of, **kw)


@mutant("release", "paged_3_watermark", "paged_3_fifo")
def gives_blocks_back_in_the_opposite_order(patch):
    patch.setattr(paged, "give_back", giving_back(lambda pool, ids: ids[::-1]))


@mutant("release", "paged_3_watermark", "paged_3_fifo")
def gives_blocks_back_at_the_other_end(patch):
    def turned(pool, ids, to_back=None, **kw):
        return give_back(pool, ids, jnp.ones(ids.shape, jnp.bool) if to_back is None else ~to_back, **kw)

    give_back = block_pool.give_back
    patch.setattr(paged, "give_back", turned)


@mutant("append", "paged_3_watermark", "paged_3_fifo")
def takes_from_the_other_end_of_the_queue(patch):
    take = block_pool.take

    def take_last(pool, wanted, ranking=None):
        where = jnp.arange(pool.queue.shape[0], dtype=jnp.int32)
        here = (where >= pool.head) & (where < pool.tail)
        rank = (
            jnp.zeros(pool.num_blocks, jnp.int32)
            .at[jnp.where(here, pool.queue, pool.num_blocks)]
            .set(-where, mode="drop")
        )
        return take(pool, wanted, rank)

    patch.setattr(paged, "take", take_last)


@mutant("release", "paged_3_watermark")
def leaks_the_last_block_of_a_row(patch):
    def all_but_one(pool, ids):
        return ids.at[jnp.sum(ids < pool.num_blocks) - 1].set(pool.num_blocks, mode="drop")

    patch.setattr(paged, "give_back", giving_back(all_but_one))


@mutant("append", "paged_3_watermark")
def stores_lengths_that_memory_could_not_serve(patch):
    advance = seqs.advance

    def advance_anyway(old, new_lengths, malformed, served):
        new, outcome = advance(old, new_lengths, malformed, served)
        return replace(new, lengths=new_lengths), outcome

    patch.setattr(paged, "advance", advance_anyway)


@mutant("append", "paged_3_watermark")
def serves_the_rows_it_can_when_the_pool_is_short(patch):
    grow = paged.grow

    def grow_some(memory, state, missing, copied):
        before = jnp.cumsum(missing[0]) - missing[0]
        affordable = jnp.clip(state.pool.num_free - before, 0, missing[0])
        grown = grow(memory, state, (affordable,), copied)
        return grown._replace(served=jnp.all(affordable == missing[0]))

    patch.setattr(paged, "grow", grow_some)


@mutant("admit", "paged_3_watermark")
def admits_to_the_highest_free_row(patch):
    def highest_free_row(state):
        turned, exists = seqs.lowest_free_row(replace(state, active=state.active[::-1]))
        return jnp.where(exists, state.active.shape[0] - 1 - turned, turned), exists

    for module in (paged, reserved):
        patch.setattr(module, "lowest_free_row", highest_free_row)


@mutant("admit", "paged_3_watermark", "vattention_whole")
def forgets_what_it_owes_to_rows_in_prefill(patch):
    for kind in (Paged, VAttention):

        def admit(self, state, ask, admit=kind.admit):
            careless, row, outcome = admit(
                self, replace(state, seqs=replace(state.seqs, promised=state.seqs.lengths)), ask
            )
            kept = jnp.where(jnp.arange(self.rows) == row, careless.seqs.promised, state.seqs.promised)
            return replace(careless, seqs=replace(careless.seqs, promised=kept)), row, outcome

        patch.setattr(kind, "admit", admit)


@mutant("admit", "paged_16", "vattention_whole", "reserved_pow2")
def makes_impossible_requests_wait(patch):
    for kind in (Paged, VAttention, Reserved):

        def admit(self, state, ask, admit=kind.admit):
            state, row, outcome = admit(self, state, ask)
            return state, row, jnp.where(outcome == Outcome.NEVER, jnp.int32(Outcome.LATER), outcome)

        patch.setattr(kind, "admit", admit)


@mutant("append", "vattention_whole")
def lets_free_rows_grow(patch):
    for module in (paged, contiguous, reserved):
        patch.setattr(
            module,
            "check_append",
            lambda state, new, most, chunk: (new < 0) | (new > chunk) | (state.lengths + new > most) & state.active,
        )


@mutant("append", "paged_16", "vattention_whole")
def lets_a_sequence_outgrow_its_longest_length(patch):
    for module in (paged, contiguous):
        check = module.check_append
        patch.setattr(
            module, "check_append", lambda state, new, most, chunk, check=check: check(state, new, most + 1, chunk)
        )


@mutant("observe", "paged_3_watermark")
def takes_negative_positions_from_the_end_of_the_table(patch):
    def slot_of(table, row, position, block_size, num_blocks):
        block = table.ids.at[row, position // block_size].get(mode="fill", fill_value=num_blocks)
        return jnp.where(block < num_blocks, block * block_size + position % block_size, num_blocks * block_size)

    patch.setattr(block_tables, "slot_of", slot_of)


# ---- vAttention ------------------------------------------------------------------------------------------------


@mutant("admit", "vattention_whole")
def starts_best_fit_with_the_first_idle_row(patch):
    def best_fit(state, need):
        best = jnp.argmin(state.seqs.active)
        for row in range(state.mapped.size):
            mapped = state.mapped[row]
            better = ~state.seqs.active[row] & (mapped >= need) & (mapped < state.mapped[best])
            best = jnp.where(better, row, best)
        return best.astype(jnp.int32)

    patch.setattr(contiguous, "_best_fit", best_fit)


@mutant("append", "vattention_straddling")
def rounds_groups_down(patch):
    patch.setattr(VAttention, "groups_for", lambda self, tokens: tokens * self.token_bytes // self.page_bytes)


@mutant("append", "vattention_straddling")
def counts_in_whole_tokens_of_a_page(patch):
    patch.setattr(
        VAttention,
        "groups_for",
        lambda self, tokens: block_tables.cdiv(tokens, self.page_bytes // self.token_bytes),
    )


@mutant("append", "vattention_far_ahead")
def reclaims_from_the_lowest_row(patch):
    original = VAttention._map

    def turned(self, state, groups, keep, *, background):
        return upside_down(original(self, upside_down(state), groups[::-1], keep[::-1], background=background))

    patch.setattr(VAttention, "_map", turned)


@mutant("append", "vattention_far_ahead")
def reclaims_no_more_than_it_is_short_of(patch):
    def frugal(self, state, groups, keep, *, background):
        short = jnp.sum(groups) + jnp.sum(state.mapped) - self.num_groups
        surplus = jnp.maximum(state.mapped - keep, 0)
        above = jnp.cumsum(surplus[::-1])[::-1] - surplus
        state = self._unmap(state, jnp.clip(short - above, 0, surplus))
        return original(self, state, groups, keep, background=background)

    original = VAttention._map
    patch.setattr(VAttention, "_map", frugal)


@mutant("admit", "vattention_whole")
def counts_only_unmapped_groups_as_available(patch):
    patch.setattr(VAttention, "available", lambda self, state: self.num_groups - jnp.sum(state.mapped))


@mutant("background", "vattention_far_ahead")
def maps_ahead_before_it_maps_what_is_next(patch):
    patch.setattr(VAttention, "background", lambda self, state: self._map_next(self._map_ahead(state)))


@mutant("background", "vattention_whole")
def maps_ahead_for_the_highest_row_first(patch):
    patch.setattr(VAttention, "_map_ahead", turned_around(VAttention._map_ahead))


@mutant("background", "vattention_far_ahead")
def serves_next_groups_in_the_opposite_order(patch):
    patch.setattr(VAttention, "_map_next", turned_around(VAttention._map_next))


@mutant("background", "vattention_far_ahead")
def looks_a_step_too_far_ahead(patch):
    original = VAttention._map_ahead
    patch.setattr(
        VAttention,
        "_map_ahead",
        lambda self, state: original(replace(self, lookahead_steps=self.lookahead_steps + 1), state),
    )


@mutant("background", "vattention_whole")
def maps_a_group_too_many_ahead(patch):
    original = VAttention._map_ahead
    patch.setattr(
        VAttention,
        "_map_ahead",
        lambda self, state: original(replace(self, background_groups=self.background_groups + 1), state),
    )


@mutant("release", "vattention_straddling", "vattention_whole")
def takes_deferred_reclaim_the_wrong_way(patch):
    original = VAttention.release
    patch.setattr(
        VAttention,
        "release",
        lambda self, state, rows: original(replace(self, deferred_reclaim=not self.deferred_reclaim), state, rows),
    )


@mutant("append", "vattention_far_ahead")
def forgets_to_count_unmap_calls(patch):
    patch.setattr(VAttention, "_unmap", lambda self, state, groups: replace(state, mapped=state.mapped - groups))


@mutant("observe", "vattention_whole")
def counts_groups_rather_than_calls(patch):
    def map_calls(self, state):
        calls = state.calls
        return MapCalls(*(n // self.buffers for n in (calls.sync, calls.background, calls.unmap)))

    patch.setattr(VAttention, "map_calls", map_calls)


@mutant("background", "vattention_whole")
def books_background_maps_as_sync(patch):
    original = VAttention._map
    patch.setattr(
        VAttention,
        "_map",
        lambda self, state, groups, keep, *, background: original(self, state, groups, keep, background=False),
    )


@mutant("observe", "vattention_whole")
def gives_slots_of_the_next_row(patch):
    def room(self, state):
        return state.mapped * self.page_bytes // self.token_bytes

    patch.setattr(VAttention, "room", room)


# ---- reserved --------------------------------------------------------------------------------------------------


def leafwise_best_fit(starts, orders, taken, order, num_leaves, usable, *, highest=False, merge=True, padding=False):
    """Best fit by looking at every leaf, with a mistake at choice."""
    leaf = jnp.arange(1 << (num_leaves - 1).bit_length())
    after = leaf[None, :] >= starts[:, None]
    inside = after & (leaf[None, :] < (starts + (1 << orders))[:, None]) & taken[:, None]
    free = ~jnp.any(inside, axis=0) & (padding | (leaf < usable))
    found, at = jnp.bool(False), jnp.int32(num_leaves)
    for k in range(leaf.size.bit_length()):
        blocks = jnp.all(free.reshape(-1, 1 << k), axis=1)
        if merge and blocks.size > 1:
            blocks = blocks & ~blocks.reshape(-1, 2)[:, ::-1].reshape(-1)
        index = blocks.size - 1 - jnp.argmax(blocks[::-1]) if highest else jnp.argmax(blocks)
        here = ~found & jnp.any(blocks) & (k >= order)
        at = jnp.where(here, (index << k).astype(jnp.int32), at)
        found = found | here
    return at, found


@mutant("admit", "reserved_whole_tree")
def takes_the_highest_address(patch):
    patch.setattr(reserved, "best_fit", lambda *a: leafwise_best_fit(*a, highest=True))


@mutant("admit", "reserved_pow2")
def does_not_merge_buddies(patch):
    patch.setattr(reserved, "best_fit", lambda *a: leafwise_best_fit(*a, merge=False))


@mutant("admit", "reserved_pow2")
def hands_out_the_padding_of_the_arena(patch):
    patch.setattr(reserved, "best_fit", lambda *a: leafwise_best_fit(*a, padding=True))


@mutant("admit", "reserved_oracle")
def rounds_the_block_down(patch):
    patch.setattr(reserved, "ceil_log2", lambda n: 31 - jax.lax.clz(jnp.maximum(n, 1)))


@mutant("admit", "reserved_pow2")
def rounds_prompt_and_output_together(patch):
    def reservation(self, ask):
        return jnp.minimum(1 << reserved.ceil_log2(ask.most_tokens), self.max_len)

    patch.setattr(Reserved, "reservation", reservation)


@mutant("admit", "reserved_oracle")
def reserves_only_what_is_known(patch):
    patch.setattr(Reserved, "reservation", lambda self, ask: ask.known_tokens)


@mutant("append", "reserved_pow2")
def grows_past_the_reservation(patch):
    check = reserved.check_append
    patch.setattr(reserved, "check_append", lambda state, new, size, chunk: check(state, new, size + 1, chunk))


@mutant("release", "reserved_pow2")
def keeps_the_range_of_a_released_row(patch):
    patch.setattr(Reserved, "release", lambda self, state, rows: replace(state, seqs=seqs.vacate(state.seqs, rows)[0]))


@mutant("observe", "reserved_oracle")
def leaves_rounding_out_of_what_is_taken(patch):
    patch.setattr(Reserved, "request_slots", lambda self, state: (state.sizes, state.sizes))


# ---- all -------------------------------------------------------------------------------------------------------


@mutant("observe", "vattention_whole")
def reports_slots_as_reserved_that_will_never_be_filled(patch):
    usage = VAttention.usage

    def all_reserved(self, state, final_lengths):
        used = usage(self, state, final_lengths)
        return replace(used, reserved=used.reserved + used.internal, internal=jnp.zeros_like(used.internal))

    patch.setattr(VAttention, "usage", all_reserved)


def is_noticed(memory, compiled, seeds: int) -> bool:
    for seed in range(seeds):
        try:
            drive(Lockstep(memory, compiled), seed, steps=100)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("name", "operation", "apply"), MUTANTS)
def test_mutant_is_noticed(name, operation, apply, monkeypatch):
    memory = MEMORIES[name]
    right = operations(memory)
    apply(monkeypatch)
    assert is_noticed(memory, {**right, **compile_operations(memory, [operation])}, seeds=10)


@pytest.mark.parametrize("name", ["paged_3_watermark", "vattention_far_ahead", "reserved_pow2"])
def test_the_right_memory_is_not(name):
    assert not is_noticed(MEMORIES[name], operations(MEMORIES[name]), seeds=3)
