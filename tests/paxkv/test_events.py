import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import lifecycle
from paxkv.events import Event, EventKind, EventTable, events_between, read_events
from paxkv.memory import Ask, content
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED
MEMORY = Paged(rows=3, max_len=12, block_size=4, num_blocks=6, cache=PrefixCache(publish="on_compute"))
P, Q = list(range(100, 112)), list(range(200, 212))


class Server:
    """A memory that is told after every call what happened since the last one."""

    def __init__(self, memory=MEMORY):
        self.memory, self.state = memory, memory.init()
        self.last = self.state

    def admit(self, tokens, **identity):
        padded = jnp.array(tokens + [0] * (self.memory.max_len - len(tokens)), jnp.int32)
        known = jnp.int32(len(tokens))
        ask = Ask(known, known, known, content(padded, **identity))
        self.state, row, outcome = compiled(self.memory, "admit")(self.state, ask)
        assert outcome == 0
        return int(row)

    def store(self, tokens, row=None, **identity):
        row = self.admit(tokens, **identity) if row is None else row
        hit = int(self.state.seqs.lengths[row])
        new = [len(tokens) - hit if r == row else 0 for r in range(self.memory.rows)]
        self.state, outcome = compiled(self.memory, "append")(self.state, jnp.array(new, jnp.int32))
        assert outcome == 0
        self.publish({row: tokens[hit:]})
        return row

    def publish(self, tokens):
        flat = [t for row in sorted(tokens) for t in tokens[row]]
        cu_lens = np.cumsum([0] + [len(tokens.get(row, [])) for row in range(self.memory.rows)])
        flat += [0] * (self.memory.rows * self.memory.max_len - len(flat))
        self.state = compiled(self.memory, "publish")(
            self.state, jnp.array(flat, jnp.int32), jnp.array(cu_lens, jnp.int32)
        )

    def release(self, row):
        self.state = compiled(self.memory, "release")(self.state, jnp.arange(self.memory.rows) == row)

    def evict(self, block):
        self.state = compiled(self.memory, "evict")(self.state, jnp.array([block], jnp.int32))

    def reset(self):
        self.state, outcome = compiled(self.memory, "reset")(self.state)
        return int(outcome)

    def look(self, most=12):
        table = events_between(self.last, self.state, most)
        self.last = self.state
        return read_events(table)


COMPILED = {}
QUICKLY = {"xla_backend_optimization_level": 0}


def compiled(memory, name):
    """A transition, compiled when it is first called."""

    def call(*arguments):
        if (memory, name) not in COMPILED:
            COMPILED[memory, name] = jax.jit(transition(memory, name)).lower(*arguments).compile(QUICKLY)
        return COMPILED[memory, name](*arguments)

    return call


def transition(memory, name):
    width = memory.max_len
    functions = {
        "admit": memory.admit,
        "append": lambda state, new: memory.append(state, new, width),
        "publish": lambda state, tokens, cu_lens: memory.publish(state, tokens, cu_lens, width),
        "release": memory.release,
        "evict": lambda state, ids: lifecycle.evict(memory, state, ids),
        "reset": lambda state: lifecycle.reset_cache(memory, state),
    }
    return functions[name]


def test_a_prompt_is_stored_evicted_for_another_and_cleared():
    server = Server(Paged(rows=3, max_len=12, block_size=4, num_blocks=3, cache=PrefixCache(publish="on_compute")))
    row = server.store(P)
    first, second, third = (tuple(P[i : i + 4]) for i in (0, 4, 8))
    assert server.look() == [
        Event(STORED, 0, 1, None, first, 0, 0, 0),
        Event(STORED, 1, 2, 1, second, 0, 0, 0),
        Event(STORED, 2, 3, 2, third, 0, 0, 0),
    ]
    server.release(row)
    assert server.look() == []
    row = server.store(P[:4] + Q[:8])
    assert server.look() == [
        Event(REMOVED, 2, 3, 2, third, 0, 0, 0),
        Event(REMOVED, 1, 2, 1, second, 0, 0, 0),
        Event(STORED, 2, 4, 1, tuple(Q[:4]), 0, 0, 0),
        Event(STORED, 1, 5, 4, tuple(Q[4:8]), 0, 0, 0),
    ]
    assert server.reset() != 0
    assert server.look() == []
    server.release(row)
    assert server.reset() == 0
    assert server.look() == [Event(CLEARED)]
    assert server.look() == []


