"""Control flow that XLA runs in place."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

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
