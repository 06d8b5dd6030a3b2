"""Physical blocks: in which order the free ones are taken, and how many references each of the others has.

The free blocks form one queue, taken from its front. It lies in a linear array with room on both sides, so that any
number of blocks joins at either end with one scatter, and each block remembers its place, so that it can leave from
anywhere: it leaves a hole that the front skips when it gets there. A transition costs what it moves, never what the
pool holds, but for one thing: when one side of the array is used up, the queue moves back to the middle. That takes a
pass over the array, once for at least `num_blocks` joins.
"""

import dataclasses
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.control_flow import read_rows, run_if


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """`num_blocks` blocks. The sentinel for "no block" is `num_blocks`: scatters drop it, gathers fill it.

    Blocks that are withheld are neither free nor held: they have no reference, and stand nowhere in the queue.
    """

    queue: jax.Array  # i32[3 * num_blocks]; ids from head to tail are free, a hole is the sentinel
    head: jax.Array  # i32[]; the next block to be taken stands here or behind it
    tail: jax.Array  # i32[]
    behind: jax.Array  # i32[]; from here to the tail are blocks that joined at the back
    num_free: jax.Array  # i32[]
    marks: (
        jax.Array
    )  # i32[num_blocks, 2]; where a free block stands in the queue (-1: it is held), and references to it
    # beyond the first (0 for a free one, -1 for one that is withheld). In one array, since they are read and written
    # together.

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self.marks.shape[0]

    @property
    def ref_counts(self) -> jax.Array:
        """References to each block, 0 for a free one: i32[num_blocks]."""
        return jnp.where(self.marks[:, 0] >= 0, 0, 1 + self.marks[:, 1])


def init_block_pool(num_blocks: int, usable: Int32[Array, ""] | None = None) -> BlockPool:
    """A pool of free blocks, handed out in ascending order of id; all but the first `usable` ones are withheld."""
    free = jnp.int32(num_blocks) if usable is None else usable
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    there = ids < free
    queue = jnp.full(3 * num_blocks, num_blocks, jnp.int32)
    zeros = jnp.zeros_like(ids)
    return BlockPool(
        queue=queue.at[num_blocks : 2 * num_blocks].set(jnp.where(there, ids, num_blocks)),
        head=jnp.int32(num_blocks),
        tail=num_blocks + free,
        behind=num_blocks + free,
        num_free=jnp.copy(free),  # an array of its own, as states are donated
        marks=jnp.stack([jnp.where(there, ids + num_blocks, -1), jnp.where(there, zeros, -1), zeros], axis=1),
    )


class Marks(NamedTuple):
    """What is marked at some blocks."""

    place: Int32[Array, " n"]  # in the queue; -1 for a block that is not free, or not of this pool
    extra_refs: Int32[Array, " n"]  # references beyond the first
    kept: Int32[Array, " n"]  # 1 if it is worth keeping: the others are taken before it


def look_at(pool: BlockPool, ids: Int32[Array, " n"]) -> Marks:
    """The marks of each block."""
    known = (ids >= 0) & (ids < pool.num_blocks)
    marks = read_rows(pool.marks, jnp.where(known, ids, 0))
    return Marks(*jnp.where(known[:, None], marks, -1).T)


def of_use(pool: BlockPool) -> Bool[Array, " num_blocks"]:
    """Blocks that are held, or free and worth keeping. A pass over the pool."""
    return (pool.marks[:, 0] < 0) | (pool.marks[:, 2] > 0)


def mark_kept(pool: BlockPool, ids: Int32[Array, " n"], kept: bool) -> BlockPool:
    """Marks blocks as worth keeping, or no longer. The sentinel marks empty places."""
    return dataclasses.replace(pool, marks=pool.marks.at[ids, 2].set(int(kept), mode="drop"))


