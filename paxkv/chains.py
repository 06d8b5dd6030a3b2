"""The chain of contents that each row has published so far, and how new tokens extend it."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paxkv.block_tables import BlockTable
from paxkv.chain_hash import seed, terms
from paxkv.control_flow import read_rows
from paxkv.prefix_cache import Filled, PrefixCache
from paxkv.windows import Group


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chains:
    """What is known of each row's tokens. A free row is all zero."""

    hashed: jax.Array  # i32[rows]; tokens that the chain covers: those stored, less those not published yet
    hashes: jax.Array  # u32[rows, 2]; hash of these tokens
    recent: jax.Array  # i32[rows, ring]; the last tokens, each at its position modulo the largest block size
    contents: jax.Array  # i32[rows, groups]; content of the last full block; the group's root if there is none
    identities: jax.Array  # i32[rows, 3]; adapter, salt, weight epoch
    priorities: jax.Array  # i32[rows]


def root_of(group: int) -> int:
    """The parent of a first block: a group's contents are its own."""
    return -group


def init_chains(rows: int, groups: tuple[Group, ...]) -> Chains:
    """Rows without tokens."""
    return Chains(
        hashed=jnp.zeros(rows, jnp.int32),
        hashes=jnp.zeros((rows, 2), jnp.uint32),
        recent=jnp.zeros((rows, max(group.block_size for group in groups)), jnp.int32),
        contents=jnp.zeros((rows, len(groups)), jnp.int32),
        identities=jnp.zeros((rows, 3), jnp.int32),
        priorities=jnp.zeros(rows, jnp.int32),
    )


def start_chain(
    chains: Chains,
    row: Int32[Array, ""],
    tokens: Int32[Array, " width"],
    length: Int32[Array, ""],
    hash_: UInt32[Array, " 2"],
    contents: Int32[Array, " groups"],
    identity: Int32[Array, " 3"],
    priority: Int32[Array, ""],
) -> Chains:
    """Sets a row's chain to the first `length` of these tokens; `row` may be out of range, to change nothing."""
    ring = chains.recent.shape[1]
    place = jnp.arange(ring, dtype=jnp.int32)
    latest = length - 1 - (length - 1 - place) % ring  # the last position before `length` that is kept in each place
    recent = jnp.where(latest >= 0, tokens.at[jnp.maximum(latest, 0)].get(mode="fill", fill_value=0), 0)
    return Chains(
        hashed=chains.hashed.at[row].set(length, mode="drop"),
        hashes=chains.hashes.at[row].set(hash_, mode="drop"),
        recent=chains.recent.at[row].set(recent, mode="drop"),
        contents=chains.contents.at[row].set(contents, mode="drop"),
        identities=chains.identities.at[row].set(identity, mode="drop"),
        priorities=chains.priorities.at[row].set(priority, mode="drop"),
    )


def clear_chains(chains: Chains, rows: Bool[Array, " rows"]) -> Chains:
    """Leaves nothing of the masked rows."""
    return jax.tree.map(lambda leaf: jnp.where(rows.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf), chains)


def filled_rows(config: PrefixCache, chains: Chains, table: BlockTable, at: tuple, group: int) -> Filled:
    """Puts together what `publish` must know of blocks `index` of rows `row`."""
    row, index, valid, starts, hashes, tokens = at
    columns = table.ids.shape[1]

    def of_rows(leaf: jax.Array) -> jax.Array:
        """What each entry's row has; the entries of `extend_by_one` are the rows."""
        return leaf if starts is None else leaf.at[row].get(mode="fill", fill_value=0)

    identities = of_rows(chains.identities)
    plain_keys = None
    if config.explain:
        adapter, salt, epoch = identities.T
        plain_keys = config.keys(hashes - seed(adapter, salt, epoch, config.kv_format), 0)
    return Filled(
        valid=valid,
        starts=starts,
        blocks=read_rows(table.ids.reshape(-1), row * columns + jnp.minimum(index, columns - 1)),
        keys=config.keys(hashes, group),
        tokens=tokens,
        parents=of_rows(chains.contents[:, group]),
        identities=identities,
        priorities=of_rows(chains.priorities),
        plain_keys=plain_keys,
    )


