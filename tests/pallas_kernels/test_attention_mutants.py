"""Wrong kernels that the comparison with float64 must not let through."""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _stream
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem

pytestmark = pytest.mark.soak

CASE = {case.name: case for case in CASES}
DECODE = CASE["decode_d64_kv2_g4_b16_f32"]
DECODE = dataclasses.replace(DECODE, batches={"around_a_tile": DECODE.batches["around_a_tile"]})
SINKS = CASE["decode_d32_kv2_g2_b16_f32_sinks_cap_5_window_60"]
WINDOW = CASE["mixed_d32_kv2_g2_b16_f32_window_100"]
INT8 = CASE["mixed_d32_kv2_g2_b16_f32_int8_token"]
HEAD = CASE["decode_d32_kv2_g2_b16_f32_int8_head_new"]
NEW = CASE["mixed_d32_kv2_g2_b16_f32_e4m3_layer_new"]
CORE = ("begin", "cap", "cut_queries", "visible_keys", "load_tile", "accumulate")
RIGHT = {name: inspect.unwrap(getattr(_stream, name)) for name in CORE}


def solve(case, change=lambda arguments: arguments):
    """Compares with the answer on the case's first batch, in which block 0 is nobody's.

    Around the jitted function, whose compiled program would not notice a change of the core.
    """
    problem = make_problem(case, next(iter(case.batches.values())), 0, use_block_0=False)
    arguments = change(problem.paged())
    arguments["scale"] = arguments.get("scale", case.head_dim**-0.5)
    entries = arguments["block_tables"]
    arguments["block_tables"] = jnp.where((entries < 0) | (entries >= len(problem.k_blocks)), 0, entries)
    options = ("scale", "window", "soft_cap", "return_lse", "max_q_len")
    static = {name: arguments.pop(name) for name in options}
    attend = jax.jit(functools.partial(inspect.unwrap(reference.paged_attention), **static))
    out, lse = attend(**arguments)
    assert_matches(out if lse is None else (out, lse), problem.expected())


def drop_newest_token(query_positions, positions, window):
    return RIGHT["visible_keys"](query_positions - 1, positions, window)


def one_token_too_many(q_lens, kv_lens, cu_q_lens, **sizes):
    return RIGHT["cut_queries"](q_lens, kv_lens + 1, cu_q_lens, **sizes)


def window_of_whole_tiles(query_positions, positions, window):
    return RIGHT["visible_keys"](query_positions, positions, None)


def window_of_one_more(query_positions, positions, window):
    return RIGHT["visible_keys"](query_positions, positions, window + 1)


def window_of_the_first_query(query_positions, positions, window):
    behind = query_positions[:, :1, None] - positions[:, None]
    return RIGHT["visible_keys"](query_positions, positions, None) & (behind < window)[:, None]


def unmasked_values(source, slots, used):
    return RIGHT["load_tile"](source, jnp.where(used, slots, 0), jnp.ones_like(used))


def unguarded_slots(source, slots, used):
    keys, values = (pool.at[slots].get(mode="clip").astype(jnp.float32) for pool in source[:2])
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def keys_unscaled(source, slots, used):
    return RIGHT["load_tile"](source._replace(k_scale=None), slots, used)


def values_unscaled(source, slots, used):
    return RIGHT["load_tile"](source._replace(v_scale=None), slots, used)


def scales_of_the_other_head(source, slots, used):
    swapped = {name: jnp.flip(getattr(source, name), -1) for name in ("k_scale", "v_scale")}
    return RIGHT["load_tile"](source._replace(**swapped), slots, used)


def scales_of_keys_for_values(source, slots, used):
    return RIGHT["load_tile"](source._replace(v_scale=source.k_scale), slots, used)


def no_rescale(state, scores, values):
    _, denominator, weighted = state
    new_maximum, *_ = RIGHT["accumulate"](state, scores, values)
    zero = jnp.zeros_like(denominator), jnp.zeros_like(weighted)
    _, added, added_weighted = RIGHT["accumulate"]((new_maximum, *zero), scores, values)
    return new_maximum, denominator + added, weighted + added_weighted


def rescale_of_the_denominator_only(state, scores, values):
    maximum, denominator, weighted = RIGHT["accumulate"](state, scores, values)
    factor = jnp.exp(state[0] - maximum)[..., None]
    return maximum, denominator, weighted - state[2] * factor + state[2]


def mean_of_values(state, scores, values):
    return RIGHT["accumulate"](state, jnp.where(scores == _stream.LOWEST, scores, 0), values)


