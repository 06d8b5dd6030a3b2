"""The Triton kernels, interpreted: wrong ones are caught, and what must not matter does not change a bit."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _triton_attention as core
from pallas_kernels._triton_attention import Tiling
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem
from tests.pallas_kernels.mistakes import with_mistake

CASE = {case.name: case for case in CASES}
PLAIN = dataclasses.replace(
    CASE["decode_d32_kv2_g2_b16_f32_e4m3"],
    kv_dtype="float32",
    batches={"long": ((1, 300), (1, 320), (1, 0), (1, 289), (1, 64), (1, 17))},
)
SINKS = dataclasses.replace(PLAIN, sinks=True)
WINDOW = CASE["mixed_d32_kv2_g2_b16_f32_window_100"]
CAPPED = dataclasses.replace(PLAIN, soft_cap=2.0)
TOKEN = dataclasses.replace(PLAIN, kv_dtype="int8", scales="token")
HEAD = CASE["decode_d32_kv2_g2_b16_f32_int8_head_new"]
NAMES = (
    "accumulate",
    "add_sink",
    "cap",
    "load_rows",
    "load_step",
    "merge",
    "single_queries",
    "split_range",
    "visible",
)
RIGHT = {name: inspect.unwrap(getattr(core, name)) for name in NAMES}


def arguments_of(case):
    """Arguments as a backend is handed them: static ones apart, tables that hold block ids alone."""
    problem = make_problem(case, next(iter(case.batches.values())), 0, use_block_0=False)
    arguments = problem.paged()
    arguments["scale"] = arguments.get("scale", case.head_dim**-0.5)
    entries = arguments["block_tables"]
    arguments["block_tables"] = jnp.where((entries < 0) | (entries >= len(problem.k_blocks)), 0, entries)
    static = {name: arguments.pop(name) for name in ("scale", "window", "soft_cap", "return_lse", "max_q_len")}
    return problem, arguments, static


def attend(arguments, static, *, kernels=triton, **tilings):
    """Around the jitted function, whose compiled program would not notice a change of the core."""
    unjitted = inspect.unwrap(kernels.paged_attention)
    return jax.jit(functools.partial(unjitted, **static, **tilings, interpret=True))(**arguments)


def solve(case, **options):
    problem, arguments, static = arguments_of(case)
    out, lse = attend(arguments, static, **options)
    expected = problem.expected()
    nothing = np.isneginf(expected.lse)  # rows that the kernel leaves undefined
    out = jnp.where(nothing[:, :, None], 0, out)
    lse = None if lse is None else jnp.where(nothing, -jnp.inf, lse)
    assert_matches(out if lse is None else (out, lse), expected)
    return out


def drop_newest_token(query_positions, positions, window):
    return RIGHT["visible"](query_positions - 1, positions, window)


def no_window(query_positions, positions, window):
    return RIGHT["visible"](query_positions, positions, None)


def window_of_one_more(query_positions, positions, window):
    return RIGHT["visible"](query_positions, positions, window + 1)


def one_token_too_many(singles, kv_lens, cu_q_lens, window):
    return RIGHT["single_queries"](singles, kv_lens + 1, cu_q_lens, window)


def neighbours_table(singles, kv_lens, cu_q_lens, window):
    tiles = RIGHT["single_queries"](singles, kv_lens, cu_q_lens, window)
    return dataclasses.replace(tiles, seq_ids=jnp.roll(tiles.seq_ids, 1))


def no_rescale(state, logits, values, v_factor):
    maximum, denominator, weighted = state
    new_maximum, *added = RIGHT["accumulate"](state, logits, values, v_factor)
    factor = jnp.exp2(maximum - new_maximum)
    return (
        new_maximum,
        added[0] + denominator * (1 - factor),
        added[1] + weighted * (1 - factor)[:, None],
    )


def mean_of_values(state, logits, values, v_factor):
    return RIGHT["accumulate"](state, jnp.where(jnp.isinf(logits), logits, 0.0), values, v_factor)


def no_value_scale(state, logits, values, v_factor):
    return RIGHT["accumulate"](state, logits, values, 1.0)


def no_rescale_in_the_merge(state, part, lse):
    maximum, denominator, weighted = state
    return maximum, denominator + 1.0, weighted + part


def no_key_scale(*arguments):
    keys, values, k_factor, v_factor = RIGHT["load_step"](*arguments)
    return keys, values, jnp.ones_like(k_factor), v_factor


def keys_for_values(*arguments):
    keys, values, k_factor, v_factor = RIGHT["load_step"](*arguments)
    return values, keys, k_factor, v_factor


def unguarded(source, positions, used, kv_head, dtype):
    return RIGHT["load_step"](source, positions, jnp.ones_like(used), kv_head, dtype)


def another_head(source, positions, used, kv_head, dtype):
    return RIGHT["load_step"](source, positions, used, 1 - kv_head, dtype)


def scaled_new_keys(source, positions, used, kv_head, dtype):
    keys, values, k_factor, v_factor = RIGHT["load_step"](source, positions, used, kv_head, dtype)
    return keys, values, 2.0 if source.k_scale is None else k_factor, v_factor


def a_split_left_out(begin, end, split, statics):
    begin, end = RIGHT["split_range"](begin, end, split, statics)
    return begin, jnp.where(split == 1, begin, end)


def splits_that_overlap(begin, end, split, statics):
    start, stop = RIGHT["split_range"](begin, end, split, statics)
    return jnp.maximum(start - 1, begin), stop


def no_sink(state, sinks):
    return state


def sink_twice(state, sinks):
    return RIGHT["add_sink"](RIGHT["add_sink"](state, sinks), sinks)


def no_cap(logits, soft_cap):
    return logits


def queries_of_nothing(ref, rows, heads, mask):
    loaded = RIGHT["load_rows"](ref, rows, heads, mask)
    return jnp.zeros_like(loaded) if ref.shape[0] == PLAIN.tokens else loaded


MUTANTS = [
    (PLAIN, "visible", drop_newest_token),
    (WINDOW, "visible", no_window),
    (WINDOW, "visible", window_of_one_more),
    (PLAIN, "single_queries", one_token_too_many),
    (PLAIN, "single_queries", neighbours_table),
    (PLAIN, "accumulate", no_rescale),
    (PLAIN, "accumulate", mean_of_values),
    (TOKEN, "accumulate", no_value_scale),
    (PLAIN, "merge", no_rescale_in_the_merge),
    (TOKEN, "load_step", no_key_scale),
    (PLAIN, "load_step", keys_for_values),
    (PLAIN, "load_step", unguarded),
    (PLAIN, "load_step", another_head),
    (HEAD, "load_step", scaled_new_keys),
    (PLAIN, "split_range", a_split_left_out),
    (PLAIN, "split_range", splits_that_overlap),
    (SINKS, "add_sink", no_sink),
    (SINKS, "add_sink", sink_twice),
    (CAPPED, "cap", no_cap),
    (PLAIN, "load_rows", queries_of_nothing),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "wrong"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_kernel_is_caught(case, name, wrong, monkeypatch):
    monkeypatch.setattr(core, name, wrong)
    with pytest.raises(AssertionError, match=r"times the tolerance|not finite|logarithm"):
        solve(case)


@pytest.mark.slow
def test_a_sink_in_each_split_and_once_more_is_caught(monkeypatch):
    wrong = with_mistake(monkeypatch, (core, triton), {"inputs = inputs._replace(sinks=None)": "pass"})
    with pytest.raises(AssertionError, match="times the tolerance"):
        solve(SINKS, kernels=wrong)


@pytest.mark.parametrize("case", [PLAIN, WINDOW, SINKS, CAPPED, TOKEN, HEAD])
def test_the_unchanged_kernel_passes(case):
    solve(case)


def test_the_cases_have_several_splits():
    assert core.count_splits(PLAIN.seqs * PLAIN.kv_heads, PLAIN.blocks_per_seq * PLAIN.block_size, None, None) > 1


def test_steps_and_splits_of_any_size_agree():
    outs = [
        np.asarray(solve(PLAIN, decode_tiling=Tiling(16, kv_tile, 4, 2, split_size)))
        for kv_tile, split_size in ((16, None), (128, 128), (64, 320), (32, 48))
    ]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_with_splits_of_one_size_company_does_not_change_a_bit(window):
    case = dataclasses.replace(PLAIN, window=window, q_dtype="bfloat16", kv_dtype="bfloat16")
    _, arguments, static = arguments_of(case)
    tiling = Tiling(16, 32, 4, 2, split_size=64)
    together, _ = attend(arguments, static, decode_tiling=tiling)
    seq = 1
    wider = jnp.pad(arguments["block_tables"][seq : seq + 1], ((0, 0), (0, 30)))
    alone = arguments | {
        "q": arguments["q"][seq : seq + 1],
        "block_tables": wider,
        "kv_lens": arguments["kv_lens"][seq : seq + 1],
        "cu_q_lens": jnp.array([0, 1], jnp.int32),
    }
    out, _ = attend(alone, static, decode_tiling=tiling)
    np.testing.assert_array_equal(np.asarray(out[0]).view(np.uint16), np.asarray(together[seq]).view(np.uint16))


@pytest.mark.parametrize(
    ("elements", "dtype", "wraps"),
    [
        (2**31, "int8", False),
        (2**31 + 2**10, "int8", True),
        (2**32, "float8_e4m3fn", True),
        (2**32 + 2**10, "float8_e4m3fn", False),
        (2**31 + 2**10, "bfloat16", False),
    ],
)
def test_a_pool_whose_offsets_would_wrap_is_refused(elements, dtype, wraps):
    pool = jax.ShapeDtypeStruct((elements // 1024, 8, 128), jnp.dtype(dtype))
    if wraps:
        with pytest.raises(ValueError, match=r"k must have at most 2\*\*31 elements, or more than 2\*\*32 bytes"):
            core.check_offsets("k", pool)
    else:
        core.check_offsets("k", pool)


def test_a_head_too_wide_for_the_registers_is_refused():
    case = dataclasses.replace(PLAIN, head_dim=320, batches={"one": ((1, 3),)})
    with pytest.raises(ValueError, match="head_dim must be at most 256 for the Triton kernel, got 320"):
        solve(case)
