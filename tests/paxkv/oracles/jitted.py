"""The jitted block manager, seen as the scenarios and the plain-Python one see it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxkv import checks, lifecycle, pool_metrics
from paxkv.events import EventKind, events_between, read_events
from paxkv.memory import Ask, Content
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.windows import Group
from tests.paxkv.oracles.blocks import Knobs, Layers, Prompt

PINS = 4  # blocks named in one call of pin, unpin or evict


def paged(memory: dict[str, Any]) -> Paged:
    """The memory that a scenario describes."""
    cached = {name: memory[name] for name in memory if name in PrefixCache.__dataclass_fields__}
    kept = {
        name: memory[name] for name in memory if name in Paged.__dataclass_fields__ and name not in ("cache", "groups")
    }
    groups = memory.get("groups", [])
    if "window" in memory or "chunk" in memory:
        groups = [{name: memory[name] for name in ("window", "chunk") if name in memory}]
    groups = tuple(Group(**{"block_size": memory["block_size"]} | group) for group in groups)
    return Paged(cache=PrefixCache(**cached) if memory.get("cache", True) else None, groups=groups, **kept)


def knobs(memory: Paged) -> Knobs:
    """The same for the plain-Python manager."""
    names = ("rows", "max_len", "num_blocks", "watermark_blocks", "free_order", "lookahead", "max_chunk", "forks")
    cache = {name: getattr(memory.cache, name) for name in ("duplicates", "eviction", "collide") if memory.cache}
    layers = tuple(Layers(group.block_size, group.window, group.chunk) for group in memory.layer_groups)
    return Knobs(layers=layers, cache=memory.cache is not None, **{n: getattr(memory, n) for n in names}, **cache)


def ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def padded(values: Any, width: int, filler: int) -> jax.Array:
    values = list(values)
    assert len(values) <= width, f"{len(values)} values for {width} places"
    return ints(values + [filler] * (width - len(values)))


def content(prompt: Prompt, width: int) -> Content:
    return Content(
        tokens=padded(prompt.tokens, width, 0),
        adapter=jnp.int32(prompt.adapter),
        salt=jnp.int32(prompt.salt),
        priority=jnp.int32(prompt.priority),
        resumed=jnp.bool(prompt.resumed),
        lookup=jnp.bool(prompt.lookup),
    )


def ask(memory: Paged, prompt: Prompt, known: int, final: int, sequences: int) -> Ask:
    # A prompt may be longer than its row: that is what NEVER is for.
    cut = Prompt(**{**vars(prompt), "tokens": prompt.tokens[: memory.max_len]})
    kept = content(cut, memory.max_len) if memory.cache else None
    return Ask(jnp.int32(known), jnp.int32(known), jnp.int32(final), content=kept, sequences=jnp.int32(sequences))


def ragged(memory: Paged, tokens: list[list[int]], most: int) -> tuple[jax.Array, jax.Array]:
    """Tokens row after row, and where each row's begin."""
    flat = [token for row in tokens for token in row]
    return padded(flat, memory.rows * most, 0), ints(np.cumsum([0] + [len(row) for row in tokens]))


@functools.cache
def quickly() -> dict[str, Any]:
    """How to compile in the shortest time, as that takes longer than all the tests run."""
    simple = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    simpler = simple | {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x).lower(0).compile(simpler)
    except jax.errors.JaxRuntimeError:  # not every version has this option
        return simple
    return simpler