def sink_in_every_tile(state, scores, values):
    maximum, denominator, weighted = RIGHT["accumulate"](state, scores, values)
    return maximum, denominator + jnp.exp(-maximum), weighted


def sink_forgotten(sinks, head_dim):
    return RIGHT["begin"](jnp.full_like(sinks, -jnp.inf), head_dim)


def sink_of_the_other_head(sinks, head_dim):
    return RIGHT["begin"](jnp.flip(sinks, axis=1), head_dim)


def uncapped(scores, soft_cap):
    return scores


CORES = [
    (DECODE, "visible_keys", drop_newest_token),
    (DECODE, "cut_queries", one_token_too_many),
    (DECODE, "load_tile", unmasked_values),
    (DECODE, "load_tile", unguarded_slots),
    (DECODE, "accumulate", no_rescale),
    (DECODE, "accumulate", rescale_of_the_denominator_only),
    (DECODE, "accumulate", mean_of_values),
    (WINDOW, "visible_keys", window_of_whole_tiles),
    (WINDOW, "visible_keys", window_of_one_more),
    (WINDOW, "visible_keys", window_of_the_first_query),
    (INT8, "load_tile", keys_unscaled),
    (INT8, "load_tile", values_unscaled),
    (INT8, "load_tile", scales_of_keys_for_values),
    (HEAD, "load_tile", scales_of_keys_for_values),
    (SINKS, "accumulate", sink_in_every_tile),
    (SINKS, "begin", sink_forgotten),
    (SINKS, "begin", sink_of_the_other_head),
    (SINKS, "cap", uncapped),
]


@pytest.mark.parametrize(("case", "name", "wrong"), CORES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_core_is_caught(case, name, wrong, monkeypatch):
    monkeypatch.setattr(_stream, name, wrong)
    with pytest.raises(AssertionError, match=r"times the tolerance|not finite"):
        solve(case)


@pytest.mark.parametrize("case", [DECODE, SINKS, WINDOW, INT8, HEAD, NEW], ids=lambda case: case.name)
def test_the_unchanged_core_passes(case):
    solve(case)


@pytest.mark.parametrize("case", [DECODE, SINKS, HEAD, NEW], ids=lambda case: case.name)
def test_long_steps_give_the_same_answer(case, monkeypatch):
    monkeypatch.setattr(_stream, "LONG_KV_TILE", 2 * _stream.KV_TILE)
    wide = dataclasses.replace(case, window=case.window and 2 * _stream.KV_TILE + 30)
    solve(wide)


def ignore_queries(arguments):
    return arguments | {"q": jnp.zeros_like(arguments["q"])}


def swap_keys_and_values(arguments):
    return arguments | {"k": arguments["v"], "v": arguments["k"]}


def swap_kv_heads(arguments):
    return arguments | {name: jnp.flip(arguments[name], -2) for name in ("k", "v")}


def swap_heads_of_values(arguments):
    return arguments | {"v": jnp.flip(arguments["v"], -2)}


def neighbours_table(arguments):
    return arguments | {"block_tables": jnp.roll(arguments["block_tables"], 1, axis=0)}


def neighbours_length(arguments):
    return arguments | {"kv_lens": jnp.roll(arguments["kv_lens"], 1)}


def ignore_new(arguments):
    return arguments | {"k_new": None, "v_new": None}


def scale_new(arguments):
    scaled = {f"{x}_new": arguments[f"{x}_new"] * arguments[f"{x}_scale"] for x in "kv"}
    return arguments | scaled


def scales_of_the_other_head_given(arguments):
    return arguments | {name: jnp.flip(arguments[name]) for name in ("k_scale", "v_scale")}


ARGUMENTS = [
    *itertools.product(
        [DECODE],
        [
            ignore_queries,
            swap_keys_and_values,
            swap_kv_heads,
            swap_heads_of_values,
            neighbours_table,
            neighbours_length,
        ],
    ),
    (NEW, ignore_new),
    (NEW, scale_new),
    (HEAD, scales_of_the_other_head_given),
]


@pytest.mark.parametrize(("case", "change"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_arguments_are_caught(case, change):
    with pytest.raises(AssertionError, match=r"times the tolerance|not finite"):
        solve(case, change)


def test_a_wrong_mapping_of_query_heads_to_kv_heads_is_caught():
    # Query head h reading KV head h % kv_heads instead of h // group.
    order = np.arange(DECODE.q_heads).reshape(-1, DECODE.kv_heads).T.reshape(-1)
    with pytest.raises(AssertionError, match="times the tolerance"):
        solve(DECODE, lambda arguments: arguments | {"q": arguments["q"][:, order]})
