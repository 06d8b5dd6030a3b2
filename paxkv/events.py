"""What became cached and what is cached no more, for routers and other caches that mirror a prefix cache.

Nothing is recorded while the memory works. Two states tell what happened between them, and who does not ask pays
nothing. A content is stored when its first block is published and removed when its last copy goes: copies come and go
unseen. Contents that came and went between the two states are not told, so whoever wants to see all of them looks
after every step: one step publishes after it has evicted, so that nothing it stores is gone before the next look. At
any interval the events lead from what was cached to what is.
"""

import dataclasses
import enum
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from paxkv.paged_state import PagedState
from paxkv.prefix_cache import Contents
from paxkv.sizes import require_int


class EventKind(enum.IntEnum):
    """What happened."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3  # everything that was cached is gone


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EventTable:
    """Events in order, the first `count` entries; the others are zero, and so is what an event does not have."""

    count: jax.Array  # i32[]
    overflow: jax.Array  # i32[]; events that came after these and had no room
    kind: jax.Array  # i32[most]; `EventKind`
    block: jax.Array  # i32[most]; that holds or held the content; of several the lowest
    content: jax.Array  # i32[most]; never used again
    parent: jax.Array  # i32[most]; the content before it, not positive if there is none
    identity: jax.Array  # i32[most, 3]; adapter, salt, weight epoch
    tokens: jax.Array  # i32[most, widest block]; then zeros, in groups of layers with smaller blocks


@jax.jit(static_argnames="most")
def events_between(before: PagedState, after: PagedState, most: int) -> EventTable:
    """What happened to the contents of a prefix cache between two of its states.

    First, if the cache was reset, that it was cleared; otherwise what was removed, the youngest content first, so that
    children go before their parents. Then what was stored, parents before children. Sorts the blocks of the pool.

    Args:
      before: the earlier state.
      after: the later state.
      most: events that there is room for.

    Raises:
      ValueError: if the memory has no prefix cache, or `most` is not positive.
    """
    require_int("most", most)
    if before.contents is None or after.contents is None or before.stats is None or after.stats is None:
        raise ValueError("before, after: expected states of a memory with a prefix cache, got one without")
    cleared = before.stats.resets != after.stats.resets
    gone = _contents_not_in(before.contents, after.contents) & ~cleared
    come = _contents_not_in(after.contents, before.contents)

    blocks = jnp.concatenate([_by_content(before.contents)[::-1], _by_content(after.contents)])
    happened = jnp.concatenate([gone[::-1], come])
    start = cleared.astype(jnp.int32)
    total = start + jnp.sum(happened, dtype=jnp.int32)
    at = jnp.where(happened, start + jnp.cumsum(happened, dtype=jnp.int32) - 1, most)
    # Which entry of the two lists each event is: that far fewer than all are events is the rule.
    entry = jnp.full(most, 2 * gone.shape[0], jnp.int32)
    entry = entry.at[at].set(jnp.arange(2 * gone.shape[0], dtype=jnp.int32), mode="drop")
    block = blocks.at[entry].get(mode="fill", fill_value=gone.shape[0])
    removed, stored = entry < gone.shape[0], (entry >= gone.shape[0]) & (entry < 2 * gone.shape[0])
    record = jnp.where(
        stored[:, None],
        after.contents.records.at[block].get(mode="fill", fill_value=0),
        before.contents.records.at[block].get(mode="fill", fill_value=0),
    )
    kind = jnp.where(removed, EventKind.REMOVED, jnp.where(stored, EventKind.STORED, 0))
    kind = jnp.where(cleared & (jnp.arange(most) == 0), EventKind.CLEARED, kind)
    return EventTable(
        count=jnp.minimum(total, most),
        overflow=jnp.maximum(total - most, 0),
        kind=kind.astype(jnp.int32),
        block=jnp.where(removed | stored, block, 0),
        content=record[:, 0],
        parent=record[:, 1],
        identity=record[:, 3:6],
        tokens=record[:, 6:],
    )


def _by_content(contents: Contents) -> Int32[Array, " num_blocks"]:
    """The blocks, ordered by what they hold, copies by block."""
    return jnp.argsort(contents.records[:, 0], stable=True).astype(jnp.int32)


def _contents_not_in(contents: Contents, others: Contents) -> Bool[Array, " num_blocks"]:
    """For each block in the order of `_by_content`: whether it is the first to hold a content that the others lack."""
    held, other = jnp.sort(contents.records[:, 0]), jnp.sort(others.records[:, 0])
    is_first = jnp.concatenate([jnp.ones(1, jnp.bool), held[1:] != held[:-1]])
    found = other.at[jnp.searchsorted(other, held)].get(mode="fill", fill_value=0) == held
    return (held != 0) & is_first & ~found


class Event(NamedTuple):
    """One event, on the host. What `CLEARED` does not have is None or empty."""

    kind: EventKind
    block: int | None = None
    content: int | None = None
    parent: int | None = None  # None for a first block, and for one whose beginning had left the view
    tokens: tuple[int, ...] = ()
    adapter: int | None = None
    salt: int | None = None
    epoch: int | None = None


def read_events(table: EventTable) -> list[Event]:
    """Host side: the events of a table, in order.

    Raises:
      ValueError: if some had no room: a mirror that missed an event is wrong from then on.
    """
    table = jax.tree.map(np.asarray, table)
    if table.overflow:
        raise ValueError(
            f"most: expected room for {int(table.count + table.overflow)} events, got {table.kind.shape[0]}; raise it, "
            "or look more often"
        )
    events = []
    for index in range(int(table.count)):
        kind = EventKind(int(table.kind[index]))
        if kind is EventKind.CLEARED:
            events.append(Event(kind))
            continue
        parent = int(table.parent[index])
        adapter, salt, epoch = table.identity[index].tolist()
        events.append(
            Event(
                kind=kind,
                block=int(table.block[index]),
                content=int(table.content[index]),
                parent=parent if parent > 0 else None,
                tokens=tuple(table.tokens[index].tolist()),
                adapter=adapter,
                salt=salt,
                epoch=epoch,
            )
        )
    return events