class Extension(typing.NamedTuple):
    """New tokens by row, and the blocks of each group that they fill: (row, index, valid, starts, hashes, tokens)."""

    chains: Chains  # with the new tokens; contents as before
    filled: tuple[tuple, ...]


def extend_by_one(
    chains: Chains,
    groups: tuple[Group, ...],
    tokens: Int32[Array, " tokens"],
    cu_lens: Int32[Array, " rows_and_one"],
) -> Extension:
    """Extends each row by no token or one: nothing ragged to take apart."""
    rows, ring = chains.recent.shape
    grows = cu_lens[1:] > cu_lens[:-1]
    token = tokens.at[cu_lens[:-1]].get(mode="fill", fill_value=0)
    added = jnp.where(grows[:, None], terms(token, chains.hashed), jnp.uint32(0))
    here = grows[:, None] & (jnp.arange(ring, dtype=jnp.int32)[None, :] == (chains.hashed % ring)[:, None])
    after = dataclasses.replace(
        chains,
        hashed=chains.hashed + grows.astype(jnp.int32),
        hashes=chains.hashes + added,
        recent=jnp.where(here, token[:, None], chains.recent),
    )
    row = jnp.arange(rows, dtype=jnp.int32)
    filled = []
    for group in groups:
        size = group.block_size
        valid = grows & (after.hashed % size == 0)
        in_order = after.recent
        if ring != size:
            position = after.hashed[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None, :]
            in_order = jnp.take_along_axis(after.recent, position % ring, axis=1)
        filled.append((row, jnp.maximum(after.hashed // size - 1, 0), valid, None, after.hashes, in_order))
    return Extension(after, tuple(filled))


def extend(
    chains: Chains,
    groups: tuple[Group, ...],
    tokens: Int32[Array, " tokens"],
    cu_lens: Int32[Array, " rows_and_one"],
) -> Extension:
    """Extends each row by its share of a ragged batch."""
    rows, ring = chains.recent.shape
    count = tokens.shape[0]
    flat = jnp.arange(count, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(cu_lens, flat, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    inside = flat < cu_lens[-1]
    start, old = cu_lens[:-1], chains.hashed
    position = old[row] + flat - start[row]
    added = jnp.where(inside[:, None], terms(tokens, position), jnp.uint32(0))
    # Hash before each token, without what the rows before it added.
    running = jnp.concatenate([jnp.zeros((1, 2), jnp.uint32), jnp.cumsum(added, axis=0, dtype=jnp.uint32)])
    base = chains.hashes - running[start]
    new = old + cu_lens[1:] - start

    def token_at(r: jax.Array, p: jax.Array) -> jax.Array:
        """The token at a position of a row: from this batch, or from what the row remembers."""
        fresh = tokens.at[start[r] + p - old[r]].get(mode="fill", fill_value=0)
        return jnp.where(p >= old[r], fresh, chains.recent[r, p % ring])

    place = jnp.arange(ring, dtype=jnp.int32)[None, :]
    latest = new[:, None] - 1 - (new[:, None] - 1 - place) % ring
    recent = token_at(jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.maximum(latest, 0))
    after = dataclasses.replace(
        chains,
        hashed=new,
        hashes=base + running[cu_lens[1:]],
        recent=jnp.where(latest >= 0, recent, chains.recent),
    )
    filled = []
    for group in groups:
        size = group.block_size
        most = min(count, count // size + min(rows, count))  # each row fills at most one block beyond its share
        blocks = new // size - old // size
        until = jnp.cumsum(blocks)
        entry = jnp.arange(most, dtype=jnp.int32)
        r = jnp.minimum(jnp.searchsorted(until, entry, side="right").astype(jnp.int32), rows - 1)
        nth = entry - (until[r] - blocks[r])
        index = old[r] // size + nth
        end = (index + 1) * size
        valid = entry < until[-1]
        hashes = base[r] + running.at[start[r] + end - old[r]].get(mode="fill", fill_value=0)
        offset = jnp.arange(size, dtype=jnp.int32)[None, :]
        in_order = token_at(r[:, None], jnp.where(valid[:, None], (end - size)[:, None] + offset, 0))
        filled.append((r, index, valid, nth == 0, hashes, in_order))
    return Extension(after, tuple(filled))
