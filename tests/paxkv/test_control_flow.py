"""Control flow for large arrays: what it computes. That nothing is copied is tested on the memories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.control_flow import read_now, run_if


@pytest.mark.parametrize("condition", [False, True])
def test_a_body_runs_once_or_not_at_all(condition):
    def body(carry):
        count, values = carry
        return count + 1, values.at[count].set(9)

    carry = jnp.int32(2), jnp.zeros(4, jnp.int32)
    count, values = jax.jit(lambda holds, carry: run_if(holds, body, carry))(jnp.bool(condition), carry)
    assert int(count) == 2 + condition
    assert np.asarray(values).tolist() == [0, 0, 9 if condition else 0, 0]


def test_the_condition_may_differ_from_turn_to_turn_and_under_vmap():
    def turn(count, holds):
        count = run_if(holds, lambda n: 2 * n, count)
        return count, count

    holds = jnp.asarray([True, False, True, True, False])
    _, counts = jax.jit(lambda: jax.lax.scan(turn, jnp.int32(1), holds))()
    assert np.asarray(counts).tolist() == [2, 2, 4, 8, 8]
    each = jax.vmap(lambda holds, n: run_if(holds, lambda m: m + 1, n))(holds, jnp.arange(5, dtype=jnp.int32))
    assert np.asarray(each).tolist() == [1, 1, 3, 4, 4]


def test_what_was_read_is_what_was_there_before_a_write():
    @jax.jit
    def exchange(values):
        old = read_now(values.at[jnp.arange(2)].get(mode="fill", fill_value=0))
        return values.at[jnp.arange(2)].set(old[::-1]), old

    values, old = exchange(jnp.arange(4, dtype=jnp.int32))
    assert np.asarray(values).tolist() == [1, 0, 2, 3]
    assert np.asarray(old).tolist() == [0, 1]
