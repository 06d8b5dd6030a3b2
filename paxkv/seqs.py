"""The sequences in flight, as every memory keeps them: who holds a row, and how far it has come."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.outcomes import Faults, Outcome, no_faults, record, select_outcome
from paxkv.sizes import require_int


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seqs:
    """One row per sequence. A free row is all zero: nothing of its last owner stays behind."""

    active: jax.Array  # bool[rows]; the row belongs to a sequence
    lengths: jax.Array  # i32[rows]; tokens whose keys and values are stored
    promised: jax.Array  # i32[rows]; tokens that admission granted, stored yet or not
    faults: Faults


def init_seqs(rows: int) -> Seqs:
    """`rows` free rows."""
    zeros = jnp.zeros(rows, jnp.int32)
    return Seqs(
        active=jnp.zeros(rows, jnp.bool),
        lengths=zeros,
        promised=jnp.zeros_like(zeros),
        faults=no_faults(rows),
    )


def lowest_free_row(seqs: Seqs) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
    """The free row with the lowest id, and whether there is one (if not, the id is the number of rows)."""
    rows = seqs.active.shape[0]
    exists = ~jnp.all(seqs.active)
    return jnp.where(exists, jnp.argmin(seqs.active).astype(jnp.int32), jnp.int32(rows)), exists


def occupy(
    seqs: Seqs,
    row: Int32[Array, ""],
    promised: Int32[Array, ""],
    ok: Bool[Array, ""],
    stored: Int32[Array, ""] | None = None,
) -> Seqs:
    """Gives `row` to a sequence that was promised room for `promised` tokens; nothing happens unless `ok`.

    `stored` of its tokens have their keys and values in memory already; none unless given.
    """
    at = jnp.where(ok, row, seqs.active.shape[0])
    return dataclasses.replace(
        seqs,
        active=seqs.active.at[at].set(True, mode="drop"),
        promised=seqs.promised.at[at].set(promised, mode="drop"),
        lengths=seqs.lengths if stored is None else seqs.lengths.at[at].set(stored, mode="drop"),
    )


def longer(seqs: Seqs, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> Seqs:
    """These rows with so many tokens more."""
    return dataclasses.replace(seqs, lengths=seqs.lengths + jnp.where(grows, steps, 0))


def check_append(
    seqs: Seqs, new_tokens: Int32[Array, " rows"], max_len: int | Int32[Array, " rows"], max_new_tokens: int
) -> Bool[Array, " rows"]:
    """Rows whose request to grow is malformed: negative, beyond `max_new_tokens`, a free row, or past `max_len`.

    Raises:
      ValueError: if `max_new_tokens` is not a positive int.
    """
    require_int("max_new_tokens", max_new_tokens)
    if new_tokens.shape != seqs.lengths.shape or new_tokens.dtype != jnp.int32:
        raise ValueError(
            f"new_tokens: expected int32[{seqs.lengths.shape[0]}], one count a row, got {new_tokens.dtype}"
            f"{list(new_tokens.shape)}"
        )
    unbounded = (new_tokens < 0) | (new_tokens > max_new_tokens)
    # Not `lengths + new_tokens > max_len`: that sum wraps around for counts near 2**31.
    return unbounded | (new_tokens > max_len - seqs.lengths) | ((new_tokens > 0) & ~seqs.active)


def advance(
    seqs: Seqs, new_lengths: Int32[Array, " rows"], malformed: Bool[Array, " rows"], served: Bool[Array, ""]
) -> tuple[Seqs, Int32[Array, ""]]:
    """Books how an append went: the new lengths, or a fault at the rows that are to blame and nothing else.

    Args:
      seqs: the sequences before.
      new_lengths: tokens stored afterwards; the old lengths if anything is malformed.
      malformed: what `check_append` said.
      served: whether there was memory for `new_lengths`.

    Returns:
      The sequences and the `Outcome`: `OK`, `OUT_OF_RANGE` or `OUT_OF_BLOCKS`.
    """
    valid = ~jnp.any(malformed)
    faults = record(seqs.faults, Outcome.OUT_OF_RANGE, malformed)
    faults = record(faults, Outcome.OUT_OF_BLOCKS, (new_lengths > seqs.lengths) & ~served)
    lengths = jnp.where(served, new_lengths, seqs.lengths)
    outcome = select_outcome((~valid, Outcome.OUT_OF_RANGE), (~served, Outcome.OUT_OF_BLOCKS))
    return dataclasses.replace(seqs, lengths=lengths, faults=faults), outcome


def blame(seqs: Seqs, at: Int32[Array, ""], wrong: Bool[Array, ""], outcome: Outcome) -> Seqs:
    """Records a fault, if something is wrong, at the row with number `at`, or the one nearest to it."""
    rows = seqs.active.shape[0]
    blamed = jnp.arange(rows, dtype=jnp.int32) == jnp.clip(at, 0, rows - 1)
    return dataclasses.replace(seqs, faults=record(seqs.faults, outcome, blamed & wrong))


def vacate(seqs: Seqs, rows: Bool[Array, " rows"]) -> tuple[Seqs, Bool[Array, " rows"]]:
    """Frees the masked rows; releasing a row that is free already is recorded as a double free.

    Returns:
      The sequences and the mask of rows that really were released.
    """
    released = rows & seqs.active
    kept = ~released
    return Seqs(
        active=seqs.active & kept,
        lengths=jnp.where(kept, seqs.lengths, 0),
        promised=jnp.where(kept, seqs.promised, 0),
        faults=record(seqs.faults, Outcome.DOUBLE_FREE, rows & ~seqs.active),
    ), released
