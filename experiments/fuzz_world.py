"""A block manager under test, with everything that it is trusted with, and what must hold after every operation.

The keys and values of a token are stood for by one number, its print: a polynomial hash of the row's identity and of
all its tokens up to there, computed without the manager. Whoever stores a token writes its print to the token's slot.
So a row reads other prints than its own as soon as one of its blocks was given to somebody else, was torn by a second
writer, was not copied, or was hit though it holds something else.
"""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paxkv import checks
from paxkv.block_pool import BlockPool
from paxkv.block_tables import BlockTable
from paxkv.outcomes import Outcome, no_faults
from paxkv.paged import Paged
from paxkv.paged_state import PagedState
from paxkv.swap import Moves
from paxkv.swap_state import twins_on_device

POISON = 0xDEADBEEF
"""Print in a slot of a block that is free and holds nothing."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """What sequences are made of, one entry each."""

    tokens: jax.Array  # i32[n, max_len]; also those that it has yet to store
    prints: jax.Array  # u32[n, max_len]; of these tokens


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class World:
    """The manager's state, and what rows and blocks really hold."""

    state: PagedState
    texts: Texts  # of the rows
    parked: Texts  # of the parking places on the host
    data: jax.Array  # u32[num_blocks, widest block]; a print in each slot
    host: jax.Array  # u32[host_blocks, widest block]
    copies: jax.Array  # i32[]; blocks copied so far because of a write
    moves: jax.Array  # i32[]; blocks moved to and from the host so far


def init_world(memory: Paged) -> World:
    """An empty memory."""
    widest = max(group.block_size for group in memory.layer_groups)

    def nothing() -> Texts:
        shape = (memory.rows, memory.max_len)
        return Texts(tokens=jnp.zeros(shape, jnp.int32), prints=jnp.zeros(shape, jnp.uint32))

    return World(
        state=memory.init(),
        texts=nothing(),
        parked=nothing(),
        data=jnp.full((memory.num_blocks, widest), POISON, jnp.uint32),
        host=jnp.full((memory.host_blocks, widest), POISON, jnp.uint32),
        copies=jnp.int32(0),
        moves=jnp.int32(0),
    )


def prints_of(tokens: Int32[Array, " n"], identity: Int32[Array, " 3"]) -> UInt32[Array, " n"]:
    """At each position, modulo 2**32: the sum of (value + 1) * 1000003**age over the identity and the tokens so far."""
    count = tokens.shape[0] + 3
    powers = [pow(1_000_003, age, 2**32) for age in range(count)]
    weights = [[powers[p - j] if j <= p else 0 for j in range(count)] for p in range(3, count)]
    values = jnp.concatenate([identity, tokens]).astype(jnp.uint32) + jnp.uint32(1)
    return jnp.sum(jnp.array(weights, jnp.uint32) * values[None, :], axis=1, dtype=jnp.uint32)


def begin_row(
    world: World,
    state: PagedState,
    row: Int32[Array, ""],
    tokens: Int32[Array, " max_len"],
    identity: Int32[Array, " 3"],
) -> World:
    """The world in which `row` got a new text; none did if it is out of range."""
    return dataclasses.replace(
        world,
        state=state,
        texts=Texts(
            tokens=world.texts.tokens.at[row].set(tokens, mode="drop"),
            prints=world.texts.prints.at[row].set(prints_of(tokens, identity), mode="drop"),
        ),
    )


