"""Causal attention of a ragged batch over keys and values that are found slot by slot.

Paged and contiguous memory differ in one function: which slot holds position p of sequence s. All else is here,
so the two do the same arithmetic in the same order and their outputs are equal bit for bit.

Queries are cut into tiles of one sequence each. A tile reads keys and values `KV_TILE` positions at a time and
keeps a running maximum, denominator and weighted sum in float32 (online softmax, Milakov and Gimelshein 2018,
arXiv 1805.02867), so no more than a few tiles of keys exist at once whatever the context. The loops run as often
as the lengths of the batch ask, not as often as its capacity would allow.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._ragged import poison_tokens, within_contract

# Measured on two CPU cores, batches of 16 to 128 tokens at contexts of 500 to 2,048: positions per step of the
# softmax, queries per tile of a prefill chunk, and tiles that take their steps together. A decode row gets a tile
# of one query, as it would waste the rest of a larger one (a batch of 30 rows and a chunk of 98 tokens: 30 ms
# against 46 ms with one tile size of 8).
KV_TILE = 128
PREFILL_TILE = 16
PREFILL_TILES_AT_ONCE = 2
DECODE_TILES_AT_ONCE = 4

LOWEST = float(jnp.finfo(jnp.float32).min)

# Slot ids of given positions of given sequences; any id outside the pool says that the position has no slot.
SlotsOf = Callable[[Int32[Array, " tiles"], Int32[Array, " kv_tile"]], Int32[Array, "tiles kv_tile"]]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Runs of at most `q_tile` consecutive queries of one sequence; a tile that does not exist has no queries."""

    seq_ids: jax.Array  # i32[tiles]
    first_tokens: jax.Array  # i32[tiles]; row of q that holds the tile's first query
    first_positions: jax.Array  # i32[tiles]; position of that query in its sequence
    num_queries: jax.Array  # i32[tiles]
    kv_ends: jax.Array  # i32[tiles]; one past the last position that the tile sees, 0 where it does not exist