class Operations:
    """The operations of one memory, each compiled when it is first wanted, as the code is then."""

    def __init__(self, memory: Paged):
        self.memory = memory
        self.compiled: dict[str, Any] = {}
        self.examples: dict[str, tuple] = {}  # arguments of each

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name not in self.compiled:
            self.examples[name] = arguments
            self.compiled[name] = self.compile(name, arguments)
        return self.compiled[name](*arguments)

    def compile(self, name: str, arguments: tuple) -> Any:
        operation = getattr(self, name)
        # A new function each time: of one that it has seen, jax knows the program, whatever was patched since.
        return jax.jit(lambda *given: operation(*given)).lower(*arguments).compile(quickly())

    def admit(self, state, asked):
        return self.memory.admit(state, asked)

    def append(self, state, counts):
        return self.memory.append(state, counts, self.memory.max_len)

    def append_one(self, state, counts):
        return self.memory.append(state, counts, 1)

    def publish(self, state, tokens, cu_lens):
        return self.memory.publish(state, tokens, cu_lens, self.memory.max_len)

    def publish_one(self, state, tokens, cu_lens):
        return self.memory.publish(state, tokens, cu_lens, 1)

    def background(self, state):
        return self.memory.background(state)

    def release(self, state, rows):
        return self.memory.release(state, rows)

    def fork(self, state, row, length, promised, kept):
        return self.memory.fork(state, row, length, promised, kept)

    def reorder(self, state, sources):
        return self.memory.reorder(state, sources)

    def copied(self, state):
        return lifecycle.end_copies(self.memory, state)

    def evict(self, state, ids):
        return lifecycle.evict(self.memory, state, ids)

    def pin(self, state, ids):
        return lifecycle.pin(self.memory, state, ids)

    def unpin(self, state, ids):
        return lifecycle.unpin(self.memory, state, ids)

    def reset(self, state):
        return lifecycle.reset_cache(self.memory, state)

    def bump_epoch(self, state):
        return lifecycle.bump_epoch(state)

    def slots(self, state, row, position):
        return self.memory.slots(state, row, position)

    def references(self, state):
        return state.pool.ref_counts

    def observe(self, state, new_lengths):
        final = jnp.where(state.seqs.active, state.seqs.lengths + 3, 0)
        used, counted = self.memory.usage(state, final), pool_metrics.usage_of_blocks(self.memory, state, final)
        differ = jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).astype(jnp.int32), used, counted))
        violations = checks.violations(self.memory, state) | {"usage_is_what_its_blocks_say": sum(differ)}
        return self.memory.demand(state, new_lengths), violations


@functools.cache
def operations(memory: Paged) -> Operations:
    """Shared by all tests that use an equal memory."""
    return Operations(memory)


