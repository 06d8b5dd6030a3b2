"""What attention makes of lengths and places that cannot be right, and what its output does not depend on."""

import copy
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.contiguous_attention.api import BACKENDS as CONTIGUOUS_BACKENDS
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import BACKENDS as PAGED_BACKENDS
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem
from tests.pallas_kernels.ways import ways

CASE = {case.name: case for case in CASES}
DECODE, MIXED = CASE["decode_d64_kv2_g4_b16_f32"], CASE["mixed_d32_kv2_g3_b8_f32"]
NEW, WINDOW = CASE["mixed_d32_kv2_g2_b16_f32_new"], CASE["mixed_d32_kv2_g2_b16_f32_window_100"]
paged_ways = pytest.mark.parametrize("way", ways(PAGED_BACKENDS, MIXED, always=("xla",)))
contiguous_ways = pytest.mark.parametrize("way", ways(CONTIGUOUS_BACKENDS, MIXED, always=("xla",)))


def paged(way, problem, **changes):
    with way.open():
        return np.array(paged_attention(**(problem.paged() | changes), backend=way.backend))


def contiguous(way, problem, **changes):
    with way.open():
        return np.array(contiguous_attention(**(problem.contiguous() | changes), backend=way.backend))


def chunks():
    return make_problem(MIXED, MIXED.batches["decode_and_chunks"], 0)


def of_sequence(problem, seq):
    return np.arange(problem.cu_q_lens[seq], problem.cu_q_lens[seq + 1])


def assert_shows(broken, clean, hurt):
    """NaN in the tokens `hurt`, and nothing else but what is right."""
    assert np.isnan(broken[hurt]).all()
    np.testing.assert_array_equal(np.delete(broken, hurt, axis=0), np.delete(clean, hurt, axis=0))


@paged_ways
def test_output_does_not_depend_on_where_blocks_lie(way):
    there = chunks()
    elsewhere, order = copy.copy(there), np.random.default_rng(0).permutation(len(there.k_blocks))
    elsewhere.k_blocks, elsewhere.v_blocks = there.k_blocks[order], there.v_blocks[order]
    legal = (there.block_tables >= 0) & (there.block_tables < len(order))
    moved = np.argsort(order)[np.where(legal, there.block_tables, 0)]
    elsewhere.block_tables = np.where(legal, moved, there.block_tables).astype(np.int32)
    np.testing.assert_array_equal(paged(way, there), paged(way, elsewhere))


@paged_ways
def test_output_does_not_depend_on_the_block_size(way):
    small = chunks()
    large = copy.copy(small)
    pairs = MIXED.blocks_per_seq // 2
    # Two blocks that follow each other in a sequence become one; the last of the odd number of entries is not needed.
    small.kv_lens[small.kv_lens > 256] = 256
    large.kv_lens = small.kv_lens
    tables = np.clip(small.block_tables[:, : 2 * pairs], 0, len(small.k_blocks) - 1)
    for name in ("k_blocks", "v_blocks"):
        gathered = getattr(small, name)[tables]
        setattr(large, name, gathered.reshape(-1, 2 * MIXED.block_size, *gathered.shape[3:]))
    large.block_tables = np.arange(MIXED.seqs * pairs, dtype=np.int32).reshape(MIXED.seqs, pairs)
    np.testing.assert_allclose(paged(way, large), paged(way, small), rtol=2e-6, atol=2e-6)


@paged_ways
def test_a_sequence_does_not_feel_its_company(way):
    together = make_problem(DECODE, DECODE.batches["around_a_tile"], 5)
    alone = copy.copy(together)
    alone.kv_lens = np.where(np.arange(DECODE.seqs) == 3, together.kv_lens, 0)
    out = paged(way, alone)
    np.testing.assert_array_equal(out[3], paged(way, together)[3])
    assert not np.delete(out, 3, axis=0).any()


