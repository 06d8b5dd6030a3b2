"""Queries of a ragged batch cut into tiles of one sequence each, which is what a kernel works on."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Runs of at most `q_tile` consecutive queries of one sequence; a tile that does not exist has no queries."""

    seq_ids: jax.Array  # i32[tiles]
    first_tokens: jax.Array  # i32[tiles]; row of q that holds the tile's first query
    first_positions: jax.Array  # i32[tiles]; position of that query in its sequence
    num_queries: jax.Array  # i32[tiles]
    num_stored: jax.Array  # i32[tiles]; positions of the sequence that come before this call's
    kv_starts: jax.Array  # i32[tiles]; first position that the tile sees
    kv_ends: jax.Array  # i32[tiles]; one past the last, 0 where the tile does not exist


def cut_queries(
    q_lens: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    window: int | None,
    q_tile: int,
    max_tiles: int,
) -> QueryTiles:
    """Cuts `q_lens` queries of each sequence into tiles, those that see the most positions first."""
    tiles_per_seq = (q_lens + q_tile - 1) // q_tile
    tile_ends = jnp.cumsum(tiles_per_seq)
    tile_ids = jnp.arange(max_tiles, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(tile_ends, tile_ids, side="right", method="scan_unrolled").astype(jnp.int32)
    seq_ids = jnp.minimum(seq_ids, q_lens.shape[0] - 1)
    skipped = (tile_ids - (tile_ends - tiles_per_seq)[seq_ids]) * q_tile
    num_queries = jnp.where(tile_ids < tile_ends[-1], jnp.minimum(q_lens[seq_ids] - skipped, q_tile), 0)
    num_stored = (kv_lens - q_lens)[seq_ids]
    first_positions = num_stored + skipped
    kv_starts = jnp.zeros_like(skipped) if window is None else jnp.maximum(first_positions - (window - 1), 0)
    exists = num_queries > 0
    tiles = QueryTiles(
        seq_ids=seq_ids,
        first_tokens=cu_q_lens[seq_ids] + skipped,
        first_positions=first_positions,
        num_queries=num_queries,
        num_stored=num_stored,
        kv_starts=jnp.where(exists, kv_starts, 0),
        kv_ends=jnp.where(exists, first_positions + num_queries, 0),
    )
    # Tiles of like length go together, so none waits long for another, and those that do not exist come last.
    order = jnp.argsort(tiles.kv_ends - tiles.kv_starts, descending=True)
    return jax.tree.map(lambda field: field[order], tiles)
