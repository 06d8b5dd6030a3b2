"""What is on the host: parked sequences, their blocks, and which blocks of the two pools hold the same."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.block_pool import BlockPool, init_block_pool
from paxkv.block_tables import BlockTable, init_block_table
from paxkv.chains import Chains, init_chains
from paxkv.windows import Group


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwapState:
    """A pool of host blocks, and as many parking places as rows. A free place holds nothing and is all zero.

    A device block and a host block are twins while they hold the same keys and values: one was copied from the other,
    and neither was written since. They name each other; a name that is not returned counts for nothing, so that it
    takes a single write to part them. A free block stays a twin until it is taken: its data is still there.
    """

    pool: BlockPool  # of host blocks; their sentinel is host_blocks
    tables: tuple[BlockTable, ...]  # one for each group of layers; of host blocks, a row for each place
    parked: jax.Array  # bool[places]; the place belongs to a sequence
    lengths: jax.Array  # i32[places]; tokens stored
    promised: jax.Array  # i32[places]; as in `Seqs`
    chains: Chains | None  # by place; with a prefix cache
    host_twins: jax.Array  # i32[num_blocks]; the host block that each device block names
    device_twins: jax.Array  # i32[host_blocks]; the device block that each host block names


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """Blocks to copy from one pool to the other, the first `count` entries; the rest are the sentinels of the pools."""

    sources: jax.Array  # i32[host_blocks]
    destinations: jax.Array  # i32[host_blocks]
    count: jax.Array  # i32[]


def init_swap(
    host_blocks: int, num_blocks: int, places: int, max_len: int, groups: tuple[Group, ...], cached: bool
) -> SwapState:
    """A free host pool, and nobody parked."""
    zeros = jnp.zeros(places, jnp.int32)
    return SwapState(
        pool=init_block_pool(host_blocks),
        tables=tuple(init_block_table(places, -(-max_len // group.block_size), host_blocks) for group in groups),
        parked=jnp.zeros(places, jnp.bool),
        lengths=zeros,
        promised=jnp.zeros_like(zeros),
        chains=init_chains(places, groups) if cached else None,
        host_twins=jnp.full(num_blocks, host_blocks, jnp.int32),
        device_twins=jnp.full(host_blocks, num_blocks, jnp.int32),
    )


def twins_on_host(swap: SwapState, ids: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The host block that holds the same as each device block; the host's sentinel if there is none."""
    host_blocks, num_blocks = swap.device_twins.shape[0], swap.host_twins.shape[0]
    named = swap.host_twins.at[ids].get(mode="fill", fill_value=host_blocks)
    return jnp.where(swap.device_twins.at[named].get(mode="fill", fill_value=num_blocks) == ids, named, host_blocks)


def twins_on_device(swap: SwapState, ids: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The device block that holds the same as each host block; the device's sentinel if there is none."""
    host_blocks, num_blocks = swap.device_twins.shape[0], swap.host_twins.shape[0]
    named = swap.device_twins.at[ids].get(mode="fill", fill_value=num_blocks)
    return jnp.where(swap.host_twins.at[named].get(mode="fill", fill_value=host_blocks) == ids, named, num_blocks)


def make_twins(swap: SwapState, devices: Int32[Array, " n"], hosts: Int32[Array, " n"]) -> SwapState:
    """One of each pair is about to be copied over the other. Sentinels on both sides mark empty places."""
    return dataclasses.replace(
        swap,
        host_twins=swap.host_twins.at[devices].set(hosts, mode="drop"),
        device_twins=swap.device_twins.at[hosts].set(devices, mode="drop"),
    )


def part_twins(swap: SwapState, devices: Int32[Array, " n"]) -> SwapState:
    """These device blocks are about to be written. The sentinel marks empty places."""
    host_blocks = swap.device_twins.shape[0]
    return dataclasses.replace(swap, host_twins=swap.host_twins.at[devices].set(host_blocks, mode="drop"))


def part_written(
    swap: SwapState,
    groups: tuple[Group, ...],
    tables: tuple[BlockTable, ...],
    old_lengths: Int32[Array, " rows"],
    grows: Bool[Array, " rows"],
) -> SwapState:
    """The rows that grow write into the block their next token is in. All later blocks they were given anew."""
    row = jnp.arange(grows.shape[0], dtype=jnp.int32)
    for group, table in zip(groups, tables, strict=True):
        at = jnp.where(grows, row, grows.shape[0])
        none = swap.host_twins.shape[0]
        written = table.ids.at[at, old_lengths // group.block_size].get(mode="fill", fill_value=none)
        swap = part_twins(swap, written)
    return swap


def add_moves(
    moves: Moves, sources: Int32[Array, " n"], destinations: Int32[Array, " n"], wanted: Bool[Array, " n"]
) -> Moves:
    """Appends the wanted pairs: what one call moves, or several in one direction with nothing between."""
    size = moves.sources.shape[0]
    rank = moves.count + jnp.cumsum(wanted, dtype=jnp.int32)
    at = jnp.where(wanted, rank - 1, size)
    return Moves(
        sources=moves.sources.at[at].set(sources, mode="drop"),
        destinations=moves.destinations.at[at].set(destinations, mode="drop"),
        count=rank[-1],
    )


def no_moves_out(num_blocks: int, host_blocks: int) -> Moves:
    """An empty list of copies to the host: from device blocks to host blocks."""
    return _no_moves(host_blocks, num_blocks, host_blocks)


def no_moves_in(num_blocks: int, host_blocks: int) -> Moves:
    """An empty list of copies from the host: from host blocks to device blocks."""
    return _no_moves(host_blocks, host_blocks, num_blocks)


def join_moves(first: Moves, then: Moves) -> Moves:
    """The copies of two calls in one direction between which nothing else happened, so that they fit into one list."""
    real = jnp.arange(then.sources.shape[0], dtype=jnp.int32) < then.count
    return add_moves(first, then.sources, then.destinations, real)


def _no_moves(size: int, no_source: int, no_destination: int) -> Moves:
    return Moves(
        sources=jnp.full(size, no_source, jnp.int32),
        destinations=jnp.full(size, no_destination, jnp.int32),
        count=jnp.int32(0),
    )