def is_free(pool: BlockPool, ids: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Whether each block is free; False for an id that is not of this pool."""
    return look_at(pool, ids).place >= 0


def may_have_content(before: BlockPool, after: BlockPool) -> Bool[Array, ""]:
    """Whether a block that was taken between these two may have joined at the back, as those with content do."""
    return (after.num_free < before.num_free) & ((after.head > after.behind) | (after.head == before.head))


def take(
    pool: BlockPool, wanted: Bool[Array, " n"], ranking: Int32[Array, " num_blocks"] | None = None
) -> tuple[BlockPool, Int32[Array, " n"], Bool[Array, ""]]:
    """Takes one block for each wanted place, all of them or none.

    Args:
      pool: the pool.
      wanted: places that need a block.
      ranking: if given, blocks of lower rank are taken first, and only those of equal rank in the order of the queue.
        That sorts the whole queue.

    Returns:
      The pool, the ids (the sentinel where none was wanted, and everywhere if there were too few), and
      whether the pool could serve.
    """
    rank = jnp.cumsum(wanted, dtype=jnp.int32)  # 1 for the first block taken
    ok = rank[-1] <= pool.num_free
    count = jnp.where(ok, rank[-1], 0)
    if ranking is None:
        head, found = _front(pool, count, wanted.shape[0])
        pool = dataclasses.replace(pool, head=head)
    else:
        queue, found = _lowest(pool, ranking, count, wanted.shape[0])
        pool = dataclasses.replace(pool, queue=queue)
    ids = found.at[jnp.where(wanted & ok, rank - 1, wanted.shape[0])].get(mode="fill", fill_value=pool.num_blocks)
    held = jnp.array([-1, 0, 0], jnp.int32)  # whatever it was kept for is about to be lost
    marks = pool.marks.at[ids].set(jnp.broadcast_to(held, (ids.shape[0], 3)), mode="drop")
    return dataclasses.replace(pool, marks=marks, num_free=pool.num_free - count), ids, ok


def _front(pool: BlockPool, count: Int32[Array, ""], most: int) -> tuple[Int32[Array, ""], Int32[Array, " most"]]:
    """The first `count` (at most `most`) blocks of the queue, and where the queue begins without them.

    Looks at the front of the queue only, a window at a time: a gather from all of it would be charged, and split over
    threads, as if it read all of it. More than one window is needed only if there are holes.
    """
    none = pool.num_blocks
    depth = min(most, none)

    def look(carry: tuple) -> tuple:
        head, got, found = carry
        base = jnp.minimum(head, pool.queue.shape[0] - depth)
        window = jax.lax.dynamic_slice(pool.queue, (base,), (depth,))
        place = base + jnp.arange(depth, dtype=jnp.int32)
        here = (window != none) & (place >= head) & (place < pool.tail)
        rank = got + jnp.cumsum(here, dtype=jnp.int32)
        found = found.at[jnp.where(here & (rank <= count), rank - 1, most)].set(window, mode="drop")
        enough = rank[-1] >= count
        head = base + jnp.where(enough, jnp.argmax(rank == count).astype(jnp.int32) + 1, depth)
        return head, jnp.minimum(rank[-1], count), found

    start = (pool.head, jnp.int32(0), jnp.full(most, none, jnp.int32))
    head, _, found = jax.lax.while_loop(lambda carry: carry[1] < count, look, start)
    return head, found


def _lowest(
    pool: BlockPool, ranking: Int32[Array, " num_blocks"], count: Int32[Array, ""], most: int
) -> tuple[Int32[Array, " places"], Int32[Array, " most"]]:
    """The first `count` blocks by rank, then by place, and the queue with holes where they stood."""
    none, size = pool.num_blocks, pool.queue.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    here = (pool.queue != none) & (place >= pool.head) & (place < pool.tail)
    order = jnp.lexsort((ranking.at[pool.queue].get(mode="fill", fill_value=0), ~here)).astype(jnp.int32)
    chosen = order[: min(most, size)]
    chosen = jnp.where(jnp.arange(chosen.shape[0], dtype=jnp.int32) < count, chosen, size)
    found = (
        jnp.full(most, none, jnp.int32)
        .at[: chosen.shape[0]]
        .set(pool.queue.at[chosen].get(mode="fill", fill_value=none))
    )
    return pool.queue.at[chosen].set(none, mode="drop"), found


def retain(pool: BlockPool, ids: Int32[Array, " n"], *, distinct: bool = False) -> BlockPool:
    """Adds one reference to each block, free or held; a free one leaves the queue.

    Args:
      pool: the pool.
      ids: a block for each reference to add; the sentinel marks empty places.
      distinct: whether no block is listed twice, which spares a sort.
    """
    none, size = pool.num_blocks, pool.queue.shape[0]
    place, extra, kept = look_at(pool, ids)
    mentions, last = count_mentions(ids, distinct=distinct)
    free = place >= 0
    others = jnp.where(free, -1, extra)  # one less than the references it has
    return dataclasses.replace(
        pool,
        queue=pool.queue.at[jnp.where(free & last, place, size)].set(none, mode="drop"),
        num_free=pool.num_free - jnp.sum(free & last, dtype=jnp.int32),
        marks=pool.marks.at[jnp.where(last, ids, none)].set(
            jnp.stack([jnp.full_like(place, -1), others + mentions, kept], axis=1), mode="drop"
        ),
    )


def give_back(
    pool: BlockPool,
    ids: Int32[Array, " n"],
    to_back: Bool[Array, " n"] | None = None,
    *,
    kept_to_back: bool = False,
    distinct: bool = False,
) -> tuple[BlockPool, Bool[Array, ""]]:
    """Drops one reference to each block; a block that nobody refers to any more becomes free.

    The last block listed is the first to join the queue. Without `to_back`, and where it is False, blocks join at
    the front, so that the one listed last is taken next: its memory is the warmest. Elsewhere they join at the back,
    the one listed last before the others: the tail of a sequence is the part that the fewest others want.

    Args:
      pool: the pool.
      ids: a block for each reference to drop. The sentinel marks places with nothing to return.
      to_back: blocks that, if they become free, are to be taken last of all.
      kept_to_back: whether those marked as worth keeping are, too.
      distinct: whether no block is listed twice, which spares a sort.

    Returns:
      The pool, and whether every id was a block of this pool with as many references as it was listed times. If not,
      nothing is given back at all.
    """
    none, size = pool.num_blocks, pool.queue.shape[0]
    most = jnp.minimum(jnp.sum(ids != none, dtype=jnp.int32), none)
    pool = run_if((most > pool.head) | (most > size - pool.tail), _recentre, pool)

    place, extra, kept = look_at(pool, ids)
    mentions, last = count_mentions(ids, distinct=distinct)
    left = extra + 1 - mentions
    held = (ids >= 0) & (ids < none) & (place < 0)
    ok = ~jnp.any((ids != none) & (~held | (left < 0)))
    freed = held & last & ok & (left == 0)
    behind = jnp.zeros_like(freed) if to_back is None else freed & to_back
    behind = behind | (freed & (kept > 0)) if kept_to_back else behind
    before = freed & ~behind
    rank_before = jnp.cumsum(before, dtype=jnp.int32)
    rank_behind = jnp.cumsum(behind, dtype=jnp.int32)
    num_before, num_behind = rank_before[-1], rank_behind[-1]
    place = jnp.where(before, pool.head - rank_before, pool.tail + num_behind - rank_behind)
    mark = jnp.stack([jnp.where(freed, place, -1), jnp.maximum(left - 1, 0), kept], axis=1)
    return BlockPool(
        queue=pool.queue.at[jnp.where(freed, place, size)].set(ids, mode="drop"),
        behind=pool.behind,
        head=pool.head - num_before,
        tail=pool.tail + num_behind,
        num_free=pool.num_free + num_before + num_behind,
        marks=pool.marks.at[jnp.where(held & last & ok, ids, none)].set(mark, mode="drop"),
    ), ok


def count_mentions(ids: Int32[Array, " n"], *, distinct: bool = False) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """How often each block is listed, and which place is the last to do so."""
    if distinct:
        return jnp.ones_like(ids), jnp.ones(ids.shape, jnp.bool)
    order = jnp.argsort(ids, stable=True)
    in_order = ids[order]
    last = jnp.concatenate([in_order[1:] != in_order[:-1], jnp.ones(1, jnp.bool)])
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    begin = jax.lax.cummax(jnp.where(jnp.roll(last, 1).at[0].set(True), place, 0))
    return (
        jnp.zeros_like(ids).at[order].set(place - begin + 1),
        jnp.zeros(ids.shape, jnp.bool).at[order].set(last),
    )


_WINDOW = 1024


def _recentre(pool: BlockPool) -> BlockPool:
    """Closes the holes of the queue and lets it begin in the middle of its array.

    In place, a window at a time: towards the front first, then, if it begins too far in front, back again from its
    end. Each window is read in the turn before it is written over: a turn that read and wrote would have to keep a
    copy of everything.
    """
    none, size = pool.num_blocks, pool.queue.shape[0]
    depth = min(_WINDOW, none)
    offset = jnp.arange(depth, dtype=jnp.int32)
    base = jnp.minimum(pool.head, none)

    def read(queue: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(queue, (jnp.clip(start, 0, size - depth),), (depth,))

    def write(queue: jax.Array, marks: jax.Array, ids: jax.Array, here: jax.Array, to: jax.Array) -> tuple:
        queue = queue.at[jnp.where(here, to, size)].set(ids, mode="drop")
        return queue, marks.at[jnp.where(here, ids, none), 0].set(to, mode="drop")

    def forward(carry: tuple) -> tuple:
        queue, marks, window, start, done, behind = carry
        place = jnp.clip(start, 0, size - depth) + offset
        here = (window != none) & (place >= start) & (place < pool.tail)
        to = done + jnp.cumsum(here, dtype=jnp.int32) - 1
        queue, marks = write(queue, marks, window, here, to)
        behind -= jnp.sum(~here & (place >= jnp.maximum(start, pool.head)) & (place < pool.behind), dtype=jnp.int32)
        return queue, marks, read(queue, start + depth), start + depth, to[-1] + 1, behind

    def backward(carry: tuple) -> tuple:
        queue, marks, window, start = carry
        place = jnp.clip(start, 0, size - depth) + offset
        here = (place >= jnp.maximum(start, base)) & (place < start + depth) & (place < base + pool.num_free)
        queue, marks = write(queue, marks, window, here, place + none - base)
        return queue, marks, read(queue, start - depth), start - depth

    forth = (pool.queue, pool.marks, read(pool.queue, pool.head), pool.head, base, pool.behind)
    queue, marks, _, _, _, behind = jax.lax.while_loop(lambda carry: carry[3] < pool.tail, forward, forth)
    start = jnp.where(base < none, base + pool.num_free - depth, base - depth)
    back = (queue, marks, read(queue, start), start)
    queue, marks, _, _ = jax.lax.while_loop(lambda carry: carry[3] > base - depth, backward, back)
    return dataclasses.replace(
        pool,
        queue=queue,
        marks=marks,
        head=jnp.int32(none),
        tail=none + pool.num_free,
        behind=jnp.maximum(behind, pool.head) - pool.head + none,
    )
