"""Wrong block managers that the comparison with the oracle must notice: what it would let pass, it does not test.

Each mutant is a mistake that somebody made or could make. It replaces a function by one that makes the mistake, while
one operation is compiled.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import pytest

from paxkv import admission, block_pool, chains, lifecycle, paged, prefix_cache, publishing, sharing
from paxkv.paged import Paged
from paxkv.windows import Group
from tests.paxkv.oracles.blocks import Prompt
from tests.paxkv.oracles.jitted import operations
from tests.paxkv.oracles.twins import MEMORIES, Twins, drive

pytestmark = pytest.mark.soak

MUTANTS = []
replace = dataclasses.replace


def mutant(operation, name):
    """Registers a function `apply(patch)` that breaks an operation of the named memory."""

    def register(apply):
        MUTANTS.append(pytest.param(name, operation, apply, id=apply.__name__))
        return apply

    return register


# ---- admission -------------------------------------------------------------------------------------------------


def looks_up_otherwise(patch, change):
    """Changes the answer of the lookup."""
    look_up = paged.look_up
    patch.setattr(paged, "look_up", lambda *arguments: change(look_up(*arguments)))


@mutant("admit", "lru")
def hits_the_block_of_the_last_token(patch):
    look_up = paged.look_up
    patch.setattr(paged, "look_up", lambda memory, state, content, known: look_up(memory, state, content, known + 1))


@mutant("admit", "lru")
def charges_nothing_for_hits_that_leave_the_queue(patch):
    looks_up_otherwise(patch, lambda hit: hit._replace(free=jnp.int32(0)))


@mutant("admit", "lru")
def does_not_refer_to_what_it_hits(patch):
    patch.setattr(admission, "retain", lambda pool, ids, **options: pool)


@mutant("admit", "lru")
def believes_the_key_without_its_parent(patch):
    find = prefix_cache.find

    def find_anything(*arguments):
        found, limit = find(*arguments), arguments[-1]
        position = jnp.arange(found.present.shape[0], dtype=jnp.int32)
        hits = jnp.min(jnp.where(found.present, limit, position), initial=limit)
        return found._replace(linked=found.present, hits=jnp.minimum(hits, limit))

    patch.setattr(prefix_cache, "find", find_anything)


def forgets_in_the_identity(patch, part):
    """Takes what must agree without one of its parts."""
    identity_of, seed = admission.identity_of, admission.seed
    patch.setattr(admission, "identity_of", lambda *arguments: identity_of(*arguments).at[part].set(0))

    def seed_without(*parts):
        return seed(*(jnp.int32(0) if i == part else value for i, value in enumerate(parts)))

    patch.setattr(admission, "seed", seed_without)


@mutant("admit", "lru")
def shares_what_another_adapter_computed(patch):
    forgets_in_the_identity(patch, 0)


@mutant("admit", "lru")
def shares_what_another_salt_keeps_apart(patch):
    forgets_in_the_identity(patch, 1)


@mutant("admit", "lru")
def hits_what_old_weights_computed(patch):
    forgets_in_the_identity(patch, 2)


@mutant("admit", "lfu, colliding keys, lookahead")
def does_not_count_a_hit_as_a_use(patch):
    patch.setattr(prefix_cache, "touch", lambda config, contents, *rest: contents)


@mutant("admit", "lfu, colliding keys, lookahead")
def leaves_room_for_lookahead_out_of_what_it_owes(patch):
    original = Paged.most_held
    patch.setattr(Paged, "most_held", lambda self, *rest: original(replace(self, lookahead=0), *rest))


@mutant("admit", "lru")
def counts_those_that_come_back_as_new(patch):
    count = admission.count_admission

    def count_as_new(stats, tokens, hit, resumed, *rest, **options):
        return count(stats, tokens, hit, jnp.zeros_like(resumed), *rest, **options)

    patch.setattr(admission, "count_admission", count_as_new)


@mutant("admit", "groups")
def hits_as_much_as_the_first_group_has(patch):
    patch.setattr(admission, "_longest", lambda memory, found, most: found[0].hits * memory.layer_groups[0].block_size)


# ---- growth and release ----------------------------------------------------------------------------------------


def writes_otherwise(patch, change):
    """Changes who copies and who keeps."""
    tail_writes = sharing.tail_writes
    patch.setattr(sharing, "tail_writes", lambda *arguments: change(tail_writes(*arguments)))


@mutant("append", "lru")
def writes_into_shared_blocks(patch):
    writes_otherwise(patch, lambda writes: writes._replace(copies=jnp.zeros_like(writes.copies)))


@mutant("append", "no cache")
def lets_no_sharer_keep_the_block(patch):
    def change(writes):
        block = writes.blocks
        shared = jnp.sum(block[:, None] == block[None, :], axis=1) > 1
        none = MEMORIES["no cache"].num_blocks
        return writes._replace(copies=writes.copies | (shared & (block != none)))

    writes_otherwise(patch, change)


@mutant("append", "no cache")
def lets_go_of_a_copy_before_it_ran(patch):
    hold = sharing.hold
    patch.setattr(sharing, "hold", lambda pool, pairs: (pool, hold(pool, pairs)[1]))


@mutant("append", "lru")
def keeps_the_content_of_a_block_that_is_written(patch):
    original = Paged._forget

    def forget(self, state, ids, any_cached, counts=1):
        return original(self, state, ids, any_cached, counts) if counts else state

    patch.setattr(Paged, "_forget", forget)


@mutant("append", "lru")
def takes_cached_blocks_and_leaves_them_in_the_table(patch):
    original = Paged._forget

    def forget(self, state, ids, any_cached, counts=1):
        return state if counts else original(self, state, ids, any_cached, counts)

    patch.setattr(Paged, "_forget", forget)


@mutant("append", "fifo")
def evicts_the_content_that_was_published_last(patch):
    ranking = prefix_cache.ranking

    def turned(config, contents):
        ranks = ranking(config, contents)
        return jnp.where(ranks == -(2**31), ranks, -ranks)

    patch.setattr(prefix_cache, "ranking", turned)


@mutant("append", "priority, merging")
def evicts_without_looking_at_priorities(patch):
    patch.setattr(prefix_cache, "ranking", lambda config, contents: None)


def gives_back_otherwise(patch, change):
    """Changes the blocks that are given back."""
    give_back = Paged.give_back
    patch.setattr(Paged, "give_back", lambda self, pool, ids, **options: give_back(self, pool, change(ids), **options))


def gives_nothing_back(patch):
    patch.setattr(Paged, "give_back", lambda self, pool, ids, **options: (pool, jnp.bool(True)))


@mutant("release", "lru")
def gives_cached_blocks_back_to_the_front(patch):
    patch.setattr(Paged, "give_back", lambda self, pool, ids, **options: block_pool.give_back(pool, ids, **options))


@mutant("release", "fifo")
def gives_blocks_back_in_the_opposite_order(patch):
    gives_back_otherwise(patch, lambda ids: ids[::-1])


@mutant("release", "lru")
def remembers_what_a_released_row_had_published(patch):
    patch.setattr(chains, "clear_chains", lambda chain, rows: chain)


@mutant("background", "groups")
def lets_a_block_go_a_token_too_early(patch):
    out_of_view = Group.out_of_view
    patch.setattr(Group, "out_of_view", lambda self, stored: out_of_view(self, stored + 1))


@mutant("background", "groups")
def keeps_what_is_out_of_view_a_token_too_long(patch):
    out_of_view = Group.out_of_view
    patch.setattr(Group, "out_of_view", lambda self, stored: out_of_view(self, jnp.maximum(stored - 1, 0)))


# ---- publishing ------------------------------------------------------------------------------------------------


@mutant("publish", "lru")
def publishes_without_parents(patch):
    filled_rows = chains.filled_rows

    def rootless(*arguments):
        filled = filled_rows(*arguments)
        return filled._replace(parents=jnp.zeros_like(filled.parents))

    patch.setattr(chains, "filled_rows", rootless)


@mutant("publish_one", "lru")
def counts_positions_from_one(patch):
    terms = chains.terms
    patch.setattr(chains, "terms", lambda tokens, positions: terms(tokens, positions + 1))


@mutant("publish", "priority, merging")
def merges_without_referring(patch):
    patch.setattr(publishing, "retain", lambda pool, ids, **options: pool)


@mutant("publish", "priority, merging")
def keeps_the_block_that_was_merged(patch):
    gives_nothing_back(patch)


@mutant("publish", "priority, merging")
def merges_and_leaves_the_table_as_it_was(patch):
    merge = publishing._merge
    patch.setattr(publishing, "_merge", lambda memory, table, *rest: (table, merge(memory, table, *rest)[1]))


@mutant("publish", "lru")
def publishes_the_same_as_another_content(patch):
    publish = prefix_cache.publish

    def publish_anew(config, contents, filled, width):
        return publish(config, contents, filled._replace(identities=filled.identities + 1), width)

    patch.setattr(prefix_cache, "publish", publish_anew)


# ---- between steps ---------------------------------------------------------------------------------------------


@mutant("fork", "no cache")
def forks_without_referring(patch):
    patch.setattr(lifecycle, "retain", lambda pool, ids, **options: pool)


@mutant("fork", "no cache")
def shares_a_block_too_few(patch):
    patch.setattr(lifecycle, "blocks_for", lambda tokens, size: tokens // size)


@mutant("reorder", "no cache")
def leaks_the_blocks_of_a_beam_that_dies(patch):
    gives_nothing_back(patch)


@mutant("evict", "lru")
def leaves_what_it_forgot_in_the_hash_table(patch):
    patch.setattr(prefix_cache.hash_table, "clear", lambda table, *rest: table)


@mutant("pin", "lru")
def does_not_hold_what_it_pins(patch):
    patch.setattr(lifecycle, "retain", lambda pool, ids, **options: pool)


@mutant("reset", "lru")
def resets_while_sequences_run(patch):
    reset_cache = lifecycle.reset_cache

    def reset_anyway(memory, state):
        idle, outcome = reset_cache(
            memory,
            replace(
                state,
                seqs=replace(state.seqs, active=jnp.zeros_like(state.seqs.active)),
                pool=replace(state.pool, num_free=jnp.int32(memory.num_blocks)),
            ),
        )
        return replace(idle, seqs=state.seqs, pool=state.pool), outcome

    patch.setattr(lifecycle, "reset_cache", reset_anyway)


@mutant("copied", "no cache")
def keeps_holding_the_sources_of_copies(patch):
    none = MEMORIES["no cache"].num_blocks
    gives_back_otherwise(patch, lambda ids: ids.at[: ids.shape[0] // 2].set(none))


@mutant("evict", "lru")
def thinks_that_what_it_forgot_is_worth_keeping(patch):
    patch.setattr(lifecycle, "mark_kept", lambda pool, ids, *, kept: pool)


@mutant("publish", "lru")
def thinks_that_what_it_published_is_worth_nothing(patch):
    patch.setattr(publishing, "mark_kept", lambda pool, ids, *, kept: pool)


class Mutated:
    """The right operations but for one."""

    def __init__(self, right: Any, name: str, wrong: Any):
        self.right, self.name, self.wrong = right, name, wrong

    def __call__(self, name: str, *arguments: Any) -> Any:
        return self.wrong(*arguments) if name == self.name else self.right(name, *arguments)


@functools.cache
def examples(name: str, operation: str) -> tuple:
    """Arguments of an operation, from a run of the right memory, which must not be noticed."""
    memory, seed = MEMORIES[name], 0
    while operation not in operations(memory).examples:
        drive(Twins(memory), seed, steps=60)
        seed += 1
    return operations(memory).examples[operation]


def store(twins: Twins, length: int) -> int:
    """Admits, computes and publishes the first tokens of a text; returns the row."""
    text = tuple(range(length))
    row, _ = twins.admit(Prompt(text))
    new = text[twins.plain.length(row) :]
    twins.append([len(new) if r == row else 0 for r in range(twins.memory.rows)])
    twins.publish([list(new) if r == row else [] for r in range(twins.memory.rows)])
    return row


def leave_orphans(twins: Twins) -> None:
    """A block is lost, and published anew from the same tokens; those that continued it stay out of reach."""
    size = twins.memory.block_size
    row = store(twins, 3 * size)
    first = twins.plain.table(row, 0)[0]
    twins.both("release", [r == row for r in range(twins.memory.rows)])
    twins.both("evict", [first])
    store(twins, size + 1)
    twins.admit(Prompt(tuple(range(3 * size))))


def is_noticed(memory: Paged, compiled: Mutated) -> bool:
    runs = [functools.partial(drive, seed=seed, steps=100) for seed in range(20)]
    for run in [leave_orphans, *runs] if memory.cache else runs:
        try:
            run(Twins(memory, compiled))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("name", "operation", "apply"), MUTANTS)
def test_mutant_is_noticed(name, operation, apply, monkeypatch):
    arguments = examples(name, operation)
    right = operations(MEMORIES[name])
    with monkeypatch.context() as patch:
        apply(patch)
        wrong = right.compile(operation, arguments)
    assert is_noticed(MEMORIES[name], Mutated(right, operation, wrong))
