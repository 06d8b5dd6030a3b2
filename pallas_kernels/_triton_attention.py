"""Causal attention of a ragged batch on a GPU, through Pallas' Triton backend.

Paged and contiguous memory differ in one function: which slot holds position p of sequence s. All else is here.

One kernel serves decode rows and prefill chunks. A program takes one tile of queries of one sequence, with all query
heads of one KV head as further rows, and streams keys and values past it `kv_tile` positions at a time, keeping a
running maximum, denominator and weighted sum in float32 (online softmax, Milakov and Gimelshein 2018, arXiv
1805.02867). Decode rows are tiles of one query, padded to the 16 rows of a tensor-core operand, and too few to fill
a GPU: several programs share the positions of one tile (split-K) and a second kernel merges what they found
(FlashDecoding). Prefill tiles have as many rows as a warp group's matrix instruction.

Logits are kept in units of log2, as the hardware's exponential is exp2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import compat, tuning  # compat silences the backend's deprecation
from pallas_kernels._query_tiles import QueryTiles, cut_queries

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# Where a running maximum starts: below any logit, and finite, so that exp2(-inf - LOWEST) is 0 where exp2(-inf + inf)
# would be NaN.
LOWEST = -1e30

MAX_HEAD_DIM = 256
MIN_DOT = 16  # least extent of a tensor-core operand
MAX_SPLITS = 128
MIN_SPLIT = 256  # positions below which a split costs more than it saves
# Programs for the GPU to choose from when it hides latency: 132 multiprocessors of an H100, each with room for about
# three (registers), twice over.
WANTED_PROGRAMS = 132 * 3 * 2

# Arguments of both operations that are static under jit.
STATIC_OPTIONS = (
    "scale",
    "window",
    "soft_cap",
    "return_lse",
    "max_q_len",
    "decode_tiling",
    "prefill_tiling",
    "interpret",
)

# Slots of positions of one sequence, read from the table or the starts where the mask says that they are needed.
SlotsOf = Callable[[Any, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work. Registers and shared memory limit it; see `python -m experiments compile`.

    Attributes:
      rows: rows of queries times heads, a power of two of at least 16 and the query heads of a KV head.
      kv_tile: positions in a step, a power of two of at least 16.
      num_warps: warps of a program, a power of two.
      num_stages: steps whose keys and values are in flight at once.
      split_size: positions per split; None to split by the shape of the batch. A fixed size makes the output of a
        sequence independent of its company, bit for bit.
    """

    rows: int
    kv_tile: int
    num_warps: int
    num_stages: int
    split_size: int | None = None

    def __post_init__(self) -> None:
        tuning.check_power_of_two("rows", self.rows, at_least=MIN_DOT)
        tuning.check_power_of_two("kv_tile", self.kv_tile, at_least=MIN_DOT)
        tuning.check_power_of_two("num_warps", self.num_warps)


