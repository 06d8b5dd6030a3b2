"""Causal attention of a ragged batch over keys and values that are found slot by slot.

Paged and contiguous memory differ in one function: which slot holds position p of sequence s. All else is here,
so the two do the same arithmetic in the same order and their outputs are equal bit for bit.

Queries are cut into tiles of one sequence each. A tile reads keys and values `KV_TILE` positions at a time and
keeps a running maximum, denominator and weighted sum in float32 (online softmax, Milakov and Gimelshein 2018,
arXiv 1805.02867), so no more than a few tiles of keys exist at once whatever the context. The loops run as often
as the lengths and the window of the batch ask, not as often as its capacity would allow.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from pallas_kernels._query_tiles import QueryTiles, cut_queries
from pallas_kernels.int4 import unpack_int4

# Measured on two CPU cores, batches of 16 to 128 tokens at contexts of 500 to 2,048: positions per step of the
# softmax, queries per tile of a prefill chunk, and tiles that take their steps together. A decode row gets a tile
# of one query, as it would waste the rest of a larger one (a batch of 30 rows and a chunk of 98 tokens: 30 ms
# against 46 ms with one tile size of 8). One of at least LONG_KV_TILE positions goes by itself in steps of so many:
# blocks that lie anywhere then cost 1.1 to 1.2 times a range, against 1.2 to 1.4 times in short steps.
KV_TILE = 128
LONG_KV_TILE = 2048
PREFILL_TILE = 16
PREFILL_TILES_AT_ONCE = 2
DECODE_TILES_AT_ONCE = 4

LOWEST = float(jnp.finfo(jnp.float32).min)

# Slot ids of positions `[tiles, kv_tile]` of sequences `[tiles]`; anything for a position past the sequence's end.
SlotsOf = Callable[[Int32[Array, " tiles"], Int32[Array, "tiles kv_tile"]], Int32[Array, "tiles kv_tile"]]
Softmax = tuple[
    Float32[Array, "tiles kv_heads queries"],  # the largest score so far
    Float32[Array, "tiles kv_heads queries"],  # sum of exp(score - largest)
    Float32[Array, "tiles kv_heads queries head_dim"],  # the same sum, of values
]


# Positions of places `[tiles, kv_tile]` in a source; anything for a place past the sequence's end.
PositionsOf = SlotsOf
# Given bounds `[tiles]` of positions, those of the places in a source that hold them all, and perhaps some beside.
SpanOf = Callable[
    [Int32[Array, " tiles"], Int32[Array, " tiles"], Int32[Array, " tiles"]],
    tuple[Int32[Array, " tiles"], Int32[Array, " tiles"]],
]


class Sparse(typing.NamedTuple):
    """Where a source's places do not hold one position after another: they rise, with gaps."""

    positions_of: PositionsOf
    span_of: SpanOf


class Source(typing.NamedTuple):
    """Keys and values of some positions, and where they lie. A slot that no query sees may hold anything."""

    k: Num[Array, "slots kv_heads head_dim"]
    v: Num[Array, "slots kv_heads head_dim"]
    k_scale: Float32[Array, "..."] | None  # [], [kv_heads] or [slots, kv_heads]
    v_scale: Float32[Array, "..."] | None
    slots_of: SlotsOf  # of places
    capacity: int  # most places of one sequence
    sparse: Sparse | None = None  # None: a position's place is itself


Span = tuple[Int32[Array, " tiles"], Int32[Array, " tiles"]]


class Part(typing.NamedTuple):
    """A source for the positions from where the part before it ends."""

    source: Source
    kv_tiles: tuple[int, ...]  # positions that a step takes: of several sizes the largest goes first
    ends_of: Callable[[QueryTiles], Int32[Array, " tiles"]]  # one past its last position, for every tile of queries


