"""What full blocks hold, so that a prompt that begins like an earlier one finds the keys and values it needs.

A published block has a content: its tokens, after its parent's content, for one adapter, salt and weight epoch. Each
content has an id that is never used again, and each block a record of its content. A block found by its key is a hit
only if its record says so: tokens compared, parent compared, all the way from the first block. The hash decides where
to look, never what is true.

The price of exactness: when a block is evicted, the blocks that continue it can no longer be reached, even if equal
tokens are published again. Least-recently-used eviction takes children before parents, so nothing is lost there.
"""

import dataclasses
import typing
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paxkv import hash_table
from paxkv.chain_hash import block_keys, constant_keys

Publish = Literal["on_schedule", "on_compute"]
Duplicates = Literal["keep", "merge"]
Eviction = Literal["lru", "lfu", "fifo", "priority"]

BROKEN = -(2**31)
"""Content of a row that can publish nothing more, because a block of it could not be published."""

DETACHED = -(2**30)
"""Parent of a block that begins where nothing before it is in view: its key alone says what came before."""

_CONTENT, _PARENT, _ENTRY, _IDENTITY = 0, 1, 2, slice(3, 6)
_COLUMNS = 6


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """How prefixes are cached.

    Attributes:
      publish: when a full block can be hit: as soon as its tokens are scheduled (a request of the same step can share
        it), or once they were computed.
      duplicates: a block that becomes full with a content that is cached already is kept beside it, or the table is
        pointed to the cached one and the block given back. Merging needs `on_compute`: otherwise the step would write
        into a block that others read.
      eviction: which cached block nobody uses goes first. `lru` takes the one unused for longest and costs what it
        takes; the others sort the free blocks when they evict.
      kv_format: of the keys and values; another format never hits.
      explain: also count why prompts did not hit, which costs another table.
      collide: give every block the same key, to show in tests that a collision is a miss.
    """

    publish: Publish = "on_schedule"
    duplicates: Duplicates = "keep"
    eviction: Eviction = "lru"
    kv_format: str = "f32"
    explain: bool = False
    collide: bool = False

    def __post_init__(self) -> None:
        """Refuses unknown policies and the pair that would corrupt data."""
        for name, kind in (("publish", Publish), ("duplicates", Duplicates), ("eviction", Eviction)):
            if getattr(self, name) not in typing.get_args(kind):
                raise ValueError(
                    f"{name}: expected one of {', '.join(typing.get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.duplicates == "merge" and self.publish != "on_compute":
            raise ValueError(
                "duplicates: 'merge' needs publish='on_compute'; on_schedule a step would write its keys and values "
                "into the block it was merged with, while others read it"
            )

    def keys(self, hashes: UInt32[Array, "n 2"], group: int) -> UInt32[Array, "n 2"]:
        """The keys of blocks that end at these hashes."""
        return (constant_keys if self.collide else block_keys)(hashes, group)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contents:
    """What the blocks of a pool hold. A block without content has an all-zero record."""

    table: jax.Array  # i32[buckets, 16]; see hash_table
    records: jax.Array  # i32[num_blocks, 6]; content, parent content, table entry, adapter, salt, epoch
    tokens: jax.Array  # i32[num_blocks, block_size]
    ranks: jax.Array  # i32[num_blocks]; eviction takes the lowest first; i32[0] for lru, which has the free queue
    next_content: jax.Array  # i32[]
    evicted_tags: jax.Array  # i32[tags]; tags of keys that were cached once; i32[0] unless misses are explained
    known_tags: jax.Array  # i32[tags]; tags of token prefixes that were cached under any adapter, salt or epoch


class Found(NamedTuple):
    """What is cached of a prompt's blocks, one entry each."""

    blocks: Int32[Array, " n"]
    contents: Int32[Array, " n"]
    present: Bool[Array, " n"]  # the block's tokens and identity agree
    linked: Bool[Array, " n"]  # and it continues the one before
    hits: Int32[Array, ""]  # blocks that can be used from the first one on


def init_contents(config: PrefixCache, num_blocks: int, block_size: int) -> Contents:
    """Nothing is cached."""
    tags = 1
    while tags < 2 * num_blocks:
        tags *= 2
    tags = tags if config.explain else 0
    return Contents(
        table=hash_table.init_table(num_blocks),
        records=jnp.zeros((num_blocks, _COLUMNS), jnp.int32),
        tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
        ranks=jnp.zeros(0 if config.eviction == "lru" else num_blocks, jnp.int32),
        next_content=jnp.int32(1),
        evicted_tags=jnp.zeros(tags, jnp.int32),
        known_tags=jnp.zeros(tags, jnp.int32),
    )


def content_of(contents: Contents, ids: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The content of each block, 0 for none and for the sentinel."""
    return contents.records.at[ids, _CONTENT].get(mode="fill", fill_value=0)


def ranking(config: PrefixCache, contents: Contents) -> Int32[Array, " num_blocks"] | None:
    """The order in which blocks are taken, for `block_pool.take`: those that hold nothing first."""
    if config.eviction == "lru":
        return None
    return jnp.where(contents.records[:, _CONTENT] == 0, -(2**31), contents.ranks)


def find(
    contents: Contents,
    keys: UInt32[Array, "n 2"],
    tokens: Int32[Array, "n block_size"],
    identity: Int32[Array, " 3"],
    root: int,
    limit: Int32[Array, ""],
) -> Found:
    """Looks up the blocks of a prompt, the first `limit` of which may be hit.

    Args:
      contents: what is cached.
      keys: of the blocks.
      tokens: of the blocks.
      identity: adapter, salt and epoch of the prompt.
      root: the parent of a first block.
      limit: blocks that may be hit.
    """
    none = contents.records.shape[0]
    position = jnp.arange(keys.shape[0], dtype=jnp.int32)
    blocks, same = hash_table.look_up(contents.table, keys, none)

    def verify(same: Bool[Array, "n ways"]) -> tuple[Int32[Array, " n"], Found]:
        way = jnp.argmax(same, axis=1).astype(jnp.int32)
        candidate = jnp.where(jnp.any(same, axis=1), jnp.take_along_axis(blocks, way[:, None], axis=1)[:, 0], none)
        record = contents.records.at[candidate].get(mode="fill", fill_value=0)
        held = contents.tokens.at[candidate, : tokens.shape[1]].get(mode="fill", fill_value=0)
        present = (
            (candidate != none)
            & jnp.all(held == tokens, axis=1)
            & jnp.all(record[:, _IDENTITY] == identity[None, :], axis=1)
        )
        before = jnp.concatenate([jnp.full(1, root, jnp.int32), record[:-1, _CONTENT]])
        linked = present & (record[:, _PARENT] == before)
        hits = jnp.min(jnp.where(linked & (position < limit), keys.shape[0], position), initial=limit)
        return way, Found(candidate, record[:, _CONTENT], present, linked, hits)

    def next_candidate(carry: tuple) -> tuple:
        same, way, found, _ = carry
        same = same & ~((position == found.hits)[:, None] & (jnp.arange(same.shape[1]) == way[:, None]))
        way, found = verify(same)
        return same, way, found, _has_other(same, found.hits, limit)

    # More than one block has the same key if there are copies, all of which will do, or if keys collide.
    way, found = verify(same)
    _, _, found, _ = jax.lax.while_loop(
        lambda carry: carry[3], next_candidate, (same, way, found, _has_other(same, found.hits, limit))
    )
    return found


def _has_other(same: Bool[Array, "n ways"], at: Int32[Array, ""], limit: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether the block at which the prompt ceased to hit has another candidate than the one that was looked at."""
    return (at < limit) & (jnp.sum(same.at[at].get(mode="fill", fill_value=False)) > 1)


def forget(config: PrefixCache, contents: Contents, ids: Int32[Array, " n"]) -> Contents:
    """Takes the content from these blocks, if they have any. The sentinel marks empty places."""
    none = contents.records.shape[0]
    record = contents.records.at[ids].get(mode="fill", fill_value=0)
    cached = record[:, _CONTENT] != 0
    entry = record[:, _ENTRY]
    evicted_tags = contents.evicted_tags
    if config.explain:
        evicted_tags = _remember(evicted_tags, hash_table.tags_at(contents.table, entry), cached)
    return dataclasses.replace(
        contents,
        table=hash_table.clear(contents.table, entry, cached, none),
        records=contents.records.at[jnp.where(cached, ids, none)].set(0, mode="drop"),
        evicted_tags=evicted_tags,
    )


def touch(config: PrefixCache, contents: Contents, ids: Int32[Array, " n"], priority: Int32[Array, ""]) -> Contents:
    """Notes that these cached blocks were of use again, for policies that count it."""
    match config.eviction:
        case "lfu":
            return dataclasses.replace(contents, ranks=contents.ranks.at[ids].add(1, mode="drop"))
        case "priority":
            return dataclasses.replace(contents, ranks=contents.ranks.at[ids].set(priority, mode="drop"))
        case _:
            return contents


class Filled(NamedTuple):
    """Blocks that have become full, ordered by row and place. Entries that are not `valid` are padding."""

    valid: Bool[Array, " n"]
    starts: Bool[Array, " n"] | None  # the first of its row; None if all are
    blocks: Int32[Array, " n"]
    keys: UInt32[Array, "n 2"]
    tokens: Int32[Array, "n block_size"]
    parents: Int32[Array, " n"]  # content before it; of a row's first entry only
    identities: Int32[Array, "n 3"]
    priorities: Int32[Array, " n"]
    plain_keys: UInt32[Array, "n 2"] | None  # of the tokens whatever the identity, if misses are explained


def publish(
    config: PrefixCache, contents: Contents, filled: Filled
) -> tuple[Contents, Int32[Array, " n"], Int32[Array, " n"]]:
    """Gives each of these blocks a content: that of an equal block with the same parent, or a new one.

    Equal blocks in one call count as one content, as if they had come one after another.

    Returns:
      The contents, the content id of each block (`BROKEN` if the table has no room for it), and the block that holds
      it: itself, or with `merge` the one that held it before.
    """
    none = contents.records.shape[0]
    fresh = contents.next_content + jnp.cumsum(filled.valid, dtype=jnp.int32) - 1
    merge = config.duplicates == "merge"

    def before(values: jax.Array, first: jax.Array) -> jax.Array:
        """The value of the entry before, that of `first` where a row starts."""
        if filled.starts is None:
            return first
        return jnp.where(filled.starts, first, jnp.concatenate([first[:1], values[:-1]]))

    def go_round(carry: tuple) -> tuple:
        table, records, tokens, pending, ids, holders = carry
        # What equals a cached block? Its parent must be known: cached or published, or found in this same pass.
        blocks, same = hash_table.look_up(table, filled.keys, none)
        settled = None if filled.starts is None else before(~pending, jnp.ones_like(pending))
        # Equal keys tell nothing before the parent is known.
        todo = pending & settled if config.collide and settled is not None else pending
        parent = before(ids, filled.parents)
        candidate, record = _equal_block(records, tokens, filled, blocks, same & todo[:, None], settled, parent)
        expected = before(record[:, _CONTENT], filled.parents)
        continues = record[:, _PARENT] == (expected if settled is None else jnp.where(settled, parent, expected))
        found = todo & _unbroken((candidate != none) & continues, settled)

        # An entry for each of the others; of those that want the same one the first gets it, the rest go round again.
        # Nobody goes ahead of its parent.
        goes_in = todo & ~found if merge else todo
        entry = hash_table.empty_entry(table, filled.keys, none)
        full = entry >= table.shape[0] * hash_table.WIDTH
        broken = pending & ((goes_in & full) | (parent == BROKEN))
        broken = broken if settled is None else broken & settled
        goes_in = goes_in & ~broken
        table, claimed = hash_table.claim(table, entry, goes_in & ~full)
        put = claimed & _unbroken(claimed | (found & merge), settled)
        table = hash_table.clear(table, entry, claimed & ~put, none)

        ids = jnp.where(found & (put | merge), record[:, _CONTENT], jnp.where(put, fresh, ids))
        ids = jnp.where(broken, BROKEN, ids)
        parent = before(ids, filled.parents)
        table = hash_table.fill(table, entry, filled.keys, filled.blocks, put)
        at = jnp.where(put, filled.blocks, none)
        rows = jnp.concatenate([jnp.stack([ids, parent, entry], axis=1), filled.identities], axis=1)
        records = records.at[at].set(rows, mode="drop")
        tokens = tokens.at[at, : filled.tokens.shape[1]].set(filled.tokens, mode="drop")
        holders = jnp.where(found & merge, candidate, holders)
        return table, records, tokens, pending & ~put & ~broken & ~(found & merge), ids, holders

    start = (
        contents.table,
        contents.records,
        contents.tokens,
        filled.valid,
        jnp.zeros_like(filled.blocks),
        filled.blocks,
    )
    table, records, tokens, _, ids, holders = jax.lax.while_loop(lambda c: jnp.any(c[3]), go_round, start)

    contents = dataclasses.replace(
        contents,
        table=table,
        records=records,
        tokens=tokens,
        ranks=_ranks_of_new(config, contents.ranks, filled, ids, holders, fresh),
        next_content=contents.next_content + jnp.sum(filled.valid, dtype=jnp.int32),
        known_tags=contents.known_tags
        if filled.plain_keys is None
        else _remember(contents.known_tags, hash_table.tags(filled.plain_keys), filled.valid),
    )
    return contents, ids, holders


def _equal_block(
    records: Int32[Array, "num_blocks columns"],
    tokens: Int32[Array, "num_blocks block_size"],
    filled: Filled,
    blocks: Int32[Array, "n ways"],
    same: Bool[Array, "n ways"],
    settled: Bool[Array, " n"] | None,
    parent: Int32[Array, " n"],
) -> tuple[Int32[Array, " n"], Int32[Array, "n columns"]]:
    """A block with the tokens and the identity of each filled one, and its record; the sentinel if there is none.

    Where the parent is settled, it must agree as well. Candidates are looked at one after another; more than one is
    rare.
    """
    none = records.shape[0]
    size = filled.tokens.shape[1]

    def look(carry: tuple) -> tuple:
        same, answer, record = carry
        way = jnp.argmax(same, axis=1)
        candidate = jnp.where(jnp.any(same, axis=1), jnp.take_along_axis(blocks, way[:, None], axis=1)[:, 0], none)
        seen = records.at[candidate].get(mode="fill", fill_value=0)
        equal = (
            (candidate != none)
            & jnp.all(tokens.at[candidate, :size].get(mode="fill", fill_value=0) == filled.tokens, axis=1)
            & jnp.all(seen[:, _IDENTITY] == filled.identities, axis=1)
        )
        agrees = seen[:, _PARENT] == parent
        equal &= agrees if settled is None else agrees | ~settled
        answer, record = jnp.where(equal, candidate, answer), jnp.where(equal[:, None], seen, record)
        left = same & (jnp.arange(same.shape[1]) != way[:, None]) & ~equal[:, None]
        return left, answer, record

    nothing = jnp.full(same.shape[0], none, jnp.int32)
    start = (same, nothing, jnp.zeros((same.shape[0], _COLUMNS), jnp.int32))
    _, answer, record = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), look, start)
    return answer, record


