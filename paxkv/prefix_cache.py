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
from paxkv.control_flow import read_rows
from paxkv.sizes import require_bool

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
        require_bool("explain", self.explain)
        require_bool("collide", self.collide)
        if not isinstance(self.kv_format, str):
            raise ValueError(f"kv_format: expected a str, got {self.kv_format!r}")
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
    records: jax.Array  # i32[num_blocks, 6 + block_size]; content, parent, table entry, adapter, salt, epoch, tokens
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
        records=jnp.zeros((num_blocks, _COLUMNS + block_size), jnp.int32),
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
    blocks, same, _ = hash_table.look_up(contents.table, keys, none)

    def verify(same: Bool[Array, "n ways"]) -> tuple[Int32[Array, " n"], Found]:
        way, candidate = _first_way(blocks, same, none)
        record, present = _compare(contents.records, candidate, tokens, identity[None, :])
        before = jnp.concatenate([jnp.full(1, root, jnp.int32), record[:-1, _CONTENT]])
        linked = present & (record[:, _PARENT] == before)
        hits = jnp.min(jnp.where(linked & (position < limit), keys.shape[0], position), initial=limit)
        return way, Found(candidate, record[:, _CONTENT], present, linked, hits)

    def next_candidate(carry: tuple) -> tuple:
        same, way, found, _ = carry
        same = same & ~((position == found.hits)[:, None] & _one_way(way))
        way, found = verify(same)
        return same, way, found, _has_other(same, found.hits, limit)

    # More than one block has the same key if there are copies, all of which will do, or if keys collide.
    way, found = verify(same)
    _, _, found, _ = jax.lax.while_loop(
        lambda carry: carry[3], next_candidate, (same, way, found, _has_other(same, found.hits, limit))
    )
    return found


