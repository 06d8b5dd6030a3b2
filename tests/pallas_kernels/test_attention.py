"""All attention backends on all named cases, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _stream
from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.contiguous_attention import reference as contiguous_reference
from pallas_kernels.contiguous_attention.api import BACKENDS as CONTIGUOUS_BACKENDS
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.paged_attention.api import BACKENDS as PAGED_BACKENDS
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, attend, make_problem

CASE = {case.name: case for case in CASES}
DECODE, MIXED = CASE["decode_d64_kv2_g4_b16_f32"], CASE["mixed_d32_kv2_g3_b8_f32"]
BATCHES = [pytest.param(case, name, id=f"{case.name}-{name}") for case in CASES for name in case.batches]


@functools.cache
def problem(case, batch):
    names = list(case.batches)
    return make_problem(case, case.batches[batch], names.index(batch), use_block_0=names.index(batch) % 2 == 1)


def paged(case, problem, **kwargs):
    return paged_attention(*problem.paged(), max_q_len=case.max_q_len, **kwargs)


def contiguous(case, problem, **kwargs):
    return contiguous_attention(*problem.contiguous(), max_q_len=case.max_q_len, **kwargs)


@pytest.mark.parametrize("backend", PAGED_BACKENDS)
@pytest.mark.parametrize(("case", "batch"), BATCHES)
def test_paged_attention_is_softmax_attention(case, batch, backend):
    out = paged(case, problem(case, batch), backend=backend)
    assert out.dtype == case.q_dtype
    assert_matches(out, problem(case, batch).expected)


@pytest.mark.parametrize("backend", CONTIGUOUS_BACKENDS)
@pytest.mark.parametrize(("case", "batch"), BATCHES)
def test_contiguous_attention_is_softmax_attention(case, batch, backend):
    out = contiguous(case, problem(case, batch), backend=backend)
    assert out.dtype == case.q_dtype
    assert_matches(out, problem(case, batch).expected)


@pytest.mark.parametrize(("case", "batch"), BATCHES)
def test_paged_and_contiguous_are_equal_bit_for_bit(case, batch):
    outs = (paged(case, problem(case, batch)), contiguous(case, problem(case, batch)))
    np.testing.assert_array_equal(*(np.asarray(out).view(np.uint8) for out in outs))


def test_output_does_not_depend_on_where_blocks_lie():
    there = make_problem(MIXED, MIXED.batches["decode_and_chunks"], 3)
    elsewhere = dataclasses.replace(there)
    order = np.random.default_rng(0).permutation(len(there.k_blocks))
    elsewhere.k_blocks, elsewhere.v_blocks = there.k_blocks[order], there.v_blocks[order]
    legal = (there.block_tables >= 0) & (there.block_tables < len(order))
    elsewhere.block_tables = np.where(
        legal, np.argsort(order)[np.where(legal, there.block_tables, 0)], there.block_tables
    ).astype(np.int32)
    np.testing.assert_array_equal(paged(MIXED, there), paged(MIXED, elsewhere))


def test_a_sequence_does_not_feel_its_company():
    together = make_problem(DECODE, DECODE.batches["around_a_tile"], 5)
    alone = dataclasses.replace(together, kv_lens=np.where(np.arange(DECODE.seqs) == 3, together.kv_lens, 0))
    out = np.asarray(paged(DECODE, alone))
    np.testing.assert_array_equal(out[3], np.asarray(paged(DECODE, together))[3])
    assert not np.delete(out, 3, axis=0).any()


def test_sequences_may_share_blocks():
    first = make_problem(DECODE, ((1, 130), (1, 70)), 7)
    first.block_tables[1] = first.block_tables[0]  # the second one is a prefix of the first
    keys, values = (
        pool[first.block_tables[0, :9]].reshape(-1, DECODE.kv_heads, DECODE.head_dim)[:130]
        for pool in (first.k_blocks, first.v_blocks)
    )
    nothing = keys[:0]
    expected = attend(
        first.q,
        [keys, keys[:70], *[nothing] * 6],
        [values, values[:70], *[nothing] * 6],
        first.kv_lens,
        first.cu_q_lens,
        DECODE.head_dim**-0.5,
    )
    assert_matches(paged(DECODE, first), expected)


def test_the_default_bound_of_query_lengths_is_the_number_of_tokens():
    both = problem(MIXED, "decode_and_chunks")
    np.testing.assert_array_equal(paged_attention(*both.paged()), paged(MIXED, both))


def test_scale_multiplies_the_logits():
    whole = problem(DECODE, "around_a_block")
    halved = dataclasses.replace(whole, q=whole.q / 2)
    np.testing.assert_array_equal(paged(DECODE, halved, scale=2 * 64**-0.5), paged(DECODE, whole))


def test_equal_logits_average_the_values():
    flat = make_problem(DECODE, DECODE.batches["around_a_tile"], 1, sharpness=0.0)
    assert_matches(paged(DECODE, flat), flat.expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_dominant_key_among_logits_of_ten_thousand_gives_its_value(sign):
    huge = make_problem(DECODE, DECODE.batches["around_a_tile"], 2)
    # Integers, so that the logits are exact: sign * 64 * 128 * key, times a scale of 1.
    huge.q[:] = sign * 128
    rng = np.random.default_rng(0)
    huge.k_blocks[np.isfinite(huge.k_blocks)] = 0
    expected = np.zeros(huge.q.shape)
    for seq, kv_len in enumerate(huge.kv_lens):
        block, slot = divmod(int(rng.integers(kv_len)), DECODE.block_size)
        huge.k_blocks[huge.block_tables[seq, block], slot] = sign * 2
        expected[seq] = np.repeat(huge.v_blocks[huge.block_tables[seq, block], slot], 4, axis=0)
    np.testing.assert_array_equal(paged(DECODE, huge, scale=1.0), expected)


@pytest.mark.parametrize("kv_len", [1, 15, 265, -1, -(2**31), 2**31 - 1])
def test_impossible_lengths_show_as_nan_in_their_sequence_alone(kv_len):
    # Sequence 3 has 16 queries, and its table has room for 264 positions.
    clean = make_problem(MIXED, MIXED.batches["decode_and_chunks"], 0)
    broken = dataclasses.replace(clean, kv_lens=clean.kv_lens.copy())
    broken.kv_lens[3] = kv_len
    out = np.asarray(paged(MIXED, broken))
    mine = slice(clean.cu_q_lens[3], clean.cu_q_lens[4])
    assert np.isnan(out[mine]).all()
    others = np.delete(np.arange(MIXED.tokens), mine)
    np.testing.assert_array_equal(out[others], np.asarray(paged(MIXED, clean))[others])


@pytest.mark.parametrize("bad", [-1, 10**6, 2**30, -(2**31), 2**31 - 1])
def test_a_used_table_entry_that_is_no_block_shows_in_the_queries_that_see_it(bad):
    clean = make_problem(MIXED, MIXED.batches["decode_and_chunks"], 0)
    broken = dataclasses.replace(clean, block_tables=clean.block_tables.copy())
    broken.block_tables[1, 1] = bad  # positions 8 to 15 of a prompt of 17
    out, right = np.asarray(paged(MIXED, broken)), np.asarray(paged(MIXED, clean))
    first = clean.cu_q_lens[1]
    hurt = slice(first + 8, first + 17)
    assert np.isnan(out[hurt]).all()
    rest = np.delete(np.arange(MIXED.tokens), hurt)
    np.testing.assert_array_equal(out[rest], right[rest])


@pytest.mark.parametrize("start", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_a_range_that_leaves_the_arena_shows_in_its_sequence_alone(start):
    clean = make_problem(MIXED, MIXED.batches["decode_and_chunks"], 0)
    broken = dataclasses.replace(clean, starts=clean.starts.copy())
    broken.starts[1] = start
    out, right = np.asarray(contiguous(MIXED, broken)), np.asarray(contiguous(MIXED, clean))
    mine = slice(clean.cu_q_lens[1], clean.cu_q_lens[2])
    assert np.isnan(out[mine]).all()
    rest = np.delete(np.arange(MIXED.tokens), mine)
    np.testing.assert_array_equal(out[rest], right[rest])


def test_more_queries_than_promised_show_as_nan():
    clean = make_problem(DECODE, ((1, 40), (2, 40), (1, 0), (1, 17)), 0)
    out = np.asarray(paged(DECODE, clean))
    assert np.isnan(out[1:3]).all()
    assert_matches(jnp.asarray(np.delete(out, [1, 2], axis=0)), np.delete(clean.expected, [1, 2], axis=0))


@pytest.mark.parametrize(
    "cu_q_lens",
    [
        [1, 2, 3, 4, 5, 6, 7, 8, 8],
        [0, 5, 3, 4, 5, 6, 7, 8, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 65],
        [0, 2**31 - 1, -2, 5, 6, 7, 8, 9, 10],
        [0, -5, -4, -3, -2, -1, 0, 0, 0],
    ],
)
def test_bounds_that_do_not_climb_make_everything_nan(cu_q_lens):
    broken = make_problem(MIXED, MIXED.batches["decode_only"], 0)
    broken.cu_q_lens = np.array(cu_q_lens, np.int32)
    assert np.isnan(paged(MIXED, broken)).all()


@pytest.mark.parametrize(("call", "module"), [(paged, paged_reference), (contiguous, contiguous_reference)])
def test_lengths_and_places_change_without_recompilation(call, module, monkeypatch):
    first, *others = DECODE.batches
    call(DECODE, problem(DECODE, first))
    monkeypatch.delattr(module, "stream_attention")  # whoever traces again will miss it
    for batch in others:
        assert_matches(call(DECODE, problem(DECODE, batch)), problem(DECODE, batch).expected)


def test_work_follows_the_lengths_and_not_the_capacity():
    tile, tokens, steps = _stream.KV_TILE, 16, []
    pool = jnp.zeros((50 * tile, 1, 8), jnp.float32)

    def slots_of(seq_ids, positions):
        jax.debug.callback(lambda positions: steps.append(int(positions[0])), positions)
        return jnp.broadcast_to(positions[None], (seq_ids.shape[0], positions.shape[0]))

    @jax.jit
    def attend_all(kv_lens, cu_q_lens):
        queries = jnp.ones((tokens, 1, 8), jnp.float32)
        sizes = {"scale": 1.0, "max_q_len": tokens, "capacity": pool.shape[0]}
        return _stream.stream_attention(queries, pool, pool, slots_of, kv_lens, cu_q_lens, **sizes)

    def steps_taken(q_lens, kv_lens):
        steps.clear()
        attend_all(jnp.asarray(kv_lens, jnp.int32), jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32)).block_until_ready()
        jax.effects_barrier()
        return sorted(steps)

    assert steps_taken([1, 0, 0], [0, 0, 0]) == []
    assert steps_taken([1, 0, 0], [tile, 0, 0]) == [0]
    assert steps_taken([1, 0, 0], [tile + 1, 0, 0]) == [0, tile]
    # Two decode rows share their steps, so the longer one decides; the chunk of 9 queries goes by itself.
    assert steps_taken([1, 1, 9], [1, 2 * tile, 9]) == [0, 0, tile]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_cache_is_written_and_read_without_a_copy_of_it_or_of_the_table(dtype):
    seqs, blocks_per_seq, block_size, kv_heads, head_dim = 8, 256, 16, 2, 32
    heads = (kv_heads, head_dim)

    def step(k, v, k_new, v_new, slots, q, block_tables, kv_lens, cu_q_lens):
        k, v = kv_write(k, v, k_new, v_new, slots)
        blocks = (pool.reshape(-1, block_size, *heads) for pool in (k, v))
        return k, v, paged_attention(q, *blocks, block_tables, kv_lens, cu_q_lens, max_q_len=1)

    def floats(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def ints(*sizes):
        return jax.ShapeDtypeStruct(sizes, "int32")

    pool, new = floats(seqs * blocks_per_seq * block_size, *heads), floats(seqs, *heads)
    queries = floats(seqs, 2 * kv_heads, head_dim)
    lengths = (ints(seqs, blocks_per_seq), ints(seqs), ints(seqs + 1))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool, new, new, ints(seqs), queries, *lengths).compile()
    memory, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    # Each table row is full, so the gathered table would be another copy of the pool.
    assert memory.temp_size_in_bytes < pool_bytes / 4