def test_a_content_is_removed_when_its_last_copy_goes():
    server = Server()
    rows = [server.admit(P[:5]), server.admit(P[:5])]
    server.state, _ = compiled(MEMORY, "append")(server.state, jnp.array([5, 5, 0], jnp.int32))
    server.publish(dict.fromkeys(rows, P[:5]))
    assert [(event.kind, event.content) for event in server.look()] == [(STORED, 1)]
    copies = np.flatnonzero(server.state.contents.records[:, 0] == 1)
    assert copies.size == 2
    server.evict(copies[0])
    assert server.look() == []
    server.evict(copies[1])
    assert server.look() == [Event(REMOVED, int(copies[1]), 1, None, tuple(P[:4]), 0, 0, 0)]


def test_copies_that_go_together_are_one_removal():
    server = Server()
    rows = [server.admit(P[:5]), server.admit(P[:5])]
    server.state, _ = compiled(MEMORY, "append")(server.state, jnp.array([5, 5, 0], jnp.int32))
    server.publish(dict.fromkeys(rows, P[:5]))
    server.look()
    for block in np.flatnonzero(server.state.contents.records[:, 0] == 1):
        server.evict(block)
    assert [(event.kind, event.content) for event in server.look()] == [(REMOVED, 1)]


def test_what_is_removed_and_stored_again_is_both():
    server = Server()
    server.release(server.store(P[:5]))
    server.look()
    server.evict(0)
    server.store(P[:5])
    events = server.look()
    assert [(event.kind, event.content, event.tokens) for event in events] == [
        (REMOVED, 1, tuple(P[:4])),
        (STORED, 2, tuple(P[:4])),
    ]


def test_what_is_stored_after_a_reset_follows_the_clearing():
    server = Server()
    server.release(server.store(P[:9]))
    server.look()
    assert server.reset() == 0
    server.store(Q[:5], adapter=3, salt=8)
    cleared, stored = server.look()
    assert cleared == Event(CLEARED)
    assert stored == Event(STORED, stored.block, stored.content, None, tuple(Q[:4]), 3, 8, 0)


def test_too_many_events_are_counted_and_refused_not_dropped():
    server = Server()
    server.store(P)
    table = events_between(server.last, server.state, 2)
    assert (int(table.count), int(table.overflow)) == (2, 1)
    assert np.asarray(table.content).tolist() == [1, 2]
    with pytest.raises(ValueError, match="most: expected room for 3 events, got 2"):
        read_events(table)


def test_a_memory_without_a_cache_has_no_events():
    memory = Paged(rows=1, max_len=4, block_size=4, num_blocks=1)
    with pytest.raises(ValueError, match="expected states of a memory with a prefix cache"):
        events_between(memory.init(), memory.init(), 1)
    with pytest.raises(ValueError, match="most"):
        events_between(MEMORY.init(), MEMORY.init(), 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [1, 4])
def test_a_mirror_that_follows_the_events_knows_what_is_cached(seed, interval):
    """At any interval the events lead to what is cached; after every call none of them is missing."""
    draw, server = random.Random(seed), Server()
    mirror, seen, rows = {}, set(), {}
    for step in range(1, 61):
        match draw.choice(["store", "store", "release", "evict", "reset"]):
            case "store" if len(rows) < 2:
                tokens = (draw.choice([P, Q])[: draw.choice([4, 8])] + draw.choice([P, Q])[:4])[: draw.randint(1, 9)]
                if int(server.state.pool.num_free) >= 3:
                    rows[server.store(tokens)] = tokens
            case "release" if rows:
                row = draw.choice(list(rows))
                del rows[row]
                server.release(row)
            case "evict":
                server.evict(draw.randrange(MEMORY.num_blocks))
            case "reset":
                server.reset()
        if step % interval:
            continue
        for event in server.look():
            if event.kind == CLEARED:
                mirror.clear()
            elif event.kind == STORED:
                assert event.content not in mirror
                assert event.content not in seen
                assert event.parent is None or event.parent in mirror or interval > 1
                seen.add(event.content)
                mirror[event.content] = (event.parent or 0, *event.tokens)
            else:
                assert mirror.pop(event.content) == (event.parent or 0, *event.tokens)
        records = np.asarray(server.state.contents.records)
        cached = {r[0]: (r[1], *r[6:]) for r in records.tolist() if r[0]}
        assert mirror == cached
    assert len(seen) > 5


def test_events_can_be_taken_inside_a_scan():
    """One table a step, so that a trace that never leaves the device can still be told."""
    server = Server()
    server.store(P)
    before, after = server.last, server.state

    def step(state, ids):
        new = lifecycle.evict(MEMORY, state, ids[None])
        return new, events_between(state, new, 2)

    _, tables = jax.lax.scan(step, after, jnp.array([5, 2, 0], jnp.int32))
    each = [EventTable(*(leaf[i] for leaf in jax.tree.leaves(tables))) for i in range(3)]
    assert [[e.content for e in read_events(table)] for table in each] == [[], [3], [1]]
    assert len(read_events(events_between(before, after, 3))) == 3
