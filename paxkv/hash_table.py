"""An open-addressing table from 64-bit keys to blocks: buckets of eight, and two buckets for each key.

A key's entry goes to the emptier of its two buckets (Azar et al., 1994), which at most half full practically never
overflow. There is no probing beyond the two buckets, so an entry is removed by emptying it: no tombstones, no
rehashing. A bucket is one row of 64 bytes: eight tags, then the eight blocks they belong to.

The table takes duplicates of a key, one entry for each block. Tags are 32 bits of the key, so whoever looks up must
compare what the block really holds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paxkv.chain_hash import mix
from paxkv.control_flow import read_rows

WIDTH = 8  # entries in a bucket
WAYS = 2 * WIDTH  # entries that a key can be in


def init_table(num_blocks: int) -> Int32[Array, "buckets ways"]:
    """An empty table for `num_blocks` entries, at most half full. Empty entries hold the sentinel `num_blocks`."""
    buckets = 2
    while buckets * WIDTH < 2 * num_blocks:
        buckets *= 2
    return jnp.full((buckets, WAYS), num_blocks, jnp.int32)


class Ways(NamedTuple):
    """The two buckets of each key, side by side."""

    blocks: Int32[Array, "n ways"]  # the sentinel in an empty entry
    same: Bool[Array, "n ways"]  # the entry is not empty, and has the key's tag
    entries: Int32[Array, "n 2"]  # where each bucket begins


def look_up(table: Int32[Array, "buckets ways"], keys: UInt32[Array, "n 2"], none: int) -> Ways:
    """Everything that the table has in the buckets of each key."""
    buckets = _buckets(keys, table.shape[0])
    rows = read_rows(table, buckets.reshape(-1)).reshape(-1, 2, WAYS)
    tag, blocks = rows[:, :, :WIDTH], rows[:, :, WIDTH:]
    same = (tag == tags(keys)[:, None, None]) & (blocks != none)
    return Ways(blocks.reshape(-1, WAYS), same.reshape(-1, WAYS), buckets * WIDTH)


def empty_entry(ways: Ways, none: int) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """The first empty entry in the emptier bucket of each key, and whether there is one."""
    empty = (ways.blocks == none).reshape(-1, 2, WIDTH)
    room = jnp.sum(empty, axis=2, dtype=jnp.int32)
    second = room[:, 1] > room[:, 0]
    bucket = jnp.where(second, ways.entries[:, 1], ways.entries[:, 0])
    place = jnp.argmax(jnp.where(second[:, None], empty[:, 1], empty[:, 0]), axis=1).astype(jnp.int32)
    return bucket + place, jnp.max(room, axis=1) > 0


def first_claims(entries: Int32[Array, " n"], wanted: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Of all that want the same entry, the first. Compares all pairs."""
    place = jnp.arange(entries.shape[0], dtype=jnp.int32)
    rival = (entries[:, None] == entries[None, :]) & wanted[None, :] & (place[None, :] < place[:, None])
    return wanted & ~jnp.any(rival, axis=1)


def fill(
    table: Int32[Array, "buckets ways"],
    entries: Int32[Array, " n"],
    keys: UInt32[Array, "n 2"],
    blocks: Int32[Array, " n"],
    wanted: Bool[Array, " n"],
) -> Int32[Array, "buckets ways"]:
    """Writes tag and block of each wanted key into its entry."""
    bucket, place = _place(table, entries, wanted)
    where = jnp.stack([place, WIDTH + place], axis=1)
    return table.at[bucket[:, None], where].set(jnp.stack([tags(keys), blocks], axis=1), mode="drop")


def clear(
    table: Int32[Array, "buckets ways"], entries: Int32[Array, " n"], wanted: Bool[Array, " n"], none: int
) -> Int32[Array, "buckets ways"]:
    """Empties the wanted entries."""
    bucket, place = _place(table, entries, wanted)
    return table.at[bucket, WIDTH + place].set(none, mode="drop")


def tags_at(table: Int32[Array, "buckets ways"], entries: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The tag in each entry."""
    return table.at[entries // WIDTH, entries % WIDTH].get(mode="fill", fill_value=0)


def _place(
    table: Int32[Array, "buckets ways"], entries: Int32[Array, " n"], wanted: Bool[Array, " n"]
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    return jnp.where(wanted, entries // WIDTH, table.shape[0]), entries % WIDTH


def tags(keys: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
    """What an entry remembers of its key."""
    return jax.lax.bitcast_convert_type(keys[:, 1], jnp.int32)


def _buckets(keys: UInt32[Array, "n 2"], buckets: int) -> Int32[Array, "n 2"]:
    """The two buckets of each key, never the same one twice. `buckets` is a power of two."""
    first = keys[:, 0] & jnp.uint32(buckets - 1)
    step = 1 + (mix(keys[:, 0] ^ keys[:, 1]) & jnp.uint32(buckets - 2))  # odd, from 1 to buckets - 1
    second = (first + step) & jnp.uint32(buckets - 1)
    return jnp.stack([first, second], axis=1).astype(jnp.int32)