@paged_ways
def test_sequences_may_share_blocks(way):
    problem = make_problem(DECODE, ((1, 130), (1, 70)), 7)
    problem.block_tables[1] = problem.block_tables[0]  # the second one is a prefix of the first
    problem.keys[1], problem.values[1] = problem.keys[0][:70], problem.values[0][:70]
    assert_matches(jnp.asarray(paged(way, problem)), problem.expected())


@paged_ways
def test_block_ids_may_pass_65535(way):
    case = dataclasses.replace(CASE["decode_d32_kv4_g1_b1_f32"], head_dim=8)
    near = make_problem(case, case.batches["any_length"], 0)
    far, blocks = copy.copy(near), len(near.k_blocks)
    legal = (near.block_tables >= 0) & (near.block_tables < blocks)
    far.block_tables = np.where(legal, near.block_tables + 70_000, near.block_tables).astype(np.int32)
    nothing = np.full((70_000, *near.k_blocks.shape[1:]), np.nan, np.float32)
    far.k_blocks, far.v_blocks = (np.concatenate([nothing, pool]) for pool in (near.k_blocks, near.v_blocks))
    np.testing.assert_array_equal(paged(way, far), paged(way, near))


@paged_ways
def test_the_default_bound_of_query_lengths_is_the_number_of_tokens(way):
    both = chunks()
    np.testing.assert_array_equal(paged(way, both, max_q_len=None), paged(way, both))


@paged_ways
def test_scale_multiplies_the_logits(way):
    whole = make_problem(DECODE, DECODE.batches["around_a_block"], 0)
    halved = copy.copy(whole)
    halved.q = whole.q / 2
    np.testing.assert_array_equal(paged(way, halved, scale=2 * 64**-0.5), paged(way, whole))


@paged_ways
def test_a_scale_of_zero_averages_the_values(way):
    flat = make_problem(DECODE, DECODE.batches["around_a_tile"], 1)
    flat.options["scale"] = 0.0
    assert_matches(jnp.asarray(paged(way, flat)), flat.expected())


@paged_ways
@pytest.mark.parametrize("sign", [1, -1])
def test_one_dominant_key_among_logits_of_ten_thousand_gives_its_value(way, sign):
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
    np.testing.assert_array_equal(paged(way, huge, scale=1.0), expected)


@paged_ways
def test_a_window_of_four_averages_the_newest_four(way):
    problem = make_problem(DECODE, DECODE.batches["fewer_sequences_than_rows"], 0)
    problem.q[:] = 0
    positions = np.arange(300).reshape(-1, 1, 1)
    for p in range(300):
        block, slot = divmod(p, DECODE.block_size)
        problem.v_blocks[problem.block_tables[0, block], slot] = p
    out = paged(way, problem, window=4)
    np.testing.assert_allclose(out[0], np.full(out[0].shape, positions[-4:].mean()), rtol=1e-6)


@paged_ways
@pytest.mark.parametrize("kv_len", [1, 15, 265, -1, -(2**31), 2**31 - 1])
def test_impossible_lengths_show_as_nan_in_their_sequence_alone(way, kv_len):
    # Sequence 3 has 16 queries, and its table has room for 264 positions.
    clean, broken = chunks(), chunks()
    broken.kv_lens[3] = kv_len
    assert_shows(paged(way, broken), paged(way, clean), of_sequence(clean, 3))


@paged_ways
@pytest.mark.parametrize("bad", [-1, 10**6, 2**30, -(2**31), 2**31 - 1])
def test_a_used_table_entry_that_is_no_block_shows_in_the_queries_that_see_it(way, bad):
    clean, broken = chunks(), chunks()
    broken.block_tables[1, 1] = bad  # positions 8 to 15 of a prompt of 17
    assert_shows(paged(way, broken), paged(way, clean), of_sequence(clean, 1)[8:])