def _first_way(
    blocks: Int32[Array, "n ways"], same: Bool[Array, "n ways"], none: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """The first of the ways that may hold a block, and the block; the sentinel if there is none."""
    way = jnp.argmax(same, axis=1).astype(jnp.int32)
    block = jnp.take_along_axis(blocks, way[:, None], axis=1)[:, 0]
    return way, jnp.where(jnp.any(same, axis=1), block, none)


def _one_way(way: Int32[Array, " n"]) -> Bool[Array, "n ways"]:
    return jnp.arange(hash_table.WAYS, dtype=jnp.int32)[None, :] == way[:, None]


def _compare(
    records: Int32[Array, "num_blocks columns"],
    candidates: Int32[Array, " n"],
    wanted_tokens: Int32[Array, "n size"],
    wanted_identities: Int32[Array, "#n 3"],
) -> tuple[Int32[Array, "n columns"], Bool[Array, " n"]]:
    """The records of these blocks, and whether tokens and identity are those wanted."""
    wanted = jnp.concatenate([jnp.broadcast_to(wanted_identities, (candidates.shape[0], 3)), wanted_tokens], axis=1)
    is_block = candidates != records.shape[0]
    record = jnp.where(is_block[:, None], read_rows(records, jnp.where(is_block, candidates, 0)), 0)
    held = record[:, _IDENTITY.start : _IDENTITY.start + wanted.shape[1]]
    return record, jnp.all(held == wanted, axis=1) & is_block


def _has_other(same: Bool[Array, "n ways"], at: Int32[Array, ""], limit: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether the block at which the prompt ceased to hit has another candidate than the one that was looked at."""
    return (at < limit) & (jnp.sum(same.at[at].get(mode="fill", fill_value=False)) > 1)


def forget(config: PrefixCache, contents: Contents, ids: Int32[Array, " n"]) -> tuple[Contents, Int32[Array, ""]]:
    """Takes the content from these blocks, if they have any, and counts those. The sentinel marks empty places."""
    none = contents.records.shape[0]
    record = contents.records.at[ids, :_COLUMNS].get(mode="fill", fill_value=0)
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
    ), jnp.sum(cached, dtype=jnp.int32)


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
    config: PrefixCache, contents: Contents, filled: Filled, width: int
) -> tuple[Contents, Int32[Array, " n"], Int32[Array, " n"]]:
    """Gives each of these blocks a content: that of an equal block with the same parent, or a new one.

    Equal blocks in one call count as one content, as if they had come one after another.

    Args:
      config: how prefixes are cached.
      contents: what is cached.
      filled: the blocks.
      width: how many are looked at together; all are, in rounds, but fewer than `width` cost a single one.

    Returns:
      The contents, the content id of each block (`BROKEN` if the table has no room for it), and the block that holds
      it: itself, or with `merge` the one that held it before.
    """
    none, count = contents.records.shape[0], filled.valid.shape[0]
    width = min(width, count)
    merge = config.duplicates == "merge"

    def go_round(carry: _Round) -> _Round:
        """Settles the next blocks, in order, but for those whose candidate or entry turned out not to be theirs."""
        table, records = carry.table, carry.records
        at = _first_true(carry.pending, width)
        todo, some = _pick(filled, carry, at)

        # What equals a cached block? Its parent must be known: cached or published, or found in this same round.
        ways = hash_table.look_up(table, some.keys, none)
        entry, room = hash_table.empty_entry(ways, none)
        tried = carry.tried.at[at].get(mode="fill", fill_value=0)[:, None] >> jnp.arange(hash_table.WAYS)[None, :] & 1
        same = ways.same & (tried == 0)
        # A block that two rows share may have been published by the other one.
        listed = same & (ways.blocks == some.blocks[:, None])
        has_entry = jnp.any(listed, axis=1)
        way, candidate = _first_way(ways.blocks, jnp.where(has_entry[:, None], listed, same), none)
        record, equal = _compare(records, candidate, some.tokens, some.identities)
        continues = equal & (record[:, _PARENT] == _parents(some, record[:, _CONTENT]))
        ready = todo & some.settled if config.collide else todo  # equal keys tell nothing before the parent is known
        starts = None if filled.starts is None else some.settled
        found = ready & _unbroken(continues, starts)

        # Copies of a content are all the same, but keys can collide, and the parent of an equal block can be gone: then
        # the next candidate is looked at in turn, once the block's own parent is known.
        refuted = ready & ~continues & (candidate != none)
        tried_now = carry.tried.at[at].get(mode="fill", fill_value=0) | jnp.where(refuted & some.settled, 1 << way, 0)
        ready &= ~(refuted & (jnp.sum(same, axis=1) > 1))

        # An entry for each of the others; of those that want the same one the first gets it, the rest go round again.
        # Nobody goes ahead of its parent.
        merged = found & (merge | has_entry)
        goes_in = ready & ~merged
        broken = todo & some.settled & ((goes_in & ~room) | (some.parents == BROKEN))
        claimed = hash_table.first_claims(entry, goes_in & ~broken & room)
        put = claimed & _unbroken(claimed | merged, starts)

        # Numbered as they go in, so that no content is older than its parent.
        number = carry.next_content + jnp.cumsum(put & ~found, dtype=jnp.int32) - 1
        ids = jnp.where(found, record[:, _CONTENT], number)
        parents = _parents(some, ids)
        table = hash_table.fill(table, entry, some.keys, some.blocks, put)
        unused = jnp.zeros((width, records.shape[1] - _COLUMNS - some.tokens.shape[1]), jnp.int32)
        rows = jnp.concatenate([jnp.stack([ids, parents, entry], axis=1), some.identities, some.tokens, unused], axis=1)
        where = jnp.where(put, some.blocks, none)
        settled_now = put | broken | merged
        done = jnp.where(settled_now, at, count)
        return _Round(
            table=table,
            records=records.at[where].set(rows, mode="drop"),
            pending=carry.pending.at[done].set(False, mode="drop"),
            tried=carry.tried.at[at].set(tried_now, mode="drop"),
            ids=carry.ids.at[done].set(jnp.where(broken, BROKEN, ids), mode="drop"),
            holders=carry.holders.at[jnp.where(merged, at, count)].set(candidate, mode="drop"),
            next_content=number[-1] + 1,
        )

    start = _Round(
        table=contents.table,
        records=contents.records,
        pending=filled.valid,
        tried=jnp.zeros(count, jnp.int32),
        ids=jnp.zeros(count, jnp.int32),
        holders=filled.blocks,
        next_content=contents.next_content,
    )
    end = jax.lax.while_loop(lambda carry: jnp.any(carry.pending), go_round, start)
    contents = dataclasses.replace(
        contents,
        table=end.table,
        records=end.records,
        ranks=_ranks_of_new(config, contents, filled, end.ids, end.holders),
        next_content=contents.next_content + jnp.sum(filled.valid, dtype=jnp.int32),
        known_tags=contents.known_tags
        if filled.plain_keys is None
        else _remember(contents.known_tags, hash_table.tags(filled.plain_keys), filled.valid),
    )
    return contents, end.ids, end.holders


class _Round(NamedTuple):
    """What goes from round to round while blocks are published."""

    table: Int32[Array, "buckets ways"]
    records: Int32[Array, "num_blocks columns"]
    pending: Bool[Array, " n"]
    tried: Int32[Array, " n"]  # a bit for each way whose block turned out to be another
    ids: Int32[Array, " n"]
    holders: Int32[Array, " n"]
    next_content: Int32[Array, ""]


class _Some(NamedTuple):
    """The blocks of one round."""

    blocks: Int32[Array, " width"]
    keys: UInt32[Array, "width 2"]
    tokens: Int32[Array, "width block_size"]
    identities: Int32[Array, "width 3"]
    settled: Bool[Array, " width"]  # its parent is known; otherwise that is the entry before it
    parents: Int32[Array, " width"]  # where settled


def _first_true(mask: Bool[Array, " n"], width: int) -> Int32[Array, " width"]:
    """The first `width` places where the mask holds; `n` where there are fewer."""
    count = mask.shape[0]
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    place = jnp.arange(count, dtype=jnp.int32)
    return jnp.full(width, count, jnp.int32).at[jnp.where(mask, rank, width)].set(place, mode="drop")


def _pick(filled: Filled, carry: _Round, at: Int32[Array, " width"]) -> tuple[Bool[Array, " width"], _Some]:
    """The blocks at these places, and which places are none."""
    todo = at < filled.valid.shape[0]
    starts = jnp.ones_like(todo)
    parents = filled.parents.at[at].get(mode="fill", fill_value=0)
    settled = starts
    if filled.starts is not None:
        starts = filled.starts.at[at].get(mode="fill", fill_value=True)
        before = jnp.where(starts, filled.valid.shape[0], at - 1)
        settled = starts | ~carry.pending.at[before].get(mode="fill", fill_value=False)
        parents = jnp.where(starts, parents, carry.ids.at[before].get(mode="fill", fill_value=0))
    return todo, _Some(
        blocks=filled.blocks.at[at].get(mode="fill", fill_value=0),
        keys=filled.keys.at[at].get(mode="fill", fill_value=0),
        tokens=filled.tokens.at[at].get(mode="fill", fill_value=0),
        identities=filled.identities.at[at].get(mode="fill", fill_value=0),
        settled=settled,
        parents=parents,
    )


def _parents(some: _Some, ids: Int32[Array, " width"]) -> Int32[Array, " width"]:
    """The parent of each block, if the one before has the content `ids` says."""
    return jnp.where(some.settled, some.parents, jnp.concatenate([some.parents[:1], ids[:-1]]))


def _unbroken(good: Bool[Array, " n"], starts: Bool[Array, " n"] | None) -> Bool[Array, " n"]:
    """Whether all entries from the last start up to this one are good. None: each is a start."""
    if starts is None:
        return good
    position = jnp.arange(good.shape[0], dtype=jnp.int32)
    last_bad = jax.lax.cummax(jnp.where(good, -1, position))
    last_start = jax.lax.cummax(jnp.where(starts, position, 0))
    return last_bad < last_start


def _ranks_of_new(
    config: PrefixCache,
    contents: Contents,
    filled: Filled,
    ids: Int32[Array, " n"],
    holders: Int32[Array, " n"],
) -> Int32[Array, " num_blocks"]:
    """The eviction ranks after these blocks were published, or were found to equal a cached one and merged with it.

    `contents` are those before.
    """
    ranks, none = contents.ranks, contents.ranks.shape[0]
    published = filled.valid & (ids != BROKEN)
    own = published & (holders == filled.blocks)
    at, merged = jnp.where(own, holders, none), jnp.where(published & ~own, holders, none)
    match config.eviction:
        case "lfu":
            return ranks.at[at].set(1, mode="drop").at[merged].add(1, mode="drop")
        case "fifo":
            turn = contents.next_content + jnp.cumsum(filled.valid, dtype=jnp.int32)
            return ranks.at[at].set(turn, mode="drop")
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