def stream_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    slots_of: SlotsOf,
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    scale: float,
    max_q_len: int,
    capacity: int,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Attends every query over the stored positions up to its own.

    Args:
      q: queries, those of one sequence after those of another.
      k: keys, every slot of the pool; one that no query sees may hold anything.
      v: values.
      slots_of: where the positions of a sequence are stored.
      kv_lens: positions stored per sequence, those of this batch's queries included.
      cu_q_lens: bounds of the sequences among the tokens.
      scale: factor of the logits.
      max_q_len: most queries of one sequence.
      capacity: most positions that `slots_of` can place for one sequence.

    Returns:
      The output in q's dtype. 0 for tokens of no sequence and of sequences with nothing stored; NaN for a sequence
      whose lengths break the contract, and for a query that sees a position without a slot.
    """
    tokens, seqs = q.shape[0], kv_lens.shape[0]
    right = within_contract(kv_lens, cu_q_lens, max_q_len=max_q_len, capacity=capacity)
    q_lens = jnp.where(right & (kv_lens > 0), cu_q_lens[1:] - cu_q_lens[:-1], 0)

    out = jnp.zeros(q.shape, jnp.float32)
    singles = jnp.where(q_lens == 1, 1, 0)
    tiles = cut_queries(singles, kv_lens, cu_q_lens, q_tile=1, max_tiles=min(seqs, tokens))
    out = _attend(out, q, k, v, slots_of, tiles, scale, q_tile=1, at_once=DECODE_TILES_AT_ONCE)
    runs = min(seqs, tokens // 2)
    if max_q_len > 1 and runs > 0:
        q_tile = min(PREFILL_TILE, max_q_len)
        # Each run of n tokens takes ceil(n / q_tile) <= (n + q_tile - 1) / q_tile tiles.
        max_tiles = (tokens + runs * (q_tile - 1)) // q_tile
        tiles = cut_queries(q_lens - singles, kv_lens, cu_q_lens, q_tile=q_tile, max_tiles=max_tiles)
        out = _attend(out, q, k, v, slots_of, tiles, scale, q_tile=q_tile, at_once=PREFILL_TILES_AT_ONCE)
    return poison_tokens(out, right, cu_q_lens).astype(q.dtype)


def cut_queries(
    q_lens: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    q_tile: int,
    max_tiles: int,
) -> QueryTiles:
    """Cuts `q_lens` queries of each sequence into tiles, those that see the most positions first."""
    tiles_per_seq = (q_lens + q_tile - 1) // q_tile
    tile_ends = jnp.cumsum(tiles_per_seq)
    tile_ids = jnp.arange(max_tiles, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(tile_ends, tile_ids, side="right").astype(jnp.int32)
    seq_ids = jnp.minimum(seq_ids, q_lens.shape[0] - 1)
    skipped = (tile_ids - (tile_ends - tiles_per_seq)[seq_ids]) * q_tile
    num_queries = jnp.where(tile_ids < tile_ends[-1], jnp.minimum(q_lens[seq_ids] - skipped, q_tile), 0)
    first_positions = (kv_lens - q_lens)[seq_ids] + skipped
    tiles = QueryTiles(
        seq_ids=seq_ids,
        first_tokens=cu_q_lens[seq_ids] + skipped,
        first_positions=first_positions,
        num_queries=num_queries,
        kv_ends=jnp.where(num_queries > 0, first_positions + num_queries, 0),
    )
    # Tiles of like length go together, so none waits long for another, and those that do not exist come last.
    order = jnp.argsort(tiles.kv_ends, descending=True)
    return jax.tree.map(lambda field: field[order], tiles)


def visible_keys(
    query_positions: Int32[Array, "tiles queries"], positions: Int32[Array, " kv_tile"]
) -> Bool[Array, "tiles 1 queries kv_tile"]:
    """The causal mask: a query sees the positions up to its own."""
    return (positions[None, None] <= query_positions[:, :, None])[:, None]


def load_tile(
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    slots: Int32[Array, "tiles kv_tile"],
    used: Bool[Array, "tiles kv_tile"],
) -> tuple[Float[Array, "tiles kv_heads kv_tile head_dim"], Float[Array, "tiles kv_heads kv_tile head_dim"]]:
    """Keys and values of a step. A value that is not `used` is 0, as its weight of 0 would keep a NaN alive."""
    slots = jnp.where(used, slots, 0)
    keys, values = (pool.at[slots].get(mode="promise_in_bounds").astype(jnp.float32) for pool in (k, v))
    values = jnp.where(used[:, :, None, None], values, 0)
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def accumulate(
    state: tuple[Array, Array, Array],
    scores: Float[Array, "tiles kv_heads queries kv_tile"],
    values: Float[Array, "tiles kv_heads kv_tile head_dim"],
) -> tuple[Array, Array, Array]:
    """One step of the online softmax: (maximum, denominator, weighted sum of values) with more keys seen.

    A score of `LOWEST` weighs exactly 0, as every query sees position 0 and so has a larger one from the first step.
    """
    maximum, denominator, weighted = state
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    rescale = jnp.exp(maximum - new_maximum)
    weights = jnp.exp(scores - new_maximum[..., None])
    denominator = denominator * rescale + jnp.sum(weights, axis=-1)
    added = jnp.einsum("chqt,chtd->chqd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return new_maximum, denominator, weighted * rescale[..., None] + added


def _attend(
    out: Float[Array, "tokens q_heads head_dim"],
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    slots_of: SlotsOf,
    tiles: QueryTiles,
    scale: float,
    *,
    q_tile: int,
    at_once: int,
) -> Float[Array, "tokens q_heads head_dim"]:
    """`out` with the rows of `tiles` filled in, `at_once` tiles at a time and only as many as exist."""
    tokens, q_heads, head_dim = q.shape
    slots, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    num_tiles = jnp.sum(tiles.num_queries > 0, dtype=jnp.int32)
    padding = -tiles.seq_ids.shape[0] % at_once
    tiles = jax.tree.map(lambda field: jnp.pad(field, (0, padding)).reshape(-1, at_once), tiles)
    offsets = jnp.arange(q_tile, dtype=jnp.int32)[None]

    def some_tiles(i: Int32[Array, ""], out: Array) -> Array:
        some = jax.tree.map(lambda field: field[i], tiles)
        rows = jnp.where(offsets < some.num_queries[:, None], some.first_tokens[:, None] + offsets, tokens)
        queries = q.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32) * scale
        queries = queries.reshape(at_once, q_tile, kv_heads, group, head_dim).swapaxes(1, 2)
        queries = queries.reshape(at_once, kv_heads, q_tile * group, head_dim)
        query_positions = jnp.repeat(some.first_positions[:, None] + offsets, group, axis=1)

        def step(j: Int32[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # Seen as changing with j, the pools stay as they are. XLA on a CPU would otherwise gather bfloat16 from a
            # float32 copy of the whole pool, made ahead of the loop.
            k_now, v_now, j = jax.lax.optimization_barrier((k, v, j))
            positions = j * KV_TILE + jnp.arange(KV_TILE, dtype=jnp.int32)
            slot_ids = slots_of(some.seq_ids, positions)
            needed = positions[None] < some.kv_ends[:, None]
            placed = (slot_ids >= 0) & (slot_ids < slots)
            keys, values = load_tile(k_now, v_now, slot_ids, needed & placed)
            scores = jnp.einsum("chqd,chtd->chqt", queries, keys, precision=jax.lax.Precision.HIGHEST)
            scores = jnp.where((needed & ~placed)[:, None, None], jnp.nan, scores)
            scores = jnp.where(visible_keys(query_positions, positions), scores, LOWEST)
            return accumulate(state, scores, values)

        stats = (at_once, kv_heads, q_tile * group)
        state = (
            jnp.full(stats, LOWEST, jnp.float32),
            jnp.zeros(stats, jnp.float32),
            jnp.zeros((*stats, head_dim), jnp.float32),
        )
        steps = (jnp.max(some.kv_ends) + KV_TILE - 1) // KV_TILE
        _, denominator, weighted = jax.lax.fori_loop(0, steps, step, state)
        # A query sees at least itself, so only rows that are dropped below can divide by 0.
        result = (weighted / denominator[..., None]).reshape(at_once, kv_heads, q_tile, group, head_dim)
        result = result.swapaxes(1, 2).reshape(at_once, q_tile, q_heads, head_dim)
        return out.at[rows].set(result, mode="drop")

    return jax.lax.fori_loop(0, (num_tiles + at_once - 1) // at_once, some_tiles, out)