def store(memory: Paged, before: World, state: PagedState, most: int) -> World:
    """The world after an append of at most `most` tokens a row led to `state`.

    Makes the copies that it lists, then writes the prints of the new tokens.
    """
    none, data, copies = memory.num_blocks, before.data, before.copies
    if before.state.copies is not None and state.copies is not None:
        listed = state.copies.destinations
        new = jnp.where(before.state.copies.destinations != listed, listed, none)
        data = data.at[new].set(data.at[state.copies.sources].get(mode="fill", fill_value=POISON), mode="drop")
        copies += jnp.sum(new != none, dtype=jnp.int32)
    row = jnp.arange(memory.rows, dtype=jnp.int32)[:, None]
    position = before.state.seqs.lengths[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
    is_new = position < state.seqs.lengths[:, None]
    for g, (group, table) in enumerate(zip(memory.layer_groups, state.tables, strict=True)):
        prints = before.texts.prints.at[row, position].get(mode="fill", fill_value=0) + jnp.uint32(g)
        column = jnp.where(is_new, position // group.block_size, table.ids.shape[1])
        block = table.ids.at[row, column].get(mode="fill", fill_value=none)
        data = data.at[block, position % group.block_size].set(prints, mode="drop")
    return dataclasses.replace(before, state=state, data=data, copies=copies)


def move_out(world: World, moves: Moves) -> World:
    """Copies blocks to the host."""
    moved = world.data.at[moves.sources].get(mode="fill", fill_value=POISON)
    return dataclasses.replace(
        world, host=world.host.at[moves.destinations].set(moved, mode="drop"), moves=world.moves + moves.count
    )


def move_in(world: World, moves: Moves) -> World:
    """Copies blocks from the host."""
    moved = world.host.at[moves.sources].get(mode="fill", fill_value=POISON)
    return dataclasses.replace(
        world, data=world.data.at[moves.destinations].set(moved, mode="drop"), moves=world.moves + moves.count
    )


def settle(memory: Paged, world: World) -> World:
    """Clears the recorded faults, and poisons the blocks that are free and hold nothing."""
    state = dataclasses.replace(world.state, seqs=dataclasses.replace(world.state.seqs, faults=no_faults(memory.rows)))
    return dataclasses.replace(
        world, state=state, data=jnp.where(useful(state)[:, None], world.data, jnp.uint32(POISON))
    )


def broken(
    memory: Paged, before: World, after: World, outcome: Int32[Array, ""], faults: Int32[Array, ""]
) -> dict[str, Int32[Array, ""]]:
    """How often each check fails after one operation, by the name of the check.

    Args:
      memory: the memory.
      before: the world before the operation, no faults recorded.
      after: the world after it.
      outcome: what the operation answered.
      faults: the fault word that it must have left behind.
    """
    found = {
        **checks.violations(memory, after.state),
        "rows_read_what_they_wrote": _misread(
            memory, after.state.tables, after.state.seqs.lengths, after.texts, after.data
        ),
        "cached_data_is_not_written": _overwritten(before, after),
        "faults_are_recorded": after.state.seqs.faults.word != faults,
        "refusals_change_nothing": (outcome != Outcome.OK) & ~same(before.state, after.state),
    }
    if after.state.swap is not None:
        swap = after.state.swap
        host = jnp.arange(memory.host_blocks, dtype=jnp.int32)
        twin = twins_on_device(swap, host)
        kept = useful(after.state).at[twin].get(mode="fill", fill_value=False) & (swap.pool.ref_counts > 0)
        differs = jnp.any(after.data.at[twin].get(mode="fill", fill_value=POISON) != after.host, axis=1)
        found["parked_rows_read_what_they_wrote"] = _misread(
            memory, swap.tables, swap.lengths, after.parked, after.host
        )
        found["twins_hold_the_same"] = jnp.sum(kept & differs)
    return {name: count.astype(jnp.int32) for name, count in found.items()}


def same(one: PagedState, other: PagedState) -> Bool[Array, ""]:
    """Whether two states cannot be told apart, but for the faults that they recorded."""
    equal = jax.tree.map(lambda a, b: jnp.all(a == b), _seen(one), _seen(other))
    return jnp.all(jnp.stack(jax.tree.leaves(equal)))


def _seen(state: PagedState) -> tuple[Any, ...]:
    """A state without its faults, and without the places where the queues lie in their arrays."""
    swap, host = state.swap, None
    if swap is not None:
        swap, host = dataclasses.replace(swap, pool=None), _pool_seen(swap.pool)
    seqs = dataclasses.replace(state.seqs, faults=None)
    return dataclasses.replace(state, seqs=seqs, pool=None, swap=swap), _pool_seen(state.pool), host


def _pool_seen(pool: BlockPool) -> tuple[jax.Array, jax.Array]:
    """The free blocks in the order of the queue, and everybody's references."""
    place = jnp.arange(pool.queue.shape[0], dtype=jnp.int32)
    free = (place >= pool.head) & (place < pool.tail) & (pool.queue != pool.num_blocks)
    rank = jnp.where(free, jnp.cumsum(free, dtype=jnp.int32) - 1, pool.num_blocks)
    in_order = jnp.full(pool.num_blocks, pool.num_blocks, jnp.int32).at[rank].set(pool.queue, mode="drop")
    return in_order, pool.ref_counts


def _misread(
    memory: Paged,
    tables: tuple[BlockTable, ...],
    lengths: Int32[Array, " n"],
    texts: Texts,
    data: UInt32[Array, "blocks size"],
) -> Int32[Array, ""]:
    """Stored tokens in view whose slot holds something else than their print."""
    position = jnp.arange(memory.max_len, dtype=jnp.int32)[None, :]
    row = jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None]
    stored, wrong = lengths[:, None], jnp.int32(0)
    for g, (group, table) in enumerate(zip(memory.layer_groups, tables, strict=True)):
        in_view = (position < stored) & (position >= group.out_of_view(stored))
        block = table.ids.at[row, position // group.block_size].get(mode="fill", fill_value=data.shape[0])
        held = data.at[block, position % group.block_size].get(mode="fill", fill_value=POISON)
        wrong += jnp.sum(in_view & (held != texts.prints + jnp.uint32(g)), dtype=jnp.int32)
    return wrong


def _overwritten(before: World, after: World) -> Int32[Array, ""]:
    """Blocks that hold the same content as before, but other data."""
    if before.state.contents is None or after.state.contents is None:
        return jnp.int32(0)
    old, new = before.state.contents.records[:, 0], after.state.contents.records[:, 0]
    return jnp.sum((old != 0) & (old == new) & jnp.any(before.data != after.data, axis=1))


def useful(state: PagedState) -> Bool[Array, " num_blocks"]:
    """Blocks that somebody refers to, or that hold a content."""
    useful = state.pool.ref_counts > 0
    return useful if state.contents is None else useful | (state.contents.records[:, 0] != 0)
