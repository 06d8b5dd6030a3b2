"""The contract of a ragged batch: what a backend is handed of values that break it, and what becomes of their rows.

Sequence s owns the query tokens `[cu_q_lens[s], cu_q_lens[s + 1])`; its j-th query has position
`kv_lens[s] - q_len + j` and sees the positions of its window up to its own. Lengths and tables are values inside a
compiled program, where nothing can be raised: a query that cannot be answered gets NaN, so that the fault shows where
it is and nowhere else. This is done once, around every backend, which is handed lengths and places that are legal.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels._ragged import MAX_INT32


class Batch(NamedTuple):
    """The legal part of a ragged batch, and the tokens that are not answered."""

    kv_lens: Int32[Array, " seqs"]  # 0 for a sequence without queries and for one that breaks the contract
    cu_q_lens: Int32[Array, " seqs+1"]  # all 0 if the bounds did not climb
    broken: Bool[Array, " tokens"]  # of a sequence that breaks the contract, or sees a position without a place: NaN
    empty: Bool[Array, " tokens"]  # padding, or of a sequence with nothing stored: 0


@jax.jit(static_argnames=("tokens", "blocks", "block_size", "max_q_len", "window", "reads_new"))
def legal_in_blocks(
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    tokens: int,
    blocks: int,
    block_size: int,
    max_q_len: int,
    window: int | None,
    reads_new: bool,
    block_order: Int32[Array, "seqs blocks_per_seq"] | None = None,
) -> tuple[Int32[Array, "seqs blocks_per_seq"], Batch]:
    """Tables that hold block ids alone, and the batch; a query that sees an entry that was none is broken.

    Args:
      block_tables: as the caller gave them.
      kv_lens: likewise.
      cu_q_lens: likewise.
      tokens: query rows.
      blocks: blocks in the pool.
      block_size: slots in a block.
      max_q_len: most queries of one sequence.
      window: positions that a query sees, its own included; None for all.
      reads_new: whether the batch's own keys come from beside the pool, so that their table entries do not matter.
      block_order: which block of its sequence each entry is, if a table has only some of them.
    """
    room = MAX_INT32 if block_order is not None else block_tables.shape[1] * block_size
    batch, (seq_ids, positions, num_stored) = _legal(kv_lens, cu_q_lens, tokens=tokens, max_q_len=max_q_len, room=room)
    is_block = (block_tables >= 0) & (block_tables < blocks)
    if block_order is not None:
        order, first = block_order[seq_ids], jnp.zeros_like(positions)
        if window is not None:
            first = jnp.maximum(positions - (window - 1), 0) // block_size
        seen = (order >= first[:, None]) & (order <= (positions // block_size)[:, None])
        unplaced = ~batch.empty & jnp.any(seen & ~is_block[seq_ids], axis=1)
        return jnp.where(is_block, block_tables, 0), batch._replace(broken=batch.broken | unplaced)
    illegal_before = jnp.pad(jnp.cumsum(~is_block, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    last = jnp.minimum(positions, num_stored - 1) if reads_new else positions
    first = jnp.zeros_like(last) if window is None else jnp.maximum(positions - (window - 1), 0)
    before_first, to_last = (
        illegal_before.at[seq_ids, entry].get(mode="clip") for entry in (first // block_size, last // block_size + 1)
    )
    unplaced = ~batch.empty & (last >= first) & (to_last > before_first)
    return jnp.where(is_block, block_tables, 0), batch._replace(broken=batch.broken | unplaced)


@jax.jit(static_argnames=("tokens", "slots", "max_q_len"))
def legal_in_ranges(
    starts: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    tokens: int,
    slots: int,
    max_q_len: int,
) -> tuple[Int32[Array, " seqs"], Batch]:
    """Starts of ranges that lie within the arena of `slots`, and the batch; a range that does not is broken."""
    room = jnp.where(starts >= 0, slots - starts, -1)
    batch, _ = _legal(kv_lens, cu_q_lens, tokens=tokens, max_q_len=max_q_len, room=room)
    return jnp.where(batch.kv_lens > 0, starts, 0), batch


@jax.jit
def settle(
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float32[Array, "tokens q_heads"] | None,
    batch: Batch,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """A backend's result, with 0 and -inf for empty tokens and NaN for broken ones, whatever it left there."""
    broken, empty = batch.broken[:, None], batch.empty[:, None]
    out = jnp.where(broken[..., None], jnp.nan, jnp.where(empty[..., None], 0, out))
    if lse is not None:
        lse = jnp.where(broken, jnp.nan, jnp.where(empty, -jnp.inf, lse))
    return out, lse


def _legal(
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    tokens: int,
    max_q_len: int,
    room: Int32[Array, " seqs"] | int,
) -> tuple[Batch, tuple[Int32[Array, " tokens"], Int32[Array, " tokens"], Int32[Array, " tokens"]]]:
    """Keeps the sequences that hold their own queries, have no more than promised and fit into their `room`.

    A sequence that holds nothing (kv_len 0) may look as it likes, as a padded row does.

    Returns:
      The batch, and for each token its sequence, its position in it and how many positions come before the batch's
      own; anything for a token that is broken or empty.
    """
    climbs = (cu_q_lens[0] == 0) & jnp.all(cu_q_lens[:-1] <= cu_q_lens[1:]) & (cu_q_lens[-1] <= tokens)
    cu_q_lens = jnp.where(climbs, cu_q_lens, 0)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    right = (kv_lens >= q_lens) & (kv_lens <= room) & (q_lens <= max_q_len)
    token_ids = jnp.arange(tokens, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(cu_q_lens[1:], token_ids, side="right", method="scan_unrolled").astype(jnp.int32)
    owned = seq_ids < kv_lens.shape[0]
    seq_ids = jnp.where(owned, seq_ids, 0)
    stores_nothing = (kv_lens == 0)[seq_ids]
    num_stored = (kv_lens - q_lens)[seq_ids]
    batch = Batch(
        kv_lens=jnp.where(right & (q_lens > 0), kv_lens, 0),
        cu_q_lens=cu_q_lens,
        broken=~climbs | (owned & ~stores_nothing & ~right[seq_ids]),
        empty=~owned | stores_nothing,
    )
    return batch, (seq_ids, num_stored + token_ids - cu_q_lens[seq_ids], num_stored)