class Source(NamedTuple):
    """Keys and values of some positions, and where in `k` and `v` they lie."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    slots: Callable[[Any, Any], Any]  # of positions, where the second says that they are needed


class Inputs(NamedTuple):
    """What the kernel reads beside its tiles, as references in whole."""

    places: Any  # block tables or starts
    q: Any  # [tokens, q_heads, head_dim]
    k: Any  # [slots, kv_heads, head_dim]
    v: Any
    k_scale: Any  # f32 [kv_heads] or [slots, kv_heads] or None
    v_scale: Any
    k_new: Any  # [tokens, kv_heads, head_dim] or None
    v_new: Any
    sinks: Any  # f32 [q_heads] or None


@dataclasses.dataclass(frozen=True)
class Statics:
    """What the kernel is compiled for."""

    tiling: Tiling
    splits: int
    group: int
    dtype: Any  # of both operands of the products
    scale: float
    window: int | None
    soft_cap: float | None
    slots_of: SlotsOf


def attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "slots kv_heads k_width"],
    v: Num[Array, "slots kv_heads v_width"],
    places: Int32[Array, "seqs ..."],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    slots_of: SlotsOf,
    block_size: int | None,
    capacity: int,
    k_scale: Float32[Array, "..."] | None,
    v_scale: Float32[Array, "..."] | None,
    k_new: Float[Array, "tokens kv_heads head_dim"] | None,
    v_new: Float[Array, "tokens kv_heads head_dim"] | None,
    sinks: Float32[Array, " q_heads"] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_q_len: int,
    decode_tiling: Tiling | None,
    prefill_tiling: Tiling | None,
    interpret: bool,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]]:
    """Attends every query over the positions of its window up to its own; lengths and places are legal.

    Args:
      q: queries, those of one sequence after those of another.
      k: keys, all slots of the pool. A slot that no query sees may hold anything.
      v: values.
      places: what `slots_of` reads, a row per sequence.
      kv_lens: positions per sequence, those of this batch's queries included; 0 for one that has none.
      cu_q_lens: bounds of the sequences among the tokens.
      slots_of: `(places, seq_id, positions, used) -> slots` within the kernel.
      block_size: slots in a block, None for ranges; only to look tilings up.
      capacity: most positions of a sequence.
      k_scale: factor of stored keys: [], [kv_heads] or [slots, kv_heads].
      v_scale: factor of stored values.
      k_new: keys of the tokens, read instead of those stored at their positions, or None.
      v_new: values of the tokens.
      sinks: a logit for each query head that every softmax has besides those of its keys, or None.
      scale: factor of the logits.
      window: positions that a query sees, its own included; None for all.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      max_q_len: most queries of one sequence.
      decode_tiling: of sequences with one query; None for the tuned one or else the default.
      prefill_tiling: of sequences with more.
      interpret: whether to run on a CPU.

    Returns:
      The output in q's dtype, and the natural logarithm of the softmax denominators. Rows of no sequence hold anything.

    Raises:
      ValueError: the kernel cannot do these shapes; the message names the argument.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, seqs = k.shape[1], kv_lens.shape[0]
    group = q_heads // kv_heads
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM} for the Triton kernel, got {head_dim}")
    for name, array in {"q": q, "k": k, "v": v}.items():
        check_offsets(name, array)
        if array.dtype == jnp.uint8:
            raise NotImplementedError(
                f"{name}: the Triton kernel reads no packed 4-bit integers; use the backend 'xla'"
            )
    k_scale, v_scale = (
        jnp.broadcast_to(factor, kv_heads) if factor is not None and factor.ndim == 0 else factor
        for factor in (k_scale, v_scale)
    )
    dtype = product_dtype(q.dtype, max(k.dtype, v.dtype, key=lambda stored: stored.itemsize))
    call = functools.partial(
        _launch,
        Inputs(places, q, k, v, k_scale, v_scale, k_new, v_new, sinks),
        group=group,
        dtype=dtype,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        slots_of=slots_of,
        interpret=interpret,
    )

    def tuned(kind: str, default: Tiling) -> Tiling:
        name = tuning.entry_name(
            f"{'contiguous' if block_size is None else 'paged'}_{kind}",
            head_dim=head_dim,
            kv_heads=kv_heads,
            group=group,
            block_size=block_size,
            q_dtype=q.dtype,
            kv_dtype=k.dtype,
        )
        tiling = tuning.choose(name, default, None if interpret else compat.device_kind())
        if tiling.rows < group:
            raise tuning.SizesError(f"rows of {name} must be at least its {group} heads, got {tiling.rows}")
        return tiling

    q_lens = jnp.where(kv_lens > 0, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    singles = jnp.where(q_lens == 1, 1, 0)
    tiles = single_queries(singles, kv_lens, cu_q_lens, window)
    tiling = decode_tiling or tuned("decode", default_decode_tiling(group, head_dim, dtype))
    splits = count_splits(seqs * kv_heads, capacity, window, tiling.split_size)
    single_out, single_lse = call(tiles, tiling, splits=splits, name="attention_decode")
    runs = min(seqs, tokens // 2)
    if max_q_len == 1 or runs == 0:
        return single_out, single_lse
    tiling = prefill_tiling or tuned("prefill", default_prefill_tiling(group, head_dim, dtype))
    q_tile = tiling.rows // group
    # Each run of n tokens takes ceil(n / q_tile) <= (n + q_tile - 1) / q_tile tiles.
    max_tiles = (tokens + runs * (q_tile - 1)) // q_tile
    tiles = cut_queries(q_lens - singles, kv_lens, cu_q_lens, window=window, q_tile=q_tile, max_tiles=max_tiles)
    out, lse = call(tiles, tiling, splits=1, name="attention_prefill")
    token_ids = jnp.arange(tokens, dtype=jnp.int32)
    # Unrolled, as each round of a loop outside a kernel would wait for the host.
    seq_ids = jnp.searchsorted(cu_q_lens[1:], token_ids, side="right", method="scan_unrolled")
    single = singles.at[seq_ids].get(mode="fill", fill_value=0)[:, None] == 1
    return jnp.where(single[..., None], single_out, out), jnp.where(single, single_lse, lse)


def single_queries(
    singles: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    window: int | None,
) -> QueryTiles:
    """A tile for each sequence, of one query where `singles` is 1: those of a decode batch, with nothing to look up."""
    first_positions = kv_lens - 1
    kv_starts = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    return QueryTiles(
        seq_ids=jnp.arange(kv_lens.shape[0], dtype=jnp.int32),
        first_tokens=cu_q_lens[:-1],
        first_positions=first_positions,
        num_queries=singles,
        num_stored=first_positions,
        kv_starts=kv_starts * singles,
        kv_ends=kv_lens * singles,
    )


def check_offsets(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Refuses arrays for which the backend would compute offsets that wrap.

    It counts offsets in elements and takes 64 bits for them where an array has more than 2**32 bytes, so those of an
    array of bytes wrap if it has between 2**31 and 2**32.

    Raises:
      ValueError: the array is one of these.
    """
    if 2**31 < array.size <= 2**32 // array.dtype.itemsize:
        raise ValueError(
            f"{name} must have at most 2**31 elements, or more than 2**32 bytes, for the Triton kernel, whose offsets "
            f"would wrap in between; got {array.size} elements of {array.dtype.name}: split the pool in two"
        )


def product_dtype(q_dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """The narrowest dtype that holds queries and stored values exactly: float32 where two 16-bit formats meet."""
    if kv_dtype.itemsize == 1 or kv_dtype == q_dtype:
        return q_dtype
    return jnp.dtype(jnp.float32)


def default_decode_tiling(group: int, head_dim: int, dtype: jnp.dtype) -> Tiling:
    """What `python -m experiments compile` showed to keep registers and shared memory of an H100 within bounds."""
    wide = padded(head_dim) * dtype.itemsize > 256
    return Tiling(max(MIN_DOT, pl.next_power_of_2(group)), 32 if wide else 64, 4, 3)


def default_prefill_tiling(group: int, head_dim: int, dtype: jnp.dtype) -> Tiling:
    """As for decode; 64 rows are the matrix instruction of one warp group, and wide heads are shared by two."""
    wide = padded(head_dim) * dtype.itemsize > 256
    return Tiling(max(64, pl.next_power_of_2(group)), 32 if wide else 64, 8 if wide else 4, 2)


def count_splits(programs: int, capacity: int, window: int | None, split_size: int | None) -> int:
    """Over how many programs the positions of a decode tile are spread, given the programs that there are anyway."""
    positions = capacity if window is None else min(capacity, window)
    if split_size is not None:
        return -(-capacity // split_size) if positions == capacity else -(-positions // split_size) + 1
    return max(1, min(-(-WANTED_PROGRAMS // programs), -(-positions // MIN_SPLIT), MAX_SPLITS))


def _launch(
    inputs: Inputs,
    tiles: QueryTiles,
    tiling: Tiling,
    *,
    splits: int,
    name: str,
    interpret: bool,
    **options: Any,
) -> tuple[Array, Array]:
    """Runs the kernel over `tiles`, and the merge if there is more than one split (of tiles of one query)."""
    tokens, q_heads, head_dim = inputs.q.shape
    kv_heads = inputs.k.shape[1]
    num_tiles = tiles.seq_ids.shape[0]
    statics = Statics(tiling=tiling, splits=splits, **options)
    sinks = inputs.sinks
    if splits > 1:
        inputs = inputs._replace(sinks=None)  # once, in the merge
    rows, dtype = (tokens, inputs.q.dtype) if splits == 1 else (num_tiles, jnp.dtype(jnp.float32))
    out, lse = pl.pallas_call(
        functools.partial(attention_kernel, statics=statics),
        grid=(num_tiles * kv_heads, splits),
        out_shape=(
            jax.ShapeDtypeStruct((splits * rows, q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((splits * rows, q_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name=name,
    )(tiles, inputs)
    if splits == 1:
        return out, lse
    return pl.pallas_call(
        functools.partial(merge_kernel, statics=statics),
        grid=(num_tiles * kv_heads,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, q_heads, head_dim), inputs.q.dtype),
            jax.ShapeDtypeStruct((tokens, q_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention_merge",
    )(tiles, out, lse, sinks)


def attention_kernel(tiles: QueryTiles, inputs: Inputs, out_ref: Any, lse_ref: Any, *, statics: Statics) -> None:
    """One tile of queries, one KV head, one split of the stored positions."""
    tiling, group = statics.tiling, statics.group
    num_tiles, kv_heads = tiles.seq_ids.shape[0], inputs.k.shape[1]
    tile_id, kv_head = jax.lax.div(pl.program_id(0), kv_heads), jax.lax.rem(pl.program_id(0), kv_heads)
    split = pl.program_id(1)
    tile = jax.tree.map(lambda ref: ref[tile_id], tiles)

    row_ids = jnp.arange(tiling.rows, dtype=jnp.int32)
    query_ids, heads = jax.lax.div(row_ids, group), kv_head * group + jax.lax.rem(row_ids, group)
    real = query_ids < tile.num_queries
    q = load_rows(inputs.q, tile.first_tokens + query_ids, heads, real).astype(statics.dtype)
    query_positions = tile.first_positions + query_ids

    def stream(state: Any, begin: Any, end: Any, source: Source) -> Any:
        def step(i: Any, state: Any) -> Any:
            positions = i * tiling.kv_tile + jnp.arange(tiling.kv_tile, dtype=jnp.int32)
            used = (positions >= begin) & (positions < end)
            keys, values, k_factor, v_factor = load_step(source, positions, used, kv_head, statics.dtype)
            logits = cap(dot(q, keys, trans_b=True) * (k_factor * statics.scale), statics.soft_cap)
            seen = used[None] & visible(query_positions[:, None], positions[None], statics.window)
            return accumulate(state, jnp.where(seen, logits * LOG2_E, -jnp.inf), values, v_factor)

        # No step where nothing is in the range.
        end = jnp.where(end > begin, end, 0)
        return jax.lax.fori_loop(jax.lax.div(begin, tiling.kv_tile), divide_up(end, tiling.kv_tile), step, state)

    def stored_slots(positions: Any, used: Any) -> Any:
        return statics.slots_of(inputs.places, tile.seq_ids, positions, used)

    end = tile.kv_ends if inputs.k_new is None else jnp.minimum(tile.kv_ends, tile.num_stored)
    begin, end = split_range(tile.kv_starts, end, split, statics)
    stored = Source(inputs.k, inputs.v, inputs.k_scale, inputs.v_scale, stored_slots)
    state = stream(nothing(tiling.rows, q.shape[1]), begin, end, stored)
    if inputs.k_new is not None:
        # One after another in k_new, as the queries are in q. The first split takes them all.
        new = Source(
            inputs.k_new, inputs.v_new, None, None, lambda p, _: p + (tile.first_tokens - tile.first_positions)
        )
        begin = jnp.maximum(tile.kv_starts, tile.num_stored)
        state = stream(state, begin, jnp.where(split == 0, tile.kv_ends, 0), new)
    if inputs.sinks is not None:
        state = add_sink(state, plgpu.load(inputs.sinks.at[heads], mask=real, other=0.0))
    # No two rows of a program have one place, masked or not: the interpreter writes masked ones back as they were.
    first_row = tile.first_tokens if statics.splits == 1 else split * num_tiles + tile_id
    store(state, out_ref, lse_ref, first_row + query_ids, heads, real)


def merge_kernel(
    tiles: QueryTiles, parts: Any, part_lses: Any, sinks: Any, out_ref: Any, lse_ref: Any, *, statics: Statics
) -> None:
    """All splits of one query and one KV head, in their order, so that empty ones do not change a bit."""
    num_tiles, group, head_dim = tiles.seq_ids.shape[0], statics.group, parts.shape[-1]
    kv_heads = parts.shape[1] // group
    tile_id, kv_head = jax.lax.div(pl.program_id(0), kv_heads), jax.lax.rem(pl.program_id(0), kv_heads)
    row_ids = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
    heads = kv_head * group + row_ids
    real = (row_ids < group) & (tiles.num_queries[tile_id] > 0)

    def step(split: Any, state: Any) -> Any:
        rows = jnp.full_like(heads, split * num_tiles + tile_id)
        part = load_rows(parts, rows, heads, real)
        lse = plgpu.load(part_lses.at[rows, heads], mask=real, other=-jnp.inf)
        return merge(state, part, lse * LOG2_E)

    state = nothing(heads.shape[0], padded(head_dim))
    state = jax.lax.fori_loop(0, statics.splits, step, state)
    if sinks is not None:
        state = add_sink(state, plgpu.load(sinks.at[heads], mask=real, other=0.0))
    store(state, out_ref, lse_ref, jnp.full_like(heads, tiles.first_tokens[tile_id]), heads, real)


# The parts of both kernels. A state is (maximum [rows] in units of log2, denominator [rows], weighted values
# [rows, head_dim]).


def nothing(rows: int, width: int) -> Any:
    """The state before any key."""
    zero = jnp.zeros(rows, jnp.float32)
    return jnp.full_like(zero, LOWEST), zero, jnp.zeros((rows, width), jnp.float32)


def split_range(begin: Any, end: Any, split: Any, statics: Statics) -> tuple[Any, Any]:
    """The part of `[begin, end)` that a split reads."""
    if statics.splits == 1:
        return begin, end
    kv_tile, size = statics.tiling.kv_tile, statics.tiling.split_size
    if size is None:
        first = jax.lax.div(begin, kv_tile) * kv_tile
        size = divide_up(divide_up(end - first, statics.splits), kv_tile) * kv_tile
    else:
        first = jax.lax.div(begin, size) * size
    first = first + split * size
    return jnp.maximum(begin, first), jnp.minimum(end, first + size)


def load_step(source: Source, positions: Any, used: Any, kv_head: Any, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Keys and values of a step, 0 where not `used`, and what to multiply logits and weights by for their scales."""
    slots = source.slots(positions, used)
    heads = jnp.full_like(slots, kv_head)

    def factor(scales: Any) -> Any:
        if scales is None:
            return 1.0
        if len(scales.shape) == 1:
            return scales[kv_head]
        return plgpu.load(scales.at[slots, heads], mask=used, other=0.0)[None]

    keys, values = (load_rows(pool, slots, heads, used).astype(dtype) for pool in (source.k, source.v))
    if source.v.dtype.itemsize == 1:
        # Changes no value. It keeps the compiler from loading bytes in the layout of the product's operand, in which
        # they would be copied 8 at a time and read back one by one (fp8 on H100: 168 registers against 128).
        values = jnp.where(used[:, None], values, jnp.zeros((), dtype))
    return keys, values, factor(source.k_scale), factor(source.v_scale)


def cap(logits: Any, soft_cap: float | None) -> Any:
    """Logits bounded smoothly by `soft_cap`."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def visible(query_positions: Any, positions: Any, window: int | None) -> Any:
    """The causal mask: a query sees the `window` positions up to its own, or all of them."""
    behind = query_positions - positions
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def accumulate(state: Any, logits: Any, values: Any, v_factor: Any) -> Any:
    """The state with a step's keys; a logit of -inf weighs 0 even where no other was seen."""
    maximum, denominator, weighted = state
    new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=1))
    rescale = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(logits - new_maximum[:, None])
    denominator = denominator * rescale + jnp.sum(weights, axis=1)
    added = dot((weights * v_factor).astype(values.dtype), values)
    return new_maximum, denominator, weighted * rescale[:, None] + added


def merge(state: Any, part: Any, lse: Any) -> Any:
    """The state with a split's output and log2 of its denominator; one of -inf adds nothing."""
    maximum, denominator, weighted = state
    new_maximum = jnp.maximum(maximum, lse)
    rescale, weight = jnp.exp2(maximum - new_maximum), jnp.exp2(lse - new_maximum)
    return (
        new_maximum,
        denominator * rescale + weight,
        weighted * rescale[:, None] + part * weight[:, None],
    )


def add_sink(state: Any, sinks: Any) -> Any:
    """The state with one more logit, which has no value."""
    return merge(state, jnp.zeros_like(state[2]), sinks * LOG2_E)


def store(state: Any, out_ref: Any, lse_ref: Any, rows: Any, heads: Any, real: Any) -> None:
    """Writes what a state amounts to into the `real` rows: 0 and -inf where no key was seen."""
    maximum, denominator, weighted = state
    empty = denominator == 0
    out = weighted / jnp.where(empty, 1.0, denominator)[:, None]
    lse = jnp.where(empty, -jnp.inf, (maximum + jnp.log2(jnp.where(empty, 1.0, denominator))) * LN_2)
    index, mask = row_index(out_ref, rows, heads, real)
    plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)
    plgpu.store(lse_ref.at[rows, heads], lse, mask=real)


