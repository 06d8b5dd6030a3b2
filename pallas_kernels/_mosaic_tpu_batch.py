"""A ragged batch for the TPU's attention kernel: queries cut into tiles, results put together again.

What the kernel leaves out is done here, in XLA, on arrays as small as the queries: scales of a layer or a head, sinks,
and keys and values of this call's own tokens, which are attended as a memory of their own and joined by the logarithms
of the two denominators.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import compat, tuning
from pallas_kernels._mosaic_tpu import (
    LANES,
    LOG2_E,
    SIZES,
    SUBLANES,
    UNPACK_FACTOR,
    Plan,
    Sizes,
    Tiles,
    attend_tiles,
    make_plan,
)
from pallas_kernels._ragged import require
from pallas_kernels._stream import QueryTiles, cut_queries

TABLE_BYTES = 900 * 1024  # of the 1 MiB of scalar memory that a core has
SCALE_BYTES = 2**29  # of gathered scales, those of keys and those of values each
NEW_BLOCK = 16  # tokens of a call are attended in blocks of so many


def attend_batch(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "blocks block_size kv_heads k_width"],
    v: Num[Array, "blocks block_size kv_heads v_width"],
    table: Int32[Array, "seqs blocks_per_seq"] | None,
    starts: Int32[Array, " seqs"] | None,
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    k_scale: Float32[Array, "..."] | None,
    v_scale: Float32[Array, "..."] | None,
    k_new: Float[Array, "tokens kv_heads head_dim"] | None,
    v_new: Float[Array, "tokens kv_heads head_dim"] | None,
    sinks: Float32[Array, " q_heads"] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    return_lse: bool,
    max_q_len: int,
    interpret: bool | pltpu.InterpretParams,
    sizes: Sizes | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.paged_attention.paged_attention`; one of `table` and `starts` is given.

    Ranges are read as blocks that follow one another: `starts` are slots, and the blocks are those of `k`. `sizes` are
    looked up if None.
    """
    check(q, k, v, table)
    attend = functools.partial(
        _attend_stored,
        q,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        max_q_len=max_q_len,
        interpret=interpret,
        sizes=sizes,
    )
    out, lse = attend(k, v, table, starts, k_scale=k_scale, v_scale=v_scale, stored=k_new is None)
    if k_new is not None and v_new is not None:
        padding = ((0, -q.shape[0] % NEW_BLOCK), (0, 0), (0, 0))
        k_new, v_new = (jnp.pad(x, padding).reshape(-1, NEW_BLOCK, *x.shape[1:]) for x in (k_new, v_new))
        q_lens = jnp.where(kv_lens > 0, cu_q_lens[1:] - cu_q_lens[:-1], 0)
        new = attend(k_new, v_new, None, cu_q_lens[:-1], kv_lens=q_lens, k_scale=None, v_scale=None, stored=True)
        out, lse = join((out, lse), new)
    if sinks is not None:
        with_sinks = jnp.logaddexp(lse, sinks[None])
        out, lse = out * jnp.exp(lse - with_sinks)[..., None], with_sinks
    return out.astype(q.dtype), lse if return_lse else None


def check(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array | None) -> None:
    """Raises the error of what the kernel cannot do."""
    if k.dtype == jnp.uint8 or v.dtype != k.dtype:
        raise NotImplementedError(
            "k, v: the TPU kernel reads keys and values of one dtype, and no packed 4-bit integers, got "
            f"{k.dtype.name} and {v.dtype.name}; use the backend 'xla'"
        )
    _, block_size, _, head_dim = k.shape
    for name, dtype in (("q", q.dtype), ("k", k.dtype)):
        require(dtype != jnp.float16, name, "of another dtype on a TPU, which has no float16", dtype.name)
    if table is not None:
        require(block_size % SUBLANES == 0, "block_size", "a multiple of 8, the rows of a TPU's tile", block_size)
    require(head_dim <= 256, "head_dim", "at most 256", head_dim)
    if table is not None:
        require(
            table.size * 4 <= TABLE_BYTES,
            "block_tables",
            f"of at most {TABLE_BYTES} bytes, as it is read from the core's scalar memory: split the batch, or use "
            f"larger blocks",
            f"{table.size * 4} bytes",
        )


