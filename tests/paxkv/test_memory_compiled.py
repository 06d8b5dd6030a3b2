"""The memories under jit: one program for all lengths, updates in place, and attention to the right slots."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.reserved import Reserved
from tests.paxkv.oracles.lockstep import ask, ints

MEMORIES = {
    "paged": Paged(rows=3, max_len=24, block_size=4, num_blocks=14),
    "vattention": VAttention(rows=3, max_len=24, num_groups=12, page_bytes=20, token_bytes=8, buffers=4),
    "reserved": Reserved(rows=3, max_len=24, num_slots=61, policy="oracle"),
}


def step(memory, state, asked, new_tokens, released, max_new_tokens=1):
    """A step of a server: everything that a memory can do. Who is admitted stores all its known tokens."""
    state = memory.release(state, released)
    state, row, outcome = memory.admit(state, asked)
    state, _ = memory.append(state, new_tokens.at[row].set(asked.known_tokens, mode="drop"), max_new_tokens)
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
    attend = jax.jit(memory.attend, static_argnames="max_q_len")
    arrays = [jnp.asarray(array, jnp.float32) for array in (q, k, v)]
    out = np.asarray(attend(state, *arrays, ints(cu_q_lens), max_q_len=8))
    for row, count in enumerate(new_tokens):
        for i in range(count):
            seen = lengths[row] - count + i + 1
            for head in range(4):
                score = keys[row][:seen, head // 2] @ q[cu_q_lens[row] + i, head] * 8**-0.5
                weight = np.exp(score - score.max())
                expected = weight @ values[row][:seen, head // 2] / weight.sum()
                np.testing.assert_allclose(out[cu_q_lens[row] + i, head], expected, rtol=2e-5, atol=2e-6)


def test_paged_steps_are_in_place_and_need_no_more_room_for_a_larger_pool():
    temporary = set()
    for num_blocks in (22_888, 8 * 22_888):
        memory = Paged(rows=256, max_len=4000, block_size=16, num_blocks=num_blocks)
        state, per_row = memory.init(), jnp.zeros(memory.rows, jnp.int32)

        def steps(state, *of, memory=memory):
            return jax.lax.scan(lambda state, _: (step(memory, state, *of)[0], None), state, length=4)[0]

        lowered = jax.jit(steps, donate_argnums=0).lower(state, ask(1), per_row, per_row > 0)
        analysis = lowered.compile().memory_analysis()
        assert analysis.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        temporary.add(analysis.temp_size_in_bytes)
    (temporary_bytes,) = temporary
    assert temporary_bytes < 22_888  # no copy of the tables (256,000 bytes), nor of the smaller free stack (91,552)
