"""Outcomes are values: full memory is an answer, and a fault is remembered until the host reads it."""

import dataclasses
import enum
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Outcome(enum.IntEnum):
    """What a transition answers. Everything but `OK` leaves the state as it was."""

    OK = 0
    LATER = 1  # not now: ask again when something was released
    NEVER = 2  # cannot ever fit: refuse the request
    OUT_OF_BLOCKS = 3  # memory was asked for that the caller could have known is not there
    DOUBLE_FREE = 4  # something was released that nobody owns
    OUT_OF_RANGE = 5  # a row, a length or a token count that the memory does not have


class MemoryFaultError(RuntimeError):
    """A transition was asked for something that a correct caller never asks for."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faults:
    """A sticky record of what went wrong, cheap enough to carry through every jitted step."""

    word: jax.Array  # i32[]; bit `1 << outcome` is set once that fault happened
    row: jax.Array  # i32[]; row of the first fault, the number of rows while there was none


def no_faults(rows: int) -> Faults:
    """The clean record of a memory with `rows` rows."""
    return Faults(word=jnp.int32(0), row=jnp.int32(rows))


def record(faults: Faults, outcome: Outcome, bad_rows: Bool[Array, " rows"]) -> Faults:
    """Sets the bit of `outcome` if any row is bad, and keeps the first bad row ever seen."""
    rows = bad_rows.shape[0]
    any_bad = jnp.any(bad_rows)
    first = jnp.argmax(bad_rows).astype(jnp.int32)
    return Faults(
        word=faults.word | jnp.where(any_bad, 1 << outcome, 0),
        row=jnp.where(any_bad & (faults.row == rows), first, faults.row),
    )


def raise_on_fault(faults: Faults, owner: str = "") -> None:
    """Host side: turns a set fault word into an exception that names the faults, the row and its owner.

    Raises:
      MemoryFaultError: if any fault was recorded.
    """
    word = int(faults.word)
    if word == 0:
        return
    names = ", ".join(o.name for o in Outcome if word & (1 << o))
    whose = f" (held by {owner})" if owner else ""
    raise MemoryFaultError(
        f"the KV memory recorded {names}, first at row {int(faults.row)}{whose}; what was faulty was "
        "refused and the memory is as sound as before, but the caller's bookkeeping no longer matches it"
    )


def select_outcome(*cases: tuple[Bool[Array, ""], Outcome]) -> Int32[Array, ""]:
    """The outcome of the first case that holds, `OK` if none does."""
    answer = jnp.int32(Outcome.OK)
    for holds, outcome in reversed(cases):
        answer = jnp.where(holds, jnp.int32(outcome), answer)
    return answer