def _unbroken(good: Bool[Array, " n"], starts: Bool[Array, " n"] | None) -> Bool[Array, " n"]:
    """Whether all entries from the last start up to this one are good."""
    if starts is None:
        return good
    position = jnp.arange(good.shape[0], dtype=jnp.int32)
    last_bad = jax.lax.cummax(jnp.where(good, -1, position))
    last_start = jax.lax.cummax(jnp.where(starts, position, 0))
    return last_bad < last_start


def _ranks_of_new(
    config: PrefixCache,
    ranks: Int32[Array, " num_blocks"],
    filled: Filled,
    ids: Int32[Array, " n"],
    holders: Int32[Array, " n"],
    fresh: Int32[Array, " n"],
) -> Int32[Array, " num_blocks"]:
    """The eviction ranks after these blocks were published, or were found to equal a cached one and merged with it."""
    none = ranks.shape[0]
    published = filled.valid & (ids != BROKEN)
    own = published & (holders == filled.blocks)
    at, merged = jnp.where(own, holders, none), jnp.where(published & ~own, holders, none)
    match config.eviction:
        case "lfu":
            return ranks.at[at].set(1, mode="drop").at[merged].add(1, mode="drop")
        case "fifo":
            return ranks.at[at].set(fresh, mode="drop")
        case "priority":
            return ranks.at[jnp.where(published, holders, none)].set(filled.priorities, mode="drop")
        case _:
            return ranks


def remembers(tags: Int32[Array, " size"], keys: UInt32[Array, "n 2"]) -> Bool[Array, " n"]:
    """Whether each key is among those last noted; old ones may have been forgotten."""
    tag = hash_table.tags(keys)
    return tags[tag & (tags.shape[0] - 1)] == tag


def _remember(tags: Int32[Array, " size"], tag: Int32[Array, " n"], wanted: Bool[Array, " n"]) -> Int32[Array, " size"]:
    size = tags.shape[0]
    return tags.at[jnp.where(wanted, tag & (size - 1), size)].set(tag, mode="drop")