def stream_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    stored: Source,
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    k_new: Float[Array, "tokens kv_heads head_dim"] | None,
    v_new: Float[Array, "tokens kv_heads head_dim"] | None,
    k_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    v_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    sinks: Float32[Array, " q_heads"] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    return_lse: bool,
    max_q_len: int,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """Attends every query over the positions of its window up to its own; lengths and places are legal.

    Args:
      q: queries, those of one sequence after those of another.
      stored: the cache.
      kv_lens: positions per sequence, those of this batch's queries included; 0 for one that has none.
      cu_q_lens: bounds of the sequences among the tokens.
      k_new: keys of the tokens, read instead of those that are stored at their positions, or None.
      v_new: values of the tokens, or None.
      k_first: keys of the first positions of every sequence, read instead of those that are stored there, or None.
      v_first: values of those positions, or None.
      sinks: a logit for each query head that every softmax has besides those of its keys, or None.
      scale: factor of the logits.
      window: positions that a query sees, its own included; None for all.
      soft_cap: the logits become `soft_cap * tanh(logits / soft_cap)`.
      return_lse: whether the logarithm of the denominators is wanted.
      max_q_len: most queries of one sequence.

    Returns:
      The output in q's dtype and the logarithm; 0 and -inf for tokens of sequences with kv_len 0 and of none.
    """
    tokens, q_heads, _ = q.shape
    seqs = kv_lens.shape[0]
    q_lens = jnp.where(kv_lens > 0, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    read_new = k_new is not None

    def stored_ends(tiles: QueryTiles) -> Int32[Array, " tiles"]:
        return tiles.num_stored if read_new else tiles.kv_ends

    before: list[Part] = []
    if k_first is not None and v_first is not None:
        first_tokens = k_first.shape[1]

        def place_of(
            seq_ids: Int32[Array, " tiles"], positions: Int32[Array, "tiles kv_tile"]
        ) -> Int32[Array, "tiles kv_tile"]:
            return seq_ids[:, None] * first_tokens + positions

        keys, values = (x.reshape(-1, *x.shape[2:]) for x in (k_first, v_first))
        before.append(
            Part(
                Source(keys, values, None, None, place_of, first_tokens),
                (min(KV_TILE, first_tokens),),
                lambda tiles: jnp.minimum(stored_ends(tiles), first_tokens),
            )
        )
    after: list[Part] = []
    if k_new is not None and v_new is not None:
        first_rows = cu_q_lens[:-1] - (kv_lens - q_lens)

        def row_of(
            seq_ids: Int32[Array, " tiles"], positions: Int32[Array, "tiles kv_tile"]
        ) -> Int32[Array, "tiles kv_tile"]:
            return first_rows[seq_ids][:, None] + positions

        new = Source(k_new, v_new, None, None, row_of, max_q_len)
        after.append(Part(new, (min(KV_TILE, max_q_len),), lambda tiles: tiles.kv_ends))
    sink = jnp.full(q_heads, -jnp.inf, jnp.float32) if sinks is None else sinks

    def attend(
        results: tuple[Array, Array], q_lens: Array, *, q_tile: int, max_tiles: int, at_once: int, long: bool = False
    ) -> tuple[Array, Array]:
        tiles = cut_queries(q_lens, kv_lens, cu_q_lens, window=window, q_tile=q_tile, max_tiles=max_tiles)
        parts = [*before, Part(stored, (LONG_KV_TILE, KV_TILE) if long else (KV_TILE,), stored_ends), *after]
        return _attend(results, q, parts, tiles, sink, scale, window, soft_cap, q_tile=q_tile, at_once=at_once)

    results = (jnp.zeros(q.shape, jnp.float32), jnp.full((tokens, q_heads), -jnp.inf, jnp.float32))
    singles, max_singles = jnp.where(q_lens == 1, 1, 0), min(seqs, tokens)
    short = singles
    if stored.capacity >= LONG_KV_TILE and (window is None or window >= LONG_KV_TILE):
        short = jnp.where(kv_lens < LONG_KV_TILE, singles, 0)
        results = attend(results, singles - short, q_tile=1, max_tiles=max_singles, at_once=1, long=True)
    results = attend(results, short, q_tile=1, max_tiles=max_singles, at_once=DECODE_TILES_AT_ONCE)
    runs = min(seqs, tokens // 2)
    if max_q_len > 1 and runs > 0:
        q_tile = min(PREFILL_TILE, max_q_len)
        # Each run of n tokens takes ceil(n / q_tile) <= (n + q_tile - 1) / q_tile tiles.
        max_tiles = (tokens + runs * (q_tile - 1)) // q_tile
        results = attend(results, q_lens - singles, q_tile=q_tile, max_tiles=max_tiles, at_once=PREFILL_TILES_AT_ONCE)
    out, lse = results
    return out.astype(q.dtype), lse if return_lse else None


def visible_keys(
    query_positions: Int32[Array, "tiles queries"], positions: Int32[Array, "tiles kv_tile"], window: int | None
) -> Bool[Array, "tiles 1 queries kv_tile"]:
    """The causal mask: a query sees the `window` positions up to its own, or all of them."""
    behind = query_positions[:, :, None] - positions[:, None]
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return visible[:, None]


def load_tile(
    source: Source, slots: Int32[Array, "tiles kv_tile"], used: Bool[Array, "tiles kv_tile"]
) -> tuple[Float32[Array, "tiles kv_heads kv_tile head_dim"], Float32[Array, "tiles kv_heads kv_tile head_dim"]]:
    """Keys and values of a step. A value that is not `used` is 0, as its weight of 0 would keep a NaN alive."""
    slots = jnp.where(used, slots, 0)
    keys = _load(source.k, source.k_scale, slots)
    values = jnp.where(used[:, :, None, None], _load(source.v, source.v_scale, slots), 0)
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def _load(
    pool: Num[Array, "slots kv_heads width"],
    scales: Float32[Array, "..."] | None,
    slots: Int32[Array, "tiles kv_tile"],
) -> Float32[Array, "tiles kv_tile kv_heads head_dim"]:
    items = pool.at[slots].get(mode="promise_in_bounds")
    if items.dtype == jnp.uint8:
        items = unpack_int4(items)
    items = items.astype(jnp.float32)
    if scales is None:
        return items
    if scales.ndim == 2:
        scales = scales.at[slots].get(mode="promise_in_bounds")
    return items * jnp.broadcast_to(scales, items.shape[:-1])[..., None]


def cap(scores: Float32[Array, "*shape"], soft_cap: float | None) -> Float32[Array, "*shape"]:
    """Scores bounded smoothly by `soft_cap`."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def begin(sinks: Float32[Array, "tiles kv_heads queries"], head_dim: int) -> Softmax:
    """A softmax that has seen its sink and no key; a sink of -inf is none."""
    maximum = jnp.maximum(sinks, LOWEST)
    return maximum, jnp.exp(sinks - maximum), jnp.zeros((*sinks.shape, head_dim), jnp.float32)


def accumulate(
    state: Softmax,
    scores: Float32[Array, "tiles kv_heads queries kv_tile"],
    values: Float32[Array, "tiles kv_heads kv_tile head_dim"],
) -> Softmax:
    """One step of the online softmax, with more keys seen.

    A score of `LOWEST` comes to weigh exactly 0: every query sees at least itself, and the first score above `LOWEST`
    multiplies by 0 whatever has been summed before.
    """
    maximum, denominator, weighted = state
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    rescale = jnp.exp(maximum - new_maximum)
    weights = jnp.exp(scores - new_maximum[..., None])
    denominator = denominator * rescale + jnp.sum(weights, axis=-1)
    added = jnp.einsum("chqt,chtd->chqd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return new_maximum, denominator, weighted * rescale[..., None] + added


def _attend(
    results: tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]],
    q: Float[Array, "tokens q_heads head_dim"],
    parts: list[Part],
    tiles: QueryTiles,
    sinks: Float32[Array, " q_heads"],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    *,
    q_tile: int,
    at_once: int,
) -> tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]]:
    """`results` with the rows of `tiles` filled in, `at_once` tiles at a time and only as many as exist."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = parts[0].source.k.shape[1]
    group = q_heads // kv_heads
    num_tiles = jnp.sum(tiles.num_queries > 0, dtype=jnp.int32)
    padding = -tiles.seq_ids.shape[0] % at_once
    tiles = jax.tree.map(lambda field: jnp.pad(field, (0, padding)).reshape(-1, at_once), tiles)
    offsets = jnp.arange(q_tile, dtype=jnp.int32)[None]
    sinks = jnp.tile(sinks.reshape(kv_heads, group), (1, q_tile))
    sinks = jnp.broadcast_to(sinks[None], (at_once, kv_heads, q_tile * group))

    def by_kv_head(rows: Array) -> Array:
        rows = rows.reshape(at_once, q_tile, kv_heads, group, *rows.shape[3:]).swapaxes(1, 2)
        return rows.reshape(at_once, kv_heads, q_tile * group, *rows.shape[4:])

    def by_token(rows: Array) -> Array:
        rows = rows.reshape(at_once, kv_heads, q_tile, group, *rows.shape[3:]).swapaxes(1, 2)
        return rows.reshape(at_once, q_tile, q_heads, *rows.shape[4:])

    def some_tiles(i: Int32[Array, ""], results: tuple[Array, Array]) -> tuple[Array, Array]:
        some = jax.tree.map(lambda field: field[i], tiles)
        rows = jnp.where(offsets < some.num_queries[:, None], some.first_tokens[:, None] + offsets, tokens)
        queries = by_kv_head(q.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32) * scale)
        query_positions = jnp.repeat(some.first_positions[:, None] + offsets, group, axis=1)

        def over(source: Source, kv_tile: int, starts: Array, ends: Array, state: Softmax, see: Span) -> Softmax:
            def step(j: Int32[Array, ""], state: Softmax) -> Softmax:
                # Seen as changing with j, the pools stay as they are. XLA on a CPU would otherwise gather bfloat16 from
                # a float32 copy of the whole pool, made ahead of the loop.
                (k, v, k_scale, v_scale), j = jax.lax.optimization_barrier((source[:4], j))
                places = starts[:, None] + j * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)[None]
                positions, used = places, places < ends[:, None]
                if source.sparse is not None:
                    positions = source.sparse.positions_of(some.seq_ids, places)
                    used &= (positions >= see[0][:, None]) & (positions < see[1][:, None])
                slots = source.slots_of(some.seq_ids, places)
                now = source._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
                keys, values = load_tile(now, slots, used)
                scores = jnp.einsum("chqd,chtd->chqt", queries, keys, precision=jax.lax.Precision.HIGHEST)
                visible = visible_keys(query_positions, positions, window) & used[:, None, None]
                return accumulate(state, jnp.where(visible, cap(scores, soft_cap), LOWEST), values)

            steps = (jnp.max(ends - starts) + kv_tile - 1) // kv_tile
            return jax.lax.fori_loop(0, steps, step, state)

        state, begun = begin(sinks, head_dim), some.kv_starts
        for part in parts:
            ends = part.ends_of(some)
            see = start, end = begun, jnp.minimum(ends, some.kv_ends)
            if part.source.sparse is not None:
                start, end = part.source.sparse.span_of(some.seq_ids, start, end)
            for kv_tile in part.kv_tiles:
                # Whole tiles, but for the last size, which takes what is left.
                stop = end if kv_tile == part.kv_tiles[-1] else start + jnp.maximum(end - start, 0) // kv_tile * kv_tile
                state = over(part.source, kv_tile, start, stop, state, see)
                start = stop
            begun = jnp.maximum(begun, ends)
        maximum, denominator, weighted = state
        # Without a gap a query sees at least itself, so that only rows that are dropped here have seen nothing.
        nothing = maximum <= LOWEST
        denominator = jnp.where(nothing, 1, denominator)
        out = jnp.where(nothing[..., None], 0, weighted / denominator[..., None])
        found = (out, jnp.where(nothing, -jnp.inf, maximum + jnp.log(denominator)))
        out, lse = (old.at[rows].set(by_token(new), mode="drop") for old, new in zip(results, found, strict=True))
        return out, lse

    return jax.lax.fori_loop(0, (num_tiles + at_once - 1) // at_once, some_tiles, results)
