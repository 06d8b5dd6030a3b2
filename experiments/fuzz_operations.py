"""Random operations on a block manager, each as a caller would do it.

An operation is a pure function of the world and of some random words. It says what the memory answered, which faults
it must have recorded, and whether its own expectations were met.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from experiments.fuzz_draw import below, draw_content, draw_tokens, rarely, spread
from experiments.fuzz_world import Texts, World, begin_row, move_in, move_out, store, useful
from paxkv import lifecycle, swap
from paxkv.memory import Ask
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.paged_state import PagedState
from paxkv.swap_state import SwapState

MOST = 6
"""Most tokens that a row stores or publishes in one operation."""


class Done(NamedTuple):
    """What came of an operation."""

    before: World  # what the memory was asked in, once all was prepared
    after: World
    outcome: Int32[Array, ""]
    faults: Int32[Array, ""]  # the fault word that must have been recorded
    unmet: Int32[Array, ""]  # expectations

    def expect(self, holds: Bool[Array, ""]) -> "Done":
        """The same with one expectation more."""
        return self._replace(unmet=self.unmet + (~holds).astype(jnp.int32))


Words = UInt32[Array, " words"]
Operation = Callable[[Paged, World, Words], Done]


def done(
    before: World,
    after: World | PagedState,
    outcome: Int32[Array, ""] | Outcome = Outcome.OK,
    faults: Int32[Array, ""] | Outcome = Outcome.OK,
    met: tuple[Bool[Array, ""], ...] = (),
) -> Done:
    """An operation that led to `after`, and recorded `faults`."""
    if isinstance(after, PagedState):
        after = dataclasses.replace(before, state=after)
    bit = jnp.where(jnp.asarray(faults) == Outcome.OK, 0, jnp.left_shift(1, jnp.asarray(faults, jnp.int32)))
    unmet = jnp.sum(~jnp.stack([*met, jnp.bool(True)]), dtype=jnp.int32)
    return Done(before, after, jnp.asarray(outcome, jnp.int32), bit.astype(jnp.int32), unmet)


def admit(memory: Paged, world: World, words: Words) -> Done:
    """A request of any length, now and then one that can never fit."""
    tokens = draw_tokens(words[:3], memory.max_len)
    content = draw_content(tokens, words[3])
    known = 1 + below(words[4], memory.max_len)
    final = known + below(words[5], 8) + jnp.where(rarely(words[6], 16), memory.max_len, 0)
    state, row, outcome = memory.admit(
        world.state, Ask(known, known, final, content if memory.cache is not None else None)
    )
    after = begin_row(world, state, row, tokens, jnp.stack([content.adapter, content.salt, state.epoch]))
    hit = state.seqs.lengths.at[row].get(mode="fill", fill_value=0)
    return done(
        world,
        after,
        outcome,
        met=(
            (row < memory.rows) == (outcome == Outcome.OK),
            hit % memory.alignment == 0,
            hit <= jnp.where(content.lookup, known - 1, 0),
            (outcome == Outcome.NEVER) | (final <= memory.max_len),
        ),
    )


def decode(memory: Paged, world: World, words: Words) -> Done:
    """Most rows store a token."""
    counts = 1 - rarely(spread(words[0], memory.rows), 4).astype(jnp.int32)
    return _append(memory, end_copies(memory, world), jnp.minimum(counts, room(memory, world, 1)), 1)


def chunk(memory: Paged, world: World, words: Words) -> Done:
    """Some rows store a few tokens; now and then while copies are still pending, which is refused."""
    counts = jnp.where(rarely(spread(words[0], memory.rows), 2), 0, below(spread(words[1], memory.rows), MOST + 1))
    early = rarely(words[2], 8)
    world = jax.tree.map(lambda as_is, ended: jnp.where(early, as_is, ended), world, end_copies(memory, world))
    return _append(memory, world, jnp.minimum(counts, room(memory, world, MOST)), MOST)


def _append(memory: Paged, world: World, counts: Int32[Array, " rows"], most: int) -> Done:
    lengths = world.state.seqs.lengths
    short = jnp.sum(memory.demand(world.state, lengths + counts)) > memory.available(world.state)
    expected = jnp.where(short, jnp.int32(Outcome.OUT_OF_BLOCKS), jnp.int32(Outcome.OK))
    expected = jnp.where(jnp.any((counts != 0) & waits(memory, world)), jnp.int32(Outcome.OUT_OF_RANGE), expected)
    state, outcome = memory.append(world.state, counts, most)
    grown = jnp.where(outcome == Outcome.OK, counts, 0)
    return done(
        world,
        store(memory, world, state, most),
        outcome,
        expected,
        met=(outcome == expected, jnp.all(state.seqs.lengths == lengths + grown)),
    )


def waits(memory: Paged, world: World) -> Bool[Array, " rows"]:
    """Rows that wait for a copy, if every row has the same places in the list for every group."""
    copies = world.state.copies
    if copies is None:
        return jnp.zeros(memory.rows, jnp.bool)
    return jnp.any(copies.destinations.reshape(-1, memory.rows) != memory.num_blocks, axis=0)


def end_copies(memory: Paged, world: World) -> World:
    """The data of the pending copies was copied, in the operation that listed them."""
    if world.state.copies is None:
        return world
    return dataclasses.replace(world, state=lifecycle.end_copies(memory, world.state))


def room(memory: Paged, world: World, most: int) -> Int32[Array, " rows"]:
    """Tokens that each row can still store, if memory has blocks for them."""
    seqs = world.state.seqs
    return jnp.where(seqs.active, jnp.minimum(memory.max_len - seqs.lengths, most), 0)


def unpublished(world: World) -> Int32[Array, " rows"]:
    """Tokens that each row has stored and not published."""
    chains = world.state.chains
    lengths = world.state.seqs.lengths
    return jnp.zeros_like(lengths) if chains is None else lengths - chains.hashed


def publish_one(memory: Paged, world: World, words: Words) -> Done:
    """Each row publishes a token, if it has one."""
    del words
    return _publish(memory, world, jnp.minimum(unpublished(world), 1), 1)


def publish(memory: Paged, world: World, words: Words) -> Done:
    """Rows publish what they have, or some of it."""
    counts = jnp.minimum(unpublished(world), MOST)
    some = jnp.minimum(counts, below(spread(words[0], memory.rows), MOST + 1))
    return _publish(memory, world, jnp.where(rarely(words[1], 4), some, counts), MOST)


def _publish(memory: Paged, world: World, counts: Int32[Array, " rows"], most: int) -> Done:
    cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    flat = jnp.arange(memory.rows * most, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(cu_lens, flat, side="right").astype(jnp.int32) - 1, 0, memory.rows - 1)
    hashed = world.state.seqs.lengths - unpublished(world)
    tokens = world.texts.tokens.at[row, hashed[row] + flat - cu_lens[row]].get(mode="fill", fill_value=0)
    state = memory.publish(world.state, tokens, cu_lens, most)
    left = unpublished(dataclasses.replace(world, state=state))
    return done(world, state, met=(jnp.all(left == unpublished(world) - counts),))


def release(memory: Paged, world: World, words: Words) -> Done:
    """One row ends, or several."""
    row = jnp.arange(memory.rows, dtype=jnp.int32)
    several = rarely(words[1], 4) & rarely(spread(words[2], memory.rows), 2)
    rows = world.state.seqs.active & ((row == below(words[0], memory.rows)) | several)
    state = memory.release(world.state, rows)
    return done(world, state, met=(jnp.all(state.seqs.active == (world.state.seqs.active & ~rows)),))


def fork(memory: Paged, world: World, words: Words) -> Done:
    """A row is forked at the length it has published, or at a shorter one that may have left its windows."""
    seqs = world.state.seqs
    parent = below(words[0], memory.rows)
    held = seqs.lengths[parent] - unpublished(world)[parent]
    length = jnp.where(rarely(words[1], 2), held, below(words[2], held + 1))
    made = fork_at(memory, world, words[3:], parent, length)
    possible = seqs.active[parent] & jnp.bool(all(group.sees_all for group in memory.layer_groups))
    return made.expect(~possible | (made.outcome != Outcome.OUT_OF_RANGE))


def fork_at(memory: Paged, world: World, words: Words, parent: Int32[Array, ""], length: Int32[Array, ""]) -> Done:
    """Forks that row at that length, to go on otherwise."""
    position = jnp.arange(memory.max_len, dtype=jnp.int32)
    inherited = world.texts.tokens.at[parent].get(mode="fill", fill_value=0)
    tokens = jnp.where(position < length, inherited, draw_tokens(words[:3], memory.max_len))
    identity, content = jnp.zeros(3, jnp.int32), None
    if world.state.chains is not None:
        identity = world.state.chains.identities.at[parent].get(mode="fill", fill_value=0)
        content = draw_content(tokens, words[3])._replace(adapter=identity[0], salt=identity[1])
    promised = jnp.minimum(length + below(words[4], 4), memory.max_len)
    state, row, outcome = lifecycle.fork(memory, world.state, parent, length, promised, content)
    after = begin_row(world, state, row, tokens, identity)
    fault = jnp.where(outcome == Outcome.LATER, jnp.int32(Outcome.OK), outcome)
    return done(world, after, outcome, fault, met=((row < memory.rows) == (outcome == Outcome.OK),))


def reorder(memory: Paged, world: World, words: Words) -> Done:
    """A row takes over the sequence of another that is as long; now and then of one that is not."""
    seqs, row = world.state.seqs, jnp.arange(memory.rows, dtype=jnp.int32)
    loser, first = below(words[0], memory.rows), below(words[1], memory.rows)
    published = unpublished(world) == 0  # or both would publish the same block
    alike = seqs.active & (seqs.lengths == seqs.lengths[loser]) & ~waits(memory, world) & (row != loser)
    fits = alike & published
    chosen = (first + jnp.argmax(jnp.roll(fits, -first)).astype(jnp.int32)) % memory.rows
    winner = jnp.where(rarely(words[2], 8), first, jnp.where(jnp.any(fits), chosen, loser))
    winner = jnp.where(published[winner], winner, loser)
    possible = alike[winner] & seqs.active[loser] & ~waits(memory, world)[loser]
    outcome = jnp.where(possible | (winner == loser), jnp.int32(Outcome.OK), jnp.int32(Outcome.OUT_OF_RANGE))
    state = lifecycle.reorder(memory, world.state, row.at[loser].set(winner))
    becomes = row.at[loser].set(jnp.where(outcome == Outcome.OK, winner, loser))
    texts = jax.tree.map(lambda leaf: leaf[becomes], world.texts)
    return done(world, dataclasses.replace(world, state=state, texts=texts), outcome, outcome)


def copied(memory: Paged, world: World, words: Words) -> Done:
    """The data of all pending copies was copied."""
    del words
    return done(world, end_copies(memory, world))


def background(memory: Paged, world: World, words: Words) -> Done:
    """A step was computed."""
    del words
    return done(world, memory.background(world.state))


def evict(memory: Paged, world: World, words: Words) -> Done:
    """Two blocks lose their content, if they have any; one may be none of this pool."""
    ids = jnp.stack([below(words[0], memory.num_blocks), below(words[1], memory.num_blocks + 2)])
    return done(world, lifecycle.evict(memory, world.state, ids))


def pin(memory: Paged, world: World, words: Words) -> Done:
    """One block or two are pinned while few are, which is refused if one is of no use to anybody."""
    none, state = memory.num_blocks, world.state
    ids = jnp.where(jnp.stack([jnp.bool(True), rarely(words[0], 2)]), below(spread(words[1], 2), none), none)
    ids = jnp.where(4 * jnp.sum(pins(world)) < none, ids, none)
    possible = jnp.all(useful(state).at[ids].get(mode="fill", fill_value=True))
    state, outcome = lifecycle.pin(memory, state, ids)
    return done(world, state, outcome, met=((outcome == Outcome.OK) == possible,))


def pins(world: World) -> Int32[Array, " num_blocks"]:
    """How often each block is pinned, in a memory with a prefix cache."""
    return typing.cast(jax.Array, world.state.pins)


def unpin(memory: Paged, world: World, words: Words) -> Done:
    """A pinned block is unpinned, if there is one."""
    first = below(words[0], memory.num_blocks)
    block = (first + jnp.argmax(jnp.roll(pins(world), -first) > 0).astype(jnp.int32)) % memory.num_blocks
    block = jnp.where(pins(world)[block] > 0, block, memory.num_blocks)
    state, outcome = lifecycle.unpin(memory, world.state, block[None])
    return done(world, state, outcome, met=(outcome == Outcome.OK,))


def reset(memory: Paged, world: World, words: Words) -> Done:
    """The cache is reset, half the time after everything was let go."""
    drains = rarely(words[0], 2)
    world = jax.tree.map(lambda drained, as_is: jnp.where(drains, drained, as_is), _drained(memory, world), world)
    idle = jnp.all(world.state.pool.ref_counts == 0) & ~jnp.any(world.state.seqs.active)
    state, outcome = lifecycle.reset_cache(memory, world.state)
    forgot = ~jnp.any(useful(state)) | (outcome != Outcome.OK)
    return done(world, state, outcome, met=((outcome == Outcome.OK) == idle, forgot))


def _drained(memory: Paged, world: World) -> World:
    world = end_copies(memory, world)
    state = memory.release(world.state, world.state.seqs.active)
    block = jnp.arange(memory.num_blocks, dtype=jnp.int32)

    def unpin_all(world: World) -> World:
        pinned = jnp.where(pins(world) > 0, block, memory.num_blocks)
        return dataclasses.replace(world, state=lifecycle.unpin(memory, world.state, pinned)[0])

    world = dataclasses.replace(world, state=state)
    return jax.lax.while_loop(lambda world: jnp.any(pins(world) > 0), unpin_all, world)


def bump_epoch(memory: Paged, world: World, words: Words) -> Done:
    """New weights."""
    del memory, words
    return done(world, lifecycle.bump_epoch(world.state))


def swap_out(memory: Paged, world: World, words: Words) -> Done:
    """A row or two leave for the host; now and then one that waits for a copy, which is refused."""
    seqs, row = world.state.seqs, jnp.arange(memory.rows, dtype=jnp.int32)
    rows = seqs.active & ((row == below(words[0], memory.rows)) | rarely(spread(words[1], memory.rows), 4))
    early = rarely(words[2], 8)
    world = jax.tree.map(lambda as_is, ended: jnp.where(early, as_is, ended), world, end_copies(memory, world))
    refused = jnp.any(rows & waits(memory, world))
    state, places, outcome, moves = swap.swap_out(memory, world.state, rows)
    parked = jax.tree.map(lambda place, leaf: place.at[places].set(leaf, mode="drop"), world.parked, world.texts)
    after = move_out(dataclasses.replace(world, state=state, parked=parked), moves)
    return done(
        world,
        after,
        outcome,
        jnp.where(refused, jnp.int32(Outcome.OUT_OF_RANGE), jnp.int32(Outcome.OK)),
        met=(
            (outcome == Outcome.OUT_OF_RANGE) == refused,
            jnp.all((places < memory.rows) == (rows & (outcome == Outcome.OK))),
        ),
    )


def swap_in(memory: Paged, world: World, words: Words) -> Done:
    """A parked row comes back, if there is one."""
    place = _parked(memory, world, words)
    state, row, outcome, moves = swap.swap_in(memory, world.state, place)
    texts: Texts = jax.tree.map(
        lambda rows, parked: rows.at[row].set(parked[place], mode="drop"), world.texts, world.parked
    )
    after = move_in(dataclasses.replace(world, state=state, texts=texts), moves)
    missing = ~_is_parked(world)[place]
    wrong = jnp.where(missing, jnp.int32(Outcome.OUT_OF_RANGE), jnp.int32(Outcome.OK))
    return done(world, after, outcome, wrong, met=((outcome == Outcome.OUT_OF_RANGE) == missing,))


def discard(memory: Paged, world: World, words: Words) -> Done:
    """A parked row ends, if there is one."""
    place = _parked(memory, world, words)
    state, outcome = swap.discard(memory, world.state, place)
    return done(world, state, outcome, outcome, met=((outcome == Outcome.OK) == _is_parked(world)[place],))


def _parked(memory: Paged, world: World, words: Words) -> Int32[Array, ""]:
    """A place where a row is parked, any place if there is none."""
    first = below(words[0], memory.rows)
    return (first + jnp.argmax(jnp.roll(_is_parked(world), -first)).astype(jnp.int32)) % memory.rows


def _is_parked(world: World) -> Bool[Array, " places"]:
    return typing.cast(SwapState, world.state.swap).parked