@paged_ways
def test_a_query_whose_window_has_passed_a_bad_table_entry_does_not_feel_it(way):
    # 20 queries from position 280 on see 100 positions: the first sees 181 to 280, the last 200 to 299.
    clean, broken = (make_problem(WINDOW, WINDOW.batches["tiles_before_it"], 0) for _ in range(2))
    broken.block_tables[1, 11] = -1  # positions 176 to 191
    results = [paged(way, problem, return_lse=False) for problem in (broken, clean)]
    assert_shows(*results, of_sequence(clean, 1)[: 191 - 181 + 1])


@paged_ways
def test_logarithms_are_nan_where_the_output_is(way):
    broken = make_problem(NEW, NEW.batches["decode_and_chunks"], 0)
    broken.block_tables[1, 0] = -1
    with way.open():
        out, lse = paged_attention(**broken.paged(), backend=way.backend)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(out).all(axis=2))
    assert np.isnan(lse[of_sequence(broken, 1)]).all()


@paged_ways
@pytest.mark.parametrize("pool", ["k_blocks", "v_blocks"])
def test_what_is_not_a_number_shows_in_the_sequence_that_holds_it(way, pool):
    # Sequence 3 has 255 positions.
    clean, broken = (make_problem(DECODE, DECODE.batches["around_a_tile"], 0) for _ in range(2))
    getattr(broken, pool)[broken.block_tables[3, 12], 5] = np.nan
    assert_shows(paged(way, broken), paged(way, clean), [3])


@contiguous_ways
@pytest.mark.parametrize("start", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_a_range_that_leaves_the_arena_shows_in_its_sequence_alone(way, start):
    clean, broken = chunks(), chunks()
    broken.starts[1] = start
    assert_shows(contiguous(way, broken), contiguous(way, clean), of_sequence(clean, 1))


@contiguous_ways
def test_a_range_may_touch_the_end_of_the_arena_and_no_more(way):
    clean, broken = chunks(), chunks()
    last = int(np.argmax(np.where(clean.kv_lens > 0, clean.starts.astype(np.int64), -1)))
    assert clean.starts[last] + clean.kv_lens[last] == len(clean.k_arena)
    broken.starts[last] += 1
    assert_shows(contiguous(way, broken), contiguous(way, clean), of_sequence(clean, last))


@paged_ways
def test_more_queries_than_promised_show_as_nan(way):
    clean = make_problem(DECODE, ((1, 40), (2, 40), (1, 0), (1, 17)), 0)
    out, expected = paged(way, clean), clean.expected()
    assert np.isnan(out[1:3]).all()
    out[1:3] = expected.out[1:3]
    assert_matches(jnp.asarray(out), expected)


@paged_ways
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
def test_bounds_that_do_not_climb_make_everything_nan(way, cu_q_lens):
    broken = make_problem(MIXED, MIXED.batches["decode_only"], 0)
    broken.cu_q_lens = np.array(cu_q_lens, np.int32)
    assert np.isnan(paged(way, broken)).all()


@pytest.mark.parametrize(
    ("attention", "arguments", "way"),
    [
        *((paged_attention, "paged", *way.values) for way in ways(PAGED_BACKENDS, DECODE)),
        *((contiguous_attention, "contiguous", *way.values) for way in ways(CONTIGUOUS_BACKENDS, DECODE)),
    ],
)
def test_lengths_and_places_change_without_recompilation(attention, arguments, way):
    arrays, options = {}, {}
    chex.clear_trace_counter()
    with way.open():

        @jax.jit
        @chex.assert_max_traces(n=1)
        def attend(arrays):
            return attention(**arrays, **options, backend=way.backend)

        for seed, batch in enumerate(DECODE.batches):
            problem = make_problem(DECODE, DECODE.batches[batch], seed)
            options = problem.options
            arrays = {name: value for name, value in getattr(problem, arguments)().items() if name not in options}
            assert_matches(attend(arrays), problem.expected())