def prefill_tile(max_q_len: int, q_heads: int, head_dim: int, sizes: Sizes) -> int:
    """Queries of a prefill tile: a power of two, within the budgets and what a sequence's queries ask for.

    Args:
      max_q_len: most queries of a sequence.
      q_heads: query heads.
      head_dim: elements per head, in whole vectors of lanes.
      sizes: the budgets.
    """
    most = max(1, sizes.out_bytes // (4 * q_heads * head_dim))
    return min(sizes.q_tile, 1 << (most.bit_length() - 1), 1 << (max_q_len - 1).bit_length())


def tuned_sizes(kind: str, q: jax.Array, k: jax.Array, *, in_table: bool) -> Sizes:
    """The sizes for `decode` or `prefill` on the device that is traced for."""
    _, block_size, kv_heads, head_dim = k.shape
    name = tuning.entry_name(
        f"{'paged' if in_table else 'contiguous'}_{kind}",
        head_dim=head_dim,
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        block_size=block_size if in_table else None,
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
    )
    return tuning.choose(name, SIZES, compat.device_kind())


def join(
    a: tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]],
    b: tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]],
) -> tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]]:
    """Attention over two sets of keys from that over each: (output, log of the softmax's denominator)."""
    lse = jnp.logaddexp(a[1], b[1])
    # Where neither saw a key the difference would be NaN.
    shares = (jnp.where(x[1] == -jnp.inf, 0, jnp.exp(x[1] - lse))[..., None] for x in (a, b))
    return sum((x[0] * share for x, share in zip((a, b), shares, strict=True)), jnp.zeros((), jnp.float32)), lse


