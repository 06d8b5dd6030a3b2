"""A memory and its oracle, driven together and compared in everything after every operation."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np

from paxkv import checks
from paxkv.contiguous import VAttention
from paxkv.memory import Ask
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.reserved import Reserved
from tests.paxkv.oracles.paged import PagedOracle
from tests.paxkv.oracles.reserved import ReservedOracle
from tests.paxkv.oracles.vattention import VAttentionOracle

ORACLES = {Paged: PagedOracle, VAttention: VAttentionOracle, Reserved: ReservedOracle}


# Small enough that memory is nearly always short, odd enough that nothing divides anything.
MEMORIES = {
    "paged_1": Paged(rows=3, max_len=10, block_size=1, num_blocks=14),
    "paged_3_watermark": Paged(rows=5, max_len=11, block_size=3, num_blocks=9, watermark_blocks=1),
    "paged_3_fifo": Paged(rows=4, max_len=11, block_size=3, num_blocks=9, free_order="fifo"),
    "paged_16": Paged(rows=4, max_len=176, block_size=16, num_blocks=10),
    "vattention_whole": VAttention(rows=4, max_len=27, num_groups=12, page_bytes=8, token_bytes=2, buffers=6),
    "vattention_straddling": VAttention(
        rows=3, max_len=17, num_groups=8, page_bytes=10, token_bytes=4, buffers=2, deferred_reclaim=False
    ),
    "vattention_large_token": VAttention(
        rows=4,
        max_len=9,
        num_groups=12,
        page_bytes=3,
        token_bytes=5,
        buffers=2,
        background_groups=1,
        watermark_groups=2,
    ),
    "vattention_far_ahead": VAttention(
        rows=6,
        max_len=12,
        num_groups=12,
        page_bytes=4,
        token_bytes=2,
        buffers=3,
        lookahead_steps=5,
        background_groups=4,
    ),
    "reserved_max_one_row": Reserved(rows=1, max_len=2, num_slots=5, policy="max"),
    "reserved_pow2": Reserved(rows=8, max_len=7, num_slots=27, policy="pow2"),
    "reserved_oracle": Reserved(rows=6, max_len=13, num_slots=44, policy="oracle", min_block=4),
    "reserved_whole_tree": Reserved(rows=8, max_len=6, num_slots=32, policy="oracle"),
}


def ints(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def ask(known: int, prompt: int | None = None, final: int | None = None) -> Ask:
    prompt = known if prompt is None else prompt
    final = known if final is None else final
    return Ask(known_tokens=jnp.int32(known), prompt_tokens=jnp.int32(prompt), final_tokens=jnp.int32(final))


def max_chunk(memory) -> int:
    """The bound of tokens per append that these tests use: more than two blocks, less than the longest sequence."""
    return max(1, (memory.max_len * 2) // 3)


def observe(memory, state, new_lengths, final_lengths):
    """What `Oracle.view` tells, of the real memory."""
    seqs = memory.seqs(state)
    used = memory.usage(state, final_lengths)
    calls = memory.map_calls(state)
    row, position = jnp.meshgrid(
        jnp.arange(-1, memory.rows + 1, dtype=jnp.int32),
        jnp.arange(-1, memory.max_len + 2, dtype=jnp.int32),
        indexing="ij",
    )
    view = {
        "active": seqs.active,
        "lengths": seqs.lengths,
        "promised": seqs.promised,
        "fault_word": seqs.faults.word,
        "fault_row": seqs.faults.row,
        "demand": memory.demand(state, new_lengths),
        "held": memory.held(state),
        "available": memory.available(state),
        "map_calls": jnp.stack([calls.sync, calls.background, calls.unmap]),
        "usage": jnp.stack([used.tokens, used.reserved, used.internal, used.external, used.allocated]),
        "owners": memory.owners(state),
        "slots": memory.slots(state, row.reshape(-1), position.reshape(-1)).reshape(row.shape),
    }
    if isinstance(memory, Paged):
        place = jnp.arange(memory.num_blocks)
        next_free = state.pool.queue.at[state.pool.head + place].get(mode="fill", fill_value=-1)
        view["tables"] = state.tables[0].ids
        view["next_free"] = jnp.where(place < state.pool.num_free, next_free, -1)
        view["references"] = state.pool.ref_counts
    elif isinstance(memory, VAttention):
        view["mapped"] = state.mapped
    else:
        view.update(starts=state.starts, orders=state.orders, sizes=state.sizes)
    return view, checks.violations(memory, state)


def compile_operations(memory, names) -> dict:
    """The named operations, compiled as the code is now: a patch that comes later does not reach them."""
    state, per_row = memory.init(), jnp.zeros(memory.rows, jnp.int32)
    known = {
        "admit": (lambda state, asked: memory.admit(state, asked), (state, ask(1))),
        "append": (lambda state, tokens: memory.append(state, tokens, max_chunk(memory)), (state, per_row)),
        "release": (lambda state, rows: memory.release(state, rows), (state, per_row > 0)),
        "background": (lambda state: memory.background(state), (state,)),
        "observe": (lambda *of: observe(memory, *of), (state, per_row, per_row)),
    }
    quickly = {"xla_backend_optimization_level": 0}  # compiling takes longer than all the tests run
    return {name: jax.jit(known[name][0]).lower(*known[name][1]).compile(quickly) for name in names}


@functools.cache
def operations(memory) -> dict:
    """All operations, compiled once for all tests that use an equal memory."""
    return compile_operations(memory, ["admit", "append", "release", "background", "observe"])


def without_faults(memory, state) -> list[np.ndarray]:
    clean = dataclasses.replace(memory.seqs(state), faults=None)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(dataclasses.replace(state, seqs=clean))]


class Lockstep:
    """Raises `AssertionError` as soon as memory and oracle differ, or memory breaks one of its invariants."""

    def __init__(self, memory, compiled=None):
        self.memory = memory
        self.oracle = ORACLES[type(memory)](memory)
        self.operations = compiled or operations(memory)
        self.state = memory.init()
        self.count = 0
        self.compare("init")

    def admit(self, known: int, prompt: int | None = None, final: int | None = None) -> tuple[int, int]:
        asked = ask(known, prompt, final)
        before = self.state
        self.state, row, outcome = self.operations["admit"](self.state, asked)
        answer = int(row), int(outcome)
        expected = self.oracle.admit(int(asked.known_tokens), int(asked.prompt_tokens), int(asked.final_tokens))
        assert answer == expected, f"admit({known}, {prompt}, {final}): {answer} instead of {expected}"
        self.compare(f"admit({known}, {prompt}, {final})", before, failed=answer[1] != Outcome.OK)
        return answer

    def append(self, tokens: list[int]) -> int:
        before = self.state
        self.state, outcome = self.operations["append"](self.state, ints(tokens))
        expected = self.oracle.append(list(tokens), max_chunk(self.memory))
        assert int(outcome) == expected, f"append({tokens}): {int(outcome)} instead of {expected}"
        self.compare(f"append({tokens})", before, failed=expected != Outcome.OK)
        return expected

    def store(self, tokens: int) -> int:
        """Admits a request of so many tokens, stores them all, and returns its row."""
        row, outcome = self.admit(tokens)
        assert outcome == Outcome.OK
        for first in range(0, tokens, max_chunk(self.memory)):
            chunk = min(tokens - first, max_chunk(self.memory))
            assert self.append([chunk if r == row else 0 for r in range(self.memory.rows)]) == Outcome.OK
        return row

    def release(self, rows: list[bool]) -> None:
        before = self.state
        nobody = not any(asked and live for asked, live in zip(rows, self.oracle.live, strict=True))
        self.state = self.operations["release"](self.state, jnp.asarray(rows, jnp.bool))
        self.oracle.release(rows)
        self.compare(f"release({rows})", before, failed=nobody)

    def background(self) -> None:
        self.state = self.operations["background"](self.state)
        self.oracle.background()
        self.compare("background()")

    def compare(self, after: str, before=None, *, failed: bool = False) -> None:
        if failed:
            for old, new in zip(
                without_faults(self.memory, before), without_faults(self.memory, self.state), strict=True
            ):
                np.testing.assert_array_equal(new, old, err_msg=f"failed, but changed something: {after}")
        # Other lengths to ask about in each comparison: shorter and longer ends, small and large growth.
        self.count += 1
        rows = range(self.memory.rows)
        lengths = [self.oracle.length(row) for row in rows]
        new_lengths = [min(lengths[r] + (5 * self.count + 3 * r) % 8, self.memory.max_len) for r in rows]
        final_lengths = [min(max(0, lengths[r] + (7 * self.count + 5 * r) % 13 - 3), self.memory.max_len) for r in rows]
        view, broken = self.operations["observe"](self.state, ints(new_lengths), ints(final_lengths))
        expected = self.oracle.view(new_lengths, final_lengths)
        if "next_free" in expected:
            expected["next_free"] += [-1] * (self.memory.num_blocks - len(expected["next_free"]))
        assert view.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(view[name]), np.asarray(value), err_msg=f"{name} after {after}")
        broken = {name: int(count) for name, count in broken.items() if int(count)}
        assert not broken, f"{broken} after {after}"


def drive(pair: Lockstep, seed: int, steps: int) -> None:
    """Random operations, mostly sensible: sequences come, grow and end, and memory is usually short.

    Mistakes live at the edges, so lengths are short or up to the limit more often than chance would have them.
    """
    rng = random.Random(seed)
    memory, oracle = pair.memory, pair.oracle
    rows = range(memory.rows)

    def left(row: int) -> int:
        return oracle.limit(row) - oracle.length(row) if oracle.is_live(row) else 0

    def length(least: int, most: int) -> int:
        return rng.choice([least, most, rng.randint(least, most), min(most, least + rng.randint(0, 3))])

    for _ in range(steps):
        kind = rng.choices(
            ["admit", "grow", "decode", "background", "release", "outgrow", "misuse"], weights=[8, 4, 4, 4, 4, 2, 1]
        )[0]
        if kind == "admit":
            prompt = length(1, memory.max_len)
            final = length(prompt, memory.max_len + rng.choice([0, 0, 0, 1]))
            pair.admit(length(prompt, final), prompt, final)
        elif kind == "grow":
            pair.append([rng.choice([0, min(rng.randint(0, left(r)), max_chunk(memory))]) for r in rows])
        elif kind == "decode":
            pair.append([min(1, left(r)) for r in rows])
        elif kind == "background":
            pair.background()
        elif kind == "release":
            pair.release([oracle.is_live(r) and rng.random() < 0.4 for r in rows])
        elif kind == "outgrow":
            victim = rng.choice(rows)  # whose memory, if it has any, is not short of the one token too many
            pair.append([left(r) + 1 if r == victim and left(r) < max_chunk(memory) else 0 for r in rows])
        elif rng.random() < 0.5:
            pair.append([rng.randint(-1, memory.max_len) for _ in rows])
        else:
            pair.release([rng.random() < 0.3 for _ in rows])