class JittedManager:
    """`Manager` of the scenarios."""

    def __init__(self, memory: Paged, compiled: Operations | None = None):
        self.memory = memory
        self.operations = compiled or operations(memory)
        self.state = memory.init()
        self.seen = self.state  # when events were last asked for
        self.told: dict[int, tuple[int, ...]] = {}  # of each content that is cached: all tokens to its end

    def admit(self, prompt: Prompt, final: int, sequences: int = 1) -> tuple[int, int]:
        asked = ask(self.memory, prompt, len(prompt.tokens), final, sequences)
        self.state, row, outcome = self.operations("admit", self.state, asked)
        return int(row), int(outcome)

    def append(self, counts: list[int], most: int | None = None) -> int:
        self.state, outcome = self.operations("append_one" if most == 1 else "append", self.state, ints(counts))
        return int(outcome)

    def publish(self, tokens: list[list[int]], most: int | None = None) -> None:
        name = "publish_one" if most == 1 else "publish"
        flat, cu_lens = ragged(self.memory, tokens, most or self.memory.max_len)
        self.state = self.operations(name, self.state, flat, cu_lens)

    def background(self) -> None:
        if any(not group.sees_all for group in self.memory.layer_groups):
            self.state = self.operations("background", self.state)

    def release(self, rows: list[bool]) -> None:
        self.state = self.operations("release", self.state, jnp.asarray(rows, jnp.bool))

    def fork(self, row: int, length: int, promised: int, prompt: Prompt) -> tuple[int, int]:
        kept = content(prompt, self.memory.max_len) if self.memory.cache else None
        asked = jnp.int32(row), jnp.int32(length), jnp.int32(promised)
        self.state, child, outcome = self.operations("fork", self.state, *asked, kept)
        return int(child), int(outcome)

    def reorder(self, sources: list[int]) -> None:
        self.state = self.operations("reorder", self.state, ints(sources))

    def copied(self) -> None:
        self.state = self.operations("copied", self.state)

    def named(self, blocks: list[int]) -> jax.Array:
        return padded(blocks, max(PINS, self.memory.num_blocks), self.memory.num_blocks)

    def evict(self, blocks: list[int]) -> None:
        self.state = self.operations("evict", self.state, self.named(blocks))

    def pin(self, blocks: list[int]) -> int:
        self.state, outcome = self.operations("pin", self.state, self.named(blocks))
        return int(outcome)

    def unpin(self, blocks: list[int]) -> int:
        self.state, outcome = self.operations("unpin", self.state, self.named(blocks))
        return int(outcome)

    def reset(self) -> int:
        self.state, outcome = self.operations("reset", self.state)
        return int(outcome)

    def bump_epoch(self) -> None:
        self.state = self.operations("bump_epoch", self.state)

    def slot(self, row: int, position: int) -> int | None:
        slot = int(self.operations("slots", self.state, ints([row]), ints([position]))[0])
        return None if slot == self.memory.num_slots else slot

    def events(self) -> list[tuple]:
        """Follows the events as a router would: of a content it knows the tokens, and what came before it."""
        table = events_between(self.seen, self.state, 2 * self.memory.num_blocks + 1)
        self.seen = self.state
        happened = []
        for event in read_events(table):
            if event.kind == EventKind.CLEARED:
                self.told = {}
                happened.append(("cleared",))
            elif event.kind == EventKind.STORED:
                before = () if event.parent is None else self.told[event.parent]
                self.told[event.content] = before + event.tokens
                happened.append(("stored", self.told[event.content]))
            else:
                happened.append(("removed", self.told.pop(event.content)))
        return happened

    def page_groups(self, blocks: int) -> dict[str, int]:
        found = pool_metrics.page_groups(self.state, blocks)
        return {"used": int(found.used_blocks), "pinned": int(found.pinned), "needed": int(found.needed)}

    def view(self) -> dict[str, Any]:
        state, memory = jax.tree.map(np.asarray, self.state), self.memory
        none, pool, rows = memory.num_blocks, state.pool, range(memory.rows)
        free = [int(block) for block in pool.queue[int(pool.head) : int(pool.tail)] if block != none]
        word = int(state.seqs.faults.word)
        return {
            "tables": [[self.row_of(table, row) for row in rows] for table in state.tables],
            "lengths": state.seqs.lengths.tolist(),
            "references": np.asarray(self.operations("references", self.state)).tolist(),
            "free": free,
            "contents": self.contents_of(state),
            "copies": self.copies_of(state),
            "statistics": {name: int(count) for name, count in vars(state.stats).items()} if state.stats else {},
            "faults": {fault for fault in range(8) if word >> fault & 1},
        }

    @staticmethod
    def row_of(table: Any, row: int) -> list[int | None]:
        first, end = int(table.first[row]), int(table.end[row])
        return [None] * first + table.ids[row, first:end].tolist()

    def contents_of(self, state: Any) -> list[tuple | None]:
        """Of each block: content, parent content, identity, tokens."""
        if state.contents is None:
            return [None] * self.memory.num_blocks
        return [
            (record[0], record[1], tuple(record[3:6]), tuple(record[6:])) if record[0] else None
            for record in state.contents.records.tolist()
        ]

    def copies_of(self, state: Any) -> list[tuple[int, int]]:
        if state.copies is None:
            return []
        pairs = zip(state.copies.sources.tolist(), state.copies.destinations.tolist(), strict=True)
        return [pair for pair in pairs if pair[1] != self.memory.num_blocks]
