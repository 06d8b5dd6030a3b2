"""Control flow and reads that XLA runs in place and without waste."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

Carry = TypeVar("Carry")


def run_if(condition: Bool[Array, ""], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`body(carry)` if the condition holds, else `carry`; in place.

    A loop that runs once or not at all: XLA copies what the branches of a conditional write (all keys and values, or
    a whole pool, in every step), but not what a loop carries.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, c: body(c), carry)


def read_now(values: Carry) -> Carry:
    """The same values, read before whatever is computed from them.

    Without it XLA may fuse a read of an array into a computation that comes after a write to the same array, and then
    copies all of the array, to have the old one still.
    """
    return jax.lax.optimization_barrier(values)


_FEW_BYTES = 2**15  # read in about the time that threads take to begin


def read_rows(array: Shaped[Array, "rows ..."], ids: Int32[Array, " n"]) -> Shaped[Array, "n ..."]:
    """Row `ids[i]` of the array for each i, read before whatever is computed from it; ids must be in range.

    On a CPU a few rows are read one by one: XLA charges a gather as if it read all of the array and hands that from a
    large one to threads, which for some hundred rows takes longer than to read them.
    """
    few = ids.size * math.prod(array.shape[1:]) * array.dtype.itemsize <= _FEW_BYTES
    return read_now(jax.lax.platform_dependent(array, ids, cpu=_one_by_one if few else _at_once, default=_at_once))


def _at_once(array: jax.Array, ids: jax.Array) -> jax.Array:
    return array.at[ids].get(mode="promise_in_bounds")


def _one_by_one(array: jax.Array, ids: jax.Array) -> jax.Array:
    def read(_: None, at: jax.Array) -> tuple[None, jax.Array]:
        return None, jax.lax.dynamic_index_in_dim(array, at, keepdims=False)

    return jax.lax.scan(read, None, ids)[1]
