"""Wrong kernels that the comparison with float64 must not let through."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _stream
from pallas_kernels.paged_attention import paged_attention, reference
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem

DECODE = next(case for case in CASES if case.name == "decode_d64_kv2_g4_b16_f32")
RIGHT = {
    name: inspect.unwrap(getattr(_stream, name)) for name in ("cut_queries", "visible_keys", "load_tile", "accumulate")
}


def drop_newest_token(query_positions, positions):
    return RIGHT["visible_keys"](query_positions - 1, positions)


def one_token_too_many(q_lens, kv_lens, cu_q_lens, **sizes):
    return RIGHT["cut_queries"](q_lens, kv_lens + 1, cu_q_lens, **sizes)


def unmasked_values(k, v, slots, used):
    keys, values = (pool.at[jnp.where(used, slots, 0)].get(mode="clip") for pool in (k, v))
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


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


PATCHES = {
    "drop the newest token": ("visible_keys", drop_newest_token),
    "<= at the length": ("cut_queries", one_token_too_many),
    "unmasked values": ("load_tile", unmasked_values),
    "no rescale": ("accumulate", no_rescale),
    "accumulator not rescaled": ("accumulate", rescale_of_the_denominator_only),
    "mean of values": ("accumulate", mean_of_values),
}


def compare(attention):
    """Compares with the answer on one batch: rows of more than a tile of keys, and block 0 is nobody's."""
    problem = make_problem(DECODE, DECODE.batches["around_a_tile"], 0, use_block_0=False)
    assert_matches(attention(*problem.paged()), problem.expected)


@pytest.mark.parametrize("mutant", PATCHES)
def test_a_wrong_core_is_caught(mutant, monkeypatch):
    name, wrong = PATCHES[mutant]
    monkeypatch.setattr(_stream, name, wrong)
    # Around the jitted function, whose compiled program would not notice the change.
    wrong_attention = functools.partial(inspect.unwrap(reference.paged_attention), scale=64**-0.5, max_q_len=1)
    with pytest.raises(AssertionError, match=r"times the tolerance|not finite"):
        compare(jax.jit(wrong_attention))


def ignore_queries(q, *rest):
    return jnp.zeros_like(q), *rest


def neighbours_table(q, k, v, tables, *rest):
    return q, k, v, jnp.roll(tables, 1, axis=0), *rest


def swap_keys_and_values(q, k, v, *rest):
    return q, v, k, *rest


def neighbours_length(q, k, v, tables, kv_lens, cu_q_lens):
    return q, k, v, tables, jnp.roll(kv_lens, 1), cu_q_lens


ARGUMENTS = [ignore_queries, neighbours_table, swap_keys_and_values, neighbours_length]


def right(*arrays):
    return paged_attention(*arrays, max_q_len=1)


@pytest.mark.parametrize("mutate", ARGUMENTS)
def test_wrong_arguments_are_caught(mutate):
    with pytest.raises(AssertionError, match=r"times the tolerance|not finite"):
        compare(lambda *arrays: right(*mutate(*arrays)))


def test_a_wrong_mapping_of_query_heads_to_kv_heads_is_caught():
    # Query head h reading KV head h % kv_heads instead of h // group.
    order = np.arange(DECODE.q_heads).reshape(-1, DECODE.kv_heads).T.reshape(-1)

    def interleaved(q, *rest):
        return right(q[:, order], *rest)[:, np.argsort(order)]

    with pytest.raises(AssertionError, match="times the tolerance"):
        compare(interleaved)


def test_the_unchanged_core_passes():
    compare(right)