def _attend_stored(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "blocks block_size kv_heads head_dim"],
    v: Num[Array, "blocks block_size kv_heads head_dim"],
    table: Int32[Array, "seqs blocks_per_seq"] | None,
    starts: Int32[Array, " seqs"] | None,
    *,
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    k_scale: Float32[Array, "..."] | None,
    v_scale: Float32[Array, "..."] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_q_len: int,
    stored: bool,
    interpret: bool | pltpu.InterpretParams,
    sizes: Sizes | None,
) -> tuple[Float32[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"]]:
    """Output and natural log of the denominator over one memory; without the batch's own positions unless `stored`."""
    tokens, q_heads, head_dim = q.shape
    blocks, block_size, kv_heads, _ = k.shape
    seqs, group = kv_lens.shape[0], q_heads // kv_heads
    slot_scales = []
    if k_scale is not None and v_scale is not None and k_scale.ndim > 1:
        slot_scales = [s.reshape(blocks, block_size, kv_heads) for s in (k_scale, v_scale)]
    per_slot = bool(slot_scales)
    low_precision = q.dtype == jnp.bfloat16 and k.dtype != jnp.float32
    unpack = low_precision and k.dtype == jnp.float8_e4m3fn and not _unpacks_e4m3()
    padding = ((0, 0), (0, 0), (0, 0), (0, -head_dim % LANES))
    # Blocks as matrices of (slot, head) rows: the same bytes if head_dim is 128, or kv_heads whole tiles.
    keys, values = (jnp.pad(x, padding).reshape(blocks, block_size * kv_heads, -1) for x in (k, v))
    capacity = blocks * block_size if table is None else table.shape[1] * block_size
    options = {"window": window, "soft_cap": soft_cap, "in_table": table is not None, "scaled": per_slot}
    out = jnp.zeros((tokens + 1, kv_heads, group, head_dim), jnp.float32)
    lse = jnp.full((tokens + 1, kv_heads, group), -jnp.inf, jnp.float32)
    q_lens = jnp.where(kv_lens > 0, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    singles = jnp.where(q_lens == 1, 1, 0)
    runs = min(seqs, tokens // 2)
    decode_sizes, prefill_sizes = (
        sizes or tuned_sizes(kind, q, k, in_table=table is not None) for kind in ("decode", "prefill")
    )
    q_tile = prefill_tile(max_q_len, q_heads, keys.shape[-1], prefill_sizes)
    launches = [(singles, 1, min(seqs, tokens), decode_sizes)]
    if max_q_len > 1 and runs > 0:
        launches.append((q_lens - singles, q_tile, (tokens + runs * (q_tile - 1)) // q_tile, prefill_sizes))
    for lens, tile_queries, max_tiles, budgets in launches:
        plan = make_plan(
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=keys.shape[-1],
            q_group=group,
            q_tile=tile_queries,
            capacity=capacity,
            kv_itemsize=k.dtype.itemsize,
            sizes=budgets,
            from_start=window is None and table is not None,
            unpack=unpack,
            dtype="bfloat16" if low_precision else "float32",
            **options,
        )
        cut = cut_queries(lens, kv_lens, cu_q_lens, window=window, q_tile=tile_queries, max_tiles=max_tiles)
        tiles, order = _place(plan, cut, table, starts, stored=stored)
        cut = jax.tree.map(lambda field, order=order: field[order], cut)
        offsets = jnp.arange(tile_queries, dtype=jnp.int32)[None]
        owned = (offsets < cut.num_queries[:, None]) & (tiles.ends > 0)[:, None]
        rows = jnp.where(owned, cut.first_tokens[:, None] + offsets, tokens)
        factor = _factor(plan, scale, None if per_slot else k_scale)
        scales = tuple(_slot_scales(plan, s, table, tiles, capacity) for s in slot_scales)
        got, got_log2 = attend_tiles(
            plan,
            _pack(plan, q.at[rows].get(mode="fill", fill_value=0)),
            factor,
            keys,
            values,
            jnp.zeros(1, jnp.int32) if table is None else table.reshape(-1),
            tiles,
            scales,
            interpret=interpret,
        )
        # Rows of nobody go to a row past the end, which is cut off.
        out = out.at[rows].set(_unpack(plan, got)[..., :head_dim])
        lse = lse.at[rows].set(_unpack(plan, got_log2)[..., 0] / LOG2_E)
    out, lse = out[:tokens], lse[:tokens]
    if unpack:
        out = out * UNPACK_FACTOR
    if v_scale is not None and not per_slot:
        out = out * jnp.broadcast_to(v_scale, (kv_heads,))[None, :, None, None]
    return out.reshape(q.shape), lse.reshape(tokens, q_heads)


def _place(
    plan: Plan,
    cut: QueryTiles,
    table: Int32[Array, "seqs blocks_per_seq"] | None,
    starts: Int32[Array, " seqs"] | None,
    *,
    stored: bool,
) -> tuple[Tiles, Int32[Array, " tiles"]]:
    """Where each tile reads, those that read anything first, and the order in which that puts them."""
    if table is not None:
        first_entries, lead = cut.seq_ids * table.shape[1], jnp.zeros_like(cut.seq_ids)
    else:
        assert starts is not None
        first_entries, lead = jnp.divmod(starts[cut.seq_ids], plan.block_size)
    skipped = (cut.kv_starts + lead) // plan.block_size
    base = skipped * plan.block_size - lead
    last = cut.kv_ends if stored else jnp.minimum(cut.kv_ends, cut.num_stored)
    tiles = Tiles(
        first_blocks=first_entries + skipped,
        lows=cut.kv_starts - base,
        ends=jnp.where(last > cut.kv_starts, last - base, 0),
        queries=cut.first_positions - base,
    )
    order = jnp.argsort(tiles.ends == 0)
    return jax.tree.map(lambda field: field[order], tiles), order


def _pack(plan: Plan, queries: Float[Array, "tiles q_tile q_heads head_dim"]) -> jax.Array:
    """Queries as the kernel's matrices [tiles, head_sets, rows, head_dim]."""
    tiles, q_tile, _, head_dim = queries.shape
    if plan.apart:
        queries = queries.reshape(tiles, q_tile, plan.kv_heads, plan.q_group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(tiles, plan.head_sets, -1, head_dim)
    padding = ((0, 0), (0, 0), (0, plan.rows - queries.shape[2]), (0, plan.head_dim - head_dim))
    return jnp.pad(queries, padding)


def _unpack(plan: Plan, rows: Float32[Array, "tiles head_sets rows lanes"]) -> jax.Array:
    """The kernel's matrices as [tiles, q_tile, kv_heads, q_group, lanes]."""
    tiles, sets, _, lanes = rows.shape
    used = plan.q_tile * plan.q_group * (1 if plan.apart else plan.kv_heads)
    rows = rows[:, :, :used]
    if plan.apart:
        return rows.reshape(tiles, sets, plan.q_group, plan.q_tile, lanes).transpose(0, 3, 1, 2, 4)
    return rows.reshape(tiles, 1, plan.kv_heads, plan.q_group, lanes)


def _factor(plan: Plan, scale: float, k_scale: Float32[Array, "..."] | None) -> Float32[Array, "head_sets rows lanes"]:
    """What each row's logits are multiplied by, before a soft cap or else in units of log 2."""
    scale *= UNPACK_FACTOR if plan.unpack else 1.0
    scale = scale * LOG2_E if plan.soft_cap is None else scale / plan.soft_cap
    heads = jnp.full(plan.kv_heads, scale, jnp.float32)
    if k_scale is not None:
        heads = heads * jnp.broadcast_to(k_scale, (plan.kv_heads,))
    if plan.apart:
        return jnp.broadcast_to(heads[:, None, None], (plan.kv_heads, plan.rows, LANES))
    heads = jnp.repeat(heads, plan.q_group)
    return jnp.broadcast_to(jnp.pad(heads, (0, plan.rows - heads.size))[None, :, None], (1, plan.rows, LANES))


def _slot_scales(
    plan: Plan,
    scales: Float32[Array, "blocks block_size kv_heads"],
    table: Int32[Array, "seqs blocks_per_seq"] | None,
    tiles: Tiles,
    capacity: int,
) -> Float32[Array, "tiles fetches steps head_sets columns"]:
    """The scales of each tile's slots, laid out as its logits are; 0 for a slot that it does not read."""
    fetches = -(-capacity // plan.fetch_slots)
    gathered = 4 * tiles.ends.size * fetches * plan.fetch_slots * plan.kv_heads
    if gathered > SCALE_BYTES:
        raise NotImplementedError(
            f"k_scale and v_scale of every slot are gathered for a TPU's kernel: {tiles.ends.size} tiles of {capacity} "
            f"slots take {gathered} bytes each, at most {SCALE_BYTES} are made"
        )
    positions = jnp.arange(fetches * plan.fetch_slots, dtype=jnp.int32)[None]
    # Gathered by whole blocks, which are rows of lanes.
    entries = tiles.first_blocks[:, None] + jnp.arange(positions.size // plan.block_size, dtype=jnp.int32)[None]
    block_ids = entries if table is None else table.reshape(-1).at[entries].get(mode="clip")
    values = scales.reshape(scales.shape[0], -1).at[block_ids].get(mode="clip")
    read = (positions >= tiles.lows[:, None]) & (positions < tiles.ends[:, None])
    values = jnp.where(read[..., None], values.reshape(*read.shape, plan.kv_heads), 0)
    values = values.reshape(-1, fetches, plan.steps, plan.step_slots, plan.kv_heads)
    if plan.apart:
        return values.swapaxes(3, 4)
    return values.reshape(-1, fetches, plan.steps, 1, plan.columns)


def _unpacks_e4m3() -> bool:
    """Whether the chip unpacks float8_e4m3fn by itself; where none is known, it is taken to be one that does not."""
    try:
        return pltpu.get_tpu_info().generation >= 7
    except ValueError:
        return False
