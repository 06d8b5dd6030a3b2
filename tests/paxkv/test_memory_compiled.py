"""The memories under jit: one program for all lengths, updates in place, and attention to the right slots."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import lifecycle
from paxkv.contiguous import VAttention
from paxkv.kv_cache import AttentionSpec, KVPool
from paxkv.memory import content
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.reserved import Reserved
from paxkv.windows import Group
from tests.paxkv.oracles.lockstep import ask, ints

MEMORIES = {
    "paged": Paged(rows=3, max_len=24, block_size=4, num_blocks=14),
    "paged, sharing": Paged(rows=3, max_len=24, block_size=4, num_blocks=14, cache=PrefixCache(), forks=True),
    "vattention": VAttention(rows=3, max_len=24, num_groups=12, page_bytes=20, token_bytes=8, buffers=4),
    "reserved": Reserved(rows=3, max_len=24, num_slots=61, policy="oracle"),
}


def step(memory, state, asked, new_tokens, released, max_new_tokens=1):
    """A step of a server: everything that a memory can do. Who is admitted stores all its known tokens."""
    state = memory.release(state, released)
    tokens = jnp.arange(memory.max_len, dtype=jnp.int32) + 100 * asked.known_tokens  # other ones for each length
    state, row, outcome = memory.admit(state, asked._replace(content=content(tokens)))
    new_tokens = new_tokens.at[row].set(asked.known_tokens, mode="drop")
    state, _ = memory.append(state, new_tokens, max_new_tokens)
    cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new_tokens, dtype=jnp.int32)])
    state = memory.publish(state, tokens, cu_lens, max_new_tokens)
    return memory.background(state), outcome


@pytest.fixture(params=MEMORIES)
def memory(request):
    return MEMORIES[request.param]


def test_one_program_serves_all_lengths_and_attention_reads_what_was_written(memory):
    """Rows are filled, freed and refilled first, so that nothing lies where an empty memory would put it."""
    chex.clear_trace_counter()
    once = chex.assert_max_traces(lambda *of: step(memory, *of, max_new_tokens=9), n=1)
    run = jax.jit(once, donate_argnums=0)  # a state that could not be updated in place would be a warning
    nobody = jnp.zeros(3, jnp.bool)
    state = memory.init()
    for tokens in (9, 2, 7):
        state, outcome = run(state, ask(tokens, final=tokens + 4), ints([0, 0, 0]), nobody)
        assert int(outcome) == Outcome.OK
    for released, tokens in ((1, 5), (0, 3)):
        mask = jnp.arange(3) == released
        state, outcome = run(state, ask(tokens, final=tokens + 8), ints([0, 0, 0]), mask)
        assert int(outcome) == Outcome.OK

    before = np.asarray(memory.seqs(state).lengths)
    new_tokens = [1, 5, 0]  # a decode, a chunk of a prompt, and a row that computes nothing
    state, _ = run(state, ask(1, final=memory.max_len + 1), ints(new_tokens), nobody)
    lengths = np.asarray(memory.seqs(state).lengths)
    assert (lengths - before).tolist() == new_tokens

    rng = np.random.default_rng(0)
    keys = [rng.normal(size=(n, 2, 8)) for n in lengths]  # of each row, in float64
    values = [rng.normal(size=(n, 2, 8)) for n in lengths]
    k = np.full((memory.num_slots, 2, 8), np.nan, np.float32)
    v = np.full((memory.num_slots, 2, 8), np.nan, np.float32)
    every_row, every_position = np.divmod(np.arange(3 * memory.max_len, dtype=np.int32), memory.max_len)
    slots = np.asarray(jax.jit(memory.slots)(state, ints(every_row), ints(every_position))).reshape(3, -1)
    for row, length in enumerate(lengths):
        assert np.isnan(k[slots[row, :length]]).all()  # nobody else's
        k[slots[row, :length]], v[slots[row, :length]] = keys[row], values[row]

    cu_q_lens = np.concatenate([[0], np.cumsum(new_tokens)])
    q = 4 * rng.normal(size=(cu_q_lens[-1], 4, 8))
    attend = jax.jit(memory.attend, static_argnames=("spec", "max_q_len"))
    pools = [KVPool(jnp.asarray(array)) for array in (k, v)]
    q = jnp.asarray(q, jnp.float32)
    out = np.asarray(attend(state, q, *pools, ints(cu_q_lens), spec=AttentionSpec(), max_q_len=8))
    for row, count in enumerate(new_tokens):
        for i in range(count):
            seen = lengths[row] - count + i + 1
            for head in range(4):
                score = keys[row][:seen, head // 2] @ q[cu_q_lens[row] + i, head] * 8**-0.5
                weight = np.exp(score - score.max())
                expected = weight @ values[row][:seen, head // 2] / weight.sum()
                np.testing.assert_allclose(out[cu_q_lens[row] + i, head], expected, rtol=2e-5, atol=2e-6)


# ---- large pools ---------------------------------------------------------------------------------------------------

ROWS, BLOCK_SIZE, BLOCKS = 256, 16, 22_888
TOKENS = 2048  # of a sequence
CHUNK = 1024  # tokens computed in a step

CACHED = Paged(rows=ROWS, max_len=TOKENS, block_size=BLOCK_SIZE, num_blocks=BLOCKS, cache=PrefixCache())
FORKED = dataclasses.replace(CACHED, forks=True)
WINDOWED = dataclasses.replace(CACHED, groups=(Group(BLOCK_SIZE), Group(BLOCK_SIZE, window=256)))
MERGING = dataclasses.replace(CACHED, cache=PrefixCache(publish="on_compute", duplicates="merge"))
PLAIN = dataclasses.replace(CACHED, cache=None)


def decode(memory, state, k):
    return memory.append(state, jnp.ones(ROWS, jnp.int32), 1)[0]


def publish_one_each(memory, state, k):
    tokens = (jnp.arange(ROWS, dtype=jnp.int32) * 7919 + k * 104_729) % 128_000
    return memory.publish(state, tokens, jnp.arange(ROWS + 1, dtype=jnp.int32), 1)


def publish_a_chunk(memory, state, k):
    tokens = (jnp.arange(CHUNK, dtype=jnp.int32) * 7919 + k * 104_729) % 128_000
    return memory.publish(state, tokens, jnp.minimum(jnp.arange(ROWS + 1, dtype=jnp.int32) * 700, CHUNK), CHUNK)


def prefill(memory, state, k):
    return memory.append(state, jnp.where(jnp.arange(ROWS) == k, 64, 0), 64)[0]


def admit_one(memory, state, k):
    kept = content(jnp.arange(TOKENS, dtype=jnp.int32) + k % 2) if memory.cache else None
    return memory.admit(state, ask(TOKENS)._replace(content=kept))[0]


def release_some(memory, state, k):
    return memory.release(state, jnp.arange(ROWS) % 3 == k % 3)


def fork_a_row(memory, state, k):
    kept = content(jnp.arange(TOKENS, dtype=jnp.int32))
    return lifecycle.fork(memory, state, k, jnp.int32(40), jnp.int32(TOKENS), kept)[0]


def end_copies(memory, state, k):
    return lifecycle.end_copies(memory, decode(memory, state, k))


def serve(memory, state, k):
    """A whole step: each of them in place alone could still need a copy beside the others."""
    for operation in (release_some, admit_one, decode, publish_one_each):
        state = operation(memory, state, k)
    return memory.background(state)


IN_PLACE = {
    "step": (CACHED, serve),
    "step without a cache": (PLAIN, serve),
    "step under windows": (WINDOWED, serve),
    "append of many tokens": (CACHED, prefill),
    "publication of many tokens": (CACHED, publish_a_chunk),
    "publication that merges": (MERGING, publish_one_each),
    "fork": (FORKED, fork_a_row),
    "copy on write": (FORKED, end_copies),
}


@functools.cache
def compile_in_place(memory, operation) -> tuple:
    """Turns of a scan whose state is donated; what is compiled, and the bytes of the state."""
    state = jax.eval_shape(memory.init)

    def scan(state):
        turns = jnp.arange(4, dtype=jnp.int32)
        return jax.lax.scan(lambda state, k: (operation(memory, state, k), None), state, turns)[0]

    compiled = jax.jit(scan, donate_argnums=0).lower(state).compile()
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def largest_copy(program: str) -> int:
    """Elements of the largest array that a program copies."""
    copied = [0]
    for line in program.splitlines():
        if match := re.search(r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start)\(", line):
            copied.append(math.prod(int(size) for size in match[1].split(",") if size))
    return max(copied)


@pytest.mark.parametrize("name", IN_PLACE)
def test_paged_transitions_copy_neither_pool_nor_tables(name):
    memory, operation = IN_PLACE[name]
    compiled, state_bytes = compile_in_place(dataclasses.replace(memory, num_blocks=8 * BLOCKS), operation)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == state_bytes
    assert largest_copy(compiled.as_text()) < ROWS * TOKENS // BLOCK_SIZE  # entries of a table, which is the smallest
    assert analysis.temp_size_in_bytes < 0.01 * state_bytes


@pytest.mark.parametrize("memory", [PLAIN, CACHED], ids=["without a cache", "with a cache"])
def test_a_paged_step_needs_no_more_room_for_a_larger_pool(memory):
    temporary = {
        compile_in_place(dataclasses.replace(memory, num_blocks=n), serve)[0].memory_analysis().temp_size_in_bytes
        for n in (BLOCKS, 8 * BLOCKS)
    }
    assert len(temporary) == 1