def load_rows(ref: Any, rows: Any, heads: Any, mask: Any) -> Any:
    """`ref[rows, heads]`, [rows, padded head_dim]; 0 where masked and past head_dim."""
    index, mask = row_index(ref, rows, heads, mask)
    return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def row_index(ref: Any, rows: Any, heads: Any, mask: Any) -> tuple[tuple[Any, Any, Any], Any]:
    """Index arrays of whole rows, all of one shape, as the interpreter takes no others beside a mask."""
    shape = (rows.shape[0], padded(ref.shape[-1]))
    rows, heads, mask = (jax.lax.broadcast_in_dim(array, shape, (0,)) for array in (rows, heads, mask))
    lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (rows, heads, lanes), mask if shape[1] == ref.shape[-1] else mask & (lanes < ref.shape[-1])


def padded(head_dim: int) -> int:
    """Width of a row in registers: the backend takes powers of two alone."""
    return max(MIN_DOT, pl.next_power_of_2(head_dim))


def dot(a: Any, b: Any, *, trans_b: bool = False) -> Any:
    """The product in float32; operands of float32 are not rounded."""
    return plgpu.dot(a, b, trans_b=trans_b, precision=jax.lax.Precision.HIGHEST)


def divide_up(a: Any, b: int) -> Any:
    """The quotient rounded up, for a >= 0."""
    return jax.lax.div(a + (b - 1), b)
