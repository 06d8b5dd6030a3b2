"""What no caller should do to a block manager. All of it must be told, and change nothing."""

import dataclasses

import jax.numpy as jnp

from experiments.fuzz_draw import below, rarely, spread
from experiments.fuzz_operations import MOST, Done, Words, done, fork_at, pins, room, unpublished
from experiments.fuzz_world import World, same
from paxkv import lifecycle
from paxkv.block_pool import give_back
from paxkv.outcomes import Outcome
from paxkv.paged import Paged


def release_twice(memory: Paged, world: World, words: Words) -> Done:
    """Rows that nobody has are released."""
    rows = ~world.state.seqs.active & rarely(spread(words[0], memory.rows), 2)
    outcome = jnp.where(jnp.any(rows), jnp.int32(Outcome.DOUBLE_FREE), jnp.int32(Outcome.OK))
    return done(world, memory.release(world.state, rows), outcome, outcome)


def append_out_of_range(memory: Paged, world: World, words: Words) -> Done:
    """A row stores fewer tokens than none, more than announced, more than any row may have, or does not exist."""
    row = below(words[0], memory.rows)
    wrong = jnp.array([-1, MOST + 1, -(2**31), 2**31 - 1], jnp.int32)[below(words[1], 4)]
    wrong = jnp.where(world.state.seqs.active[row], wrong, 1)
    others = jnp.minimum(room(memory, world, MOST), below(spread(words[2], memory.rows), 2))
    state, outcome = memory.append(world.state, others.at[row].set(wrong), MOST)
    return done(world, state, outcome, Outcome.OUT_OF_RANGE, met=(outcome == Outcome.OUT_OF_RANGE,))


def fork_out_of_range(memory: Paged, world: World, words: Words) -> Done:
    """A row that does not exist is forked, or one at a length that it does not have."""
    row = below(words[0], memory.rows)
    longer = world.state.seqs.lengths[row] + 1
    zero = jnp.int32(0)
    parents = jnp.stack([jnp.int32(-1), jnp.int32(memory.rows), jnp.int32(2**31 - 1), row, row])
    lengths = jnp.stack([zero, zero, zero, jnp.int32(-1), longer])
    kind = below(words[1], 5)
    made = fork_at(memory, world, words[2:], parents[kind], lengths[kind])
    return made.expect(made.outcome == Outcome.OUT_OF_RANGE)


def reorder_out_of_range(memory: Paged, world: World, words: Words) -> Done:
    """A row takes over one that does not exist."""
    row = jnp.arange(memory.rows, dtype=jnp.int32)
    missing = jnp.array([-1, memory.rows, 2**31 - 1, -(2**31)], jnp.int32)[below(words[1], 4)]
    state = lifecycle.reorder(memory, world.state, row.at[below(words[0], memory.rows)].set(missing))
    return done(world, state, Outcome.OUT_OF_RANGE, Outcome.OUT_OF_RANGE)


def publish_too_much(memory: Paged, world: World, words: Words) -> Done:
    """A row publishes a token more than it has stored."""
    row = below(words[0], memory.rows)
    counts = jnp.zeros(memory.rows, jnp.int32).at[row].set(unpublished(world)[row] + 1)
    cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    state = memory.publish(world.state, jnp.zeros(memory.rows * MOST, jnp.int32), cu_lens, MOST)
    return done(world, state, Outcome.OUT_OF_RANGE, Outcome.OUT_OF_RANGE)


def pin_out_of_range(memory: Paged, world: World, words: Words) -> Done:
    """A block that the pool does not have is pinned beside one that it has; and unpinned."""
    good = below(words[0], memory.num_blocks)
    bad = jnp.where(rarely(words[1], 2), -1, memory.num_blocks + 1 + below(words[2], 3))
    state, outcome = lifecycle.pin(memory, world.state, jnp.stack([good, bad]))
    unpinned, other = lifecycle.unpin(memory, world.state, jnp.stack([bad, good]))
    refused = (outcome == Outcome.OUT_OF_RANGE, other == Outcome.DOUBLE_FREE, same(unpinned, world.state))
    return done(world, state, outcome, met=refused)


def unpin_twice(memory: Paged, world: World, words: Words) -> Done:
    """A block is unpinned once more than it was pinned."""
    block = below(words[0], memory.num_blocks)
    place = jnp.arange(memory.num_blocks, dtype=jnp.int32)
    ids = jnp.where(place <= pins(world)[block], block, memory.num_blocks)
    state, outcome = lifecycle.unpin(memory, world.state, ids)
    return done(world, state, outcome, met=(outcome == Outcome.DOUBLE_FREE,))


def give_back_twice(memory: Paged, world: World, words: Words) -> Done:
    """A block is given back to the pool once more than it has references, or one that the pool does not have."""
    none, pool = memory.num_blocks, world.state.pool
    block = below(words[0], none)
    place = jnp.arange(2 * (memory.rows + none), dtype=jnp.int32)
    foreign = jnp.where(rarely(words[1], 2), -1, none + 1)
    ids = jnp.where(place <= pool.ref_counts[block], block, none)
    ids = jnp.where(rarely(words[2], 4) & (place == 0), foreign, ids)
    to_back = rarely(spread(words[3], place.shape[0]), 2)
    pool, ok = give_back(pool, ids, to_back)
    return done(world, dataclasses.replace(world.state, pool=pool), Outcome.DOUBLE_FREE, met=(~ok,))
