"""A ragged batch: the new tokens of all rows in one flat axis, row after row."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Ragged(NamedTuple):
    """Where each token of a batch belongs. Beyond the last token `row` is the number of rows."""

    cu_lens: Int32[Array, " rows_and_one"]
    row: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]


def ragged(starts: Int32[Array, " rows"], counts: Int32[Array, " rows"], num_tokens: int) -> Ragged:
    """A batch in which row r has `counts[r]` tokens from position `starts[r]` on.

    Args:
      starts: position of each row's first token.
      counts: tokens of each row.
      num_tokens: length of the flat axis, at least the sum of `counts`.
    """
    cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_lens, index, side="right", method="compare_all").astype(jnp.int32) - 1
    # Beyond the last token every look-up below is filled, not clamped.
    start = starts.at[row].get(mode="fill", fill_value=0)
    return Ragged(cu_lens, row, start + index - cu_lens.at[row].get(mode="fill", fill_value=0))


def tokens_of(
    transcripts: Int32[Array, "requests width"], row_request: Int32[Array, " rows"], batch: Ragged
) -> Int32[Array, " tokens"]:
    """The tokens of a batch, 0 beyond its end.

    Args:
      transcripts: prompt and output so far of each request.
      row_request: the request in each row.
      batch: rows and positions.
    """
    request = row_request.at[batch.row].get(mode="fill", fill_value=transcripts.shape[0])
    return transcripts.at[request, batch.position].get(mode="fill", fill_value=0)
