"""Attention over stored keys on a TPU: what the paged and the contiguous kernel share, which is all but a table.

The grid runs over tiles of queries, each of one sequence. A tile's keys and values are fetched from HBM in runs of
thousands of slots with all their heads, one DMA per block, into one of two buffers, while the other is attended: the
last fetch of a tile starts the first of the next, so that the memory never rests. Lengths, places and tables are
prefetched scalars. No block past a sequence's own is touched.

Two ways to attend a fetched run, seen as a matrix `[slots * kv_heads, head_dim]` without moving a byte:
- one query per tile (decode): all heads at once. `Q[q_heads, head_dim] @ K^T` gives logits of every query head with
  every KV head; those of other heads are masked. That wastes matrix products, of which a kernel bound by memory has
  plenty, and saves every relayout of keys and values.
- many queries per tile (prefill): one KV head at a time, its rows picked by a strided load from a float32 copy, whose
  cost the many queries share.
"""

# ruff: noqa: ANN001, ANN002, ANN202 (what a kernel is handed are refs, for which there is no public type)

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import tuning

LANES = 128
SUBLANES = 8
MXU_COLUMNS = 256  # of the widest matrix unit
LOG2_E = math.log2(math.e)
# The running maximum starts here: below any logit, yet so that 2**(masked - maximum) is 0 and never NaN.
LOWEST = -1e30
UNPACK_FACTOR = 16.0  # see `operand`
MIB = 2**20
VMEM_LIMIT_BYTES = 48 * MIB  # of 64 MiB or 128 MiB that a core has
GROUP = 8  # blocks whose DMAs are started together: their table entries are read ahead of the first


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budgets from which a plan is made.

    Attributes:
      fetch_bytes: keys and values of one fetch. Two are held at a time.
      logits: float32 logits per step of the softmax, over all query rows, where KV heads are attended together; a step
        writes and reads them again.
      logits_apart: the same where KV heads are attended one after another.
      most_columns: bound of a step's columns, as its code is unrolled over them.
      q_tile: most queries of a prefill tile, a power of two.
      out_bytes: most bytes of a prefill tile's float32 output, of which VMEM holds eight or nine times as much.
    """

    fetch_bytes: int = 8 * MIB
    logits: int = 1024 * 1024
    logits_apart: int = 128 * 1024
    most_columns: int = 32 * 1024
    q_tile: int = 128
    out_bytes: int = 2 * MIB

    def __post_init__(self) -> None:
        tuning.check_power_of_two("q_tile", self.q_tile)


SIZES = Sizes()
# For interpreters: a sequence of a few hundred slots takes several fetches, and each of them several steps.
SMALL_SIZES = Sizes(fetch_bytes=MIB // 4, logits=2048, logits_apart=2048, q_tile=8)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of a kernel.

    Attributes:
      block_size: slots of a block.
      kv_heads: key and value heads.
      head_dim: elements of a head.
      q_group: query heads of a KV head.
      apart: whether KV heads are attended one after another.
      q_tile: queries of a tile, a power of two; 1 unless `apart`.
      rows: rows of a tile's query matrix: (query head of the group, query) if `apart`, else query heads.
      group: blocks whose DMAs are started together.
      piece_groups: groups whose logits are one matrix product.
      step_groups: groups in a step of the softmax.
      steps: steps in a fetch.
      window: positions that a query sees, or None.
      soft_cap: bound of the logits, or None.
      from_start: whether every tile sees its first slot, so that no lower bound is needed.
      in_table: whether blocks are found in a table; else they follow one another.
      scaled: whether every slot has scales of its own.
      unpack: whether float8_e4m3fn is stored and has to be taken for the older format that the chip knows.
      dtype: of the operands of matrix products.
    """

    block_size: int
    kv_heads: int
    head_dim: int
    q_group: int
    apart: bool
    q_tile: int
    rows: int
    group: int
    piece_groups: int
    step_groups: int
    steps: int
    window: int | None
    soft_cap: float | None
    from_start: bool
    in_table: bool
    scaled: bool
    unpack: bool
    dtype: str

    @property
    def step_slots(self) -> int:
        """Slots of a step of the softmax."""
        return self.step_groups * self.group * self.block_size

    @property
    def fetch_slots(self) -> int:
        """Slots of a fetch."""
        return self.steps * self.step_slots

    @property
    def columns(self) -> int:
        """Columns of a step's logits: slots, or (slot, KV head)."""
        return self.step_slots * (1 if self.apart else self.kv_heads)

    @property
    def head_sets(self) -> int:
        """Sets of KV heads that are attended together."""
        return self.kv_heads if self.apart else 1


class Tiles(NamedTuple):
    """Where each tile reads, those that exist first. Positions count from the first slot of the first block fetched."""

    first_blocks: Int32[Array, " tiles"]  # entry of the flat table, or the block itself where blocks follow one another
    lows: Int32[Array, " tiles"]  # first slot that may be read; it lies in the first block
    ends: Int32[Array, " tiles"]  # one past the last slot that may be read, 0 for a tile that does not exist
    queries: Int32[Array, " tiles"]  # position of the tile's first query


def make_plan(
    *,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    q_group: int,
    q_tile: int,
    capacity: int,
    kv_itemsize: int,
    sizes: Sizes,
    **options: Any,
) -> Plan:
    """Sizes of fetches and steps: as large as the budgets allow, and no larger than a sequence can be.

    Args:
      block_size: see `Plan`, as all that is not named here.
      kv_heads: likewise.
      head_dim: likewise.
      q_group: likewise.
      q_tile: likewise. With 1, KV heads are attended together if a vector of lanes holds them a whole number of times.
      capacity: most slots that a tile can read.
      kv_itemsize: bytes of a stored element.
      sizes: the budgets.
      **options: the other fields of `Plan`.
    """
    apart = q_tile > 1 or LANES % kv_heads != 0
    rows = _round_up(q_tile * q_group if apart else kv_heads * q_group, 2 * SUBLANES)
    heads = 1 if apart else kv_heads
    slot_bytes = 2 * kv_heads * head_dim * kv_itemsize
    wanted = min(
        max((sizes.logits_apart if apart else sizes.logits) // (rows * heads), 1),
        sizes.most_columns // heads,
        sizes.fetch_bytes // slot_bytes,
        _round_up(capacity, block_size),
    )
    group = max(1, min(GROUP, wanted // block_size))
    # A step is a whole number of groups, and of vectors of lanes.
    lanes = LANES // math.gcd(LANES, heads)
    least = math.lcm(group * block_size, lanes) // (group * block_size)
    step_groups = least * max(1, wanted // (least * group * block_size))
    step_slots = step_groups * group * block_size
    fetched = min(sizes.fetch_bytes // slot_bytes, _round_up(capacity, step_slots))
    return Plan(
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_group=q_group,
        apart=apart,
        q_tile=q_tile,
        rows=rows,
        group=group,
        piece_groups=least * -(-MXU_COLUMNS // (least * group * block_size * heads)),
        step_groups=step_groups,
        steps=max(1, fetched // step_slots),
        **options,
    )


def attend_tiles(
    plan: Plan,
    q: Float[Array, "tiles head_sets rows head_dim"],
    factor: Float32[Array, "head_sets rows lanes"],
    k: Num[Array, "blocks block_rows head_dim"],
    v: Num[Array, "blocks block_rows head_dim"],
    table: Int32[Array, " entries"],
    tiles: Tiles,
    slot_scales: tuple[Float32[Array, "tiles fetches steps head_sets columns"], ...],
    *,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float32[Array, "tiles head_sets rows head_dim"], Float32[Array, "tiles head_sets rows lanes"]]:
    """Attention of every tile over its own slots.

    Args:
      plan: static sizes.
      q: query matrices; rows of a decode tile are query heads, those of a prefill tile (head of the group, query).
      factor: what logits are multiplied by, of each row: log2(e) included, or without it if they are capped.
      k: keys, every block a matrix of (slot, head) rows.
      v: values.
      table: block ids that `tiles.first_block` points into; not read if blocks follow one another.
      tiles: what each tile reads.
      slot_scales: of keys and of values, laid out as the columns of logits are, 0 where a slot is not read; or none.
      interpret: how to run without a TPU.

    Returns:
      The output and the logarithm to base 2 of the softmax's denominator, the same in every lane; 0 and -inf for rows
      that see nothing, anything for tiles that do not exist.
    """
    num_tiles, sets, rows, head_dim = q.shape
    buffer = (2, plan.steps * plan.step_groups, plan.group, plan.block_size * plan.kv_heads, head_dim)
    scale_buffer = pltpu.VMEM((2, plan.steps, sets, plan.columns), jnp.float32)
    statistics = pltpu.VMEM((sets, rows, LANES), jnp.float32)
    # A row is as wide as a vector of lanes, as strided loads ask for.
    stage = pltpu.VMEM((head_dim // LANES, plan.step_slots * plan.kv_heads, LANES), jnp.float32)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def of_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda tile, *_: (tile, *(0,) * len(shape)))

    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(num_tiles,),
            in_specs=[
                of_tile(sets, rows, head_dim),
                pl.BlockSpec(factor.shape, lambda *_: (0, 0, 0)),
                *(in_hbm,) * (2 + len(slot_scales)),
            ],
            out_specs=[of_tile(sets, rows, head_dim), of_tile(sets, rows, LANES)],
            scratch_shapes=[
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2 + len(slot_scales))),
                pltpu.VMEM(buffer, k.dtype),
                pltpu.VMEM(buffer, v.dtype),
                *(scale_buffer,) * len(slot_scales),
                pltpu.VMEM((rows, plan.columns), jnp.float32),
                statistics,
                statistics,
                pltpu.VMEM((sets, rows, head_dim), jnp.float32),
                *((stage, stage) if plan.apart else ()),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((num_tiles, sets, rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name=f"{'paged' if plan.in_table else 'contiguous'}_{'prefill' if plan.q_tile > 1 else 'decode'}",
    )(*tiles, table, q, factor, k, v, *slot_scales)


def _kernel(plan: Plan, first_blocks, lows, ends, queries, table, q, factor, k, v, *refs):
    """Attends one tile; the refs are as `attend_tiles` lists them."""
    slot_scales, refs = refs[: 2 * plan.scaled], refs[2 * plan.scaled :]
    out, lse, turn, arrived, k_buffer, v_buffer, *refs = refs
    scale_buffers, refs = refs[: 2 * plan.scaled], refs[2 * plan.scaled :]
    logits, maximum, denominator, weighted, *stages = refs
    pools = ((k, k_buffer), (v, v_buffer))
    tile, num_tiles = pl.program_id(0), pl.num_programs(0)
    low, end = lows[tile], ends[tile]
    group_slots = plan.group * plan.block_size

    def blocks_of(t, fetch):
        """Blocks of a fetch, none that is not the sequence's own."""
        slots = jnp.minimum(ends[t] - fetch * plan.fetch_slots, plan.fetch_slots)
        return lax.div(slots + (plan.block_size - 1), jnp.int32(plan.block_size))

    def for_blocks(blocks, first_group, whole_group, block):
        """Whole groups of a fetch from `first_group` on, then what is left of it block by block."""
        groups = jnp.maximum(lax.div(blocks, jnp.int32(plan.group)), first_group)
        lax.fori_loop(first_group, groups, lambda i, _: whole_group(i), None)
        lax.fori_loop(0, blocks - groups * plan.group, lambda i, _: block(groups, i), None)

    def first_of(t, fetch):
        return first_blocks[t] + fetch * (plan.steps * plan.step_groups * plan.group)

    def fetch_listed(entry, side, group, in_group, count):
        block_ids = [table[entry + i] for i in range(count)]
        for j, block_id in enumerate(block_ids):
            for i, (pool, buffer) in enumerate(pools):
                to = buffer.at[side, group, in_group + j]
                pltpu.make_async_copy(pool.at[block_id], to, arrived.at[side, i]).start()

    def fetch_range(first, side, group, in_group, count):
        for i, (pool, buffer) in enumerate(pools):
            to = buffer.at[side, group, pl.ds(in_group, count)]
            pltpu.make_async_copy(pool.at[pl.ds(first, count)], to, arrived.at[side, i]).start()

    def start(t, fetch, side, first_group):
        """Starts a fetch but for the groups before `first_group`."""

        def some(group, in_group, count):
            first = first_of(t, fetch) + group * plan.group + in_group
            (fetch_listed if plan.in_table else fetch_range)(first, side, group, in_group, count)

        for_blocks(blocks_of(t, fetch), first_group, lambda g: some(g, 0, plan.group), lambda g, i: some(g, i, 1))
        for i, (scale, buffer) in enumerate(zip(slot_scales, scale_buffers, strict=True)):
            pltpu.make_async_copy(scale.at[t, fetch], buffer.at[side], arrived.at[side, 2 + i]).start()

    def start_groups(first, blocks, side, first_group, count):
        """Starts some groups of a fetch without a branch, so that matrix products can hide it."""
        entry, left = first + first_group * plan.group, blocks - first_group * plan.group
        for group in range(count):
            for i in range(plan.group):
                at = group * plan.group + i
                pl.when(at < left)(functools.partial(fetch_listed, entry + at, side, first_group + group, i, 1))

    def wait(fetch, side):
        def arrive(*part):  # a wait takes as many bytes as it names, whoever sent them
            for i, (_, buffer) in enumerate(pools):
                pltpu.make_async_copy(buffer.at[part], buffer.at[part], arrived.at[side, i]).wait()

        whole = end >= (fetch + 1) * plan.fetch_slots
        pl.when(whole)(lambda: arrive(side))
        blocks = blocks_of(tile, fetch)
        in_part = functools.partial(for_blocks, blocks, 0, lambda g: arrive(side, g), lambda g, i: arrive(side, g, i))
        pl.when(jnp.logical_not(whole))(in_part)
        for i, buffer in enumerate(scale_buffers):
            pltpu.make_async_copy(buffer.at[side], buffer.at[side], arrived.at[side, 2 + i]).wait()

    def clear(side, fetch, group):
        """Zeroes a group's values that are not read: a weight of 0 would keep a NaN alive."""
        shape = (plan.group, plan.block_size * plan.kv_heads, plan.head_dim)
        position = lax.div(lax.broadcasted_iota(jnp.int32, shape, 1), jnp.int32(plan.kv_heads))
        position += lax.broadcasted_iota(jnp.int32, shape, 0) * plan.block_size
        position += fetch * plan.fetch_slots + group * group_slots
        wide = jnp.int32 if v_buffer.dtype == jnp.int8 else jnp.float32
        values = v_buffer[side, group].astype(wide)
        kept = jnp.where((position >= low) & (position < end), values, jnp.zeros_like(values))
        v_buffer[side, group] = kept.astype(v_buffer.dtype)

    def clear_unread(side, fetch, steps):
        """What a fetch leaves of its last step, and what lies before the first slot, which is in the first block."""
        read = jnp.minimum(end - fetch * plan.fetch_slots, plan.fetch_slots)
        first = lax.div(read, jnp.int32(group_slots))
        lax.fori_loop(first, steps * plan.step_groups, lambda group, _: clear(side, fetch, group), None)
        if not plan.from_start:
            pl.when((fetch == 0) & (low > 0))(lambda: clear(side, fetch, 0))

    def attend(side, step, first_slot, head_set, keys_of, values_of, seen_whole, meanwhile=lambda *_: None):
        """One step of the online softmax for one set of KV heads.

        `keys_of` and `values_of` load what is stored in groups of the step, given the first and how many. `meanwhile`,
        given the same, is called between the keys of these groups and the next. What it does to the other buffer could
        be to this one for all the compiler knows, which moves no start of a DMA past a load.
        """
        precision = lax.Precision.HIGHEST if plan.dtype == "float32" else None
        product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, (plan.rows, LANES), 0)
        lane = lax.broadcasted_iota(jnp.int32, (plan.rows, LANES), 1)
        position = queries[tile] + (row & (plan.q_tile - 1))
        # Both bounds in columns of this step.
        heads = 1 if plan.apart else plan.kv_heads
        until = (jnp.minimum(position + 1, end) - first_slot) * heads
        since = (jnp.maximum(position - ((plan.window or 1) - 1), low) if plan.window else low) - first_slot
        since = since * heads
        own_head = (lane & (heads - 1)) * plan.q_group
        own_head = (row >= own_head) & (row < own_head + plan.q_group)

        def slot_scale(which, i):
            return scale_buffers[which][side, step, pl.ds(head_set, 1), i * LANES : (i + 1) * LANES]

        top = maximum[head_set]
        before = top
        pieces = []
        for first_group in range(0, plan.step_groups, plan.piece_groups):
            some = (first_group, min(plan.piece_groups, plan.step_groups - first_group))
            pieces.append(product(q[0, head_set].astype(plan.dtype), keys_of(*some), (((1,), (1,)), ((), ()))))
            meanwhile(*some)
        scores = jnp.concatenate(pieces, axis=1)
        for i in range(plan.columns // LANES):
            chunk = slice(i * LANES, (i + 1) * LANES)
            part = scores[:, chunk] * factor[head_set]
            if plan.scaled:
                part = part * slot_scale(0, i)
            if plan.soft_cap is not None:
                part = jnp.tanh(part) * (plan.soft_cap * LOG2_E)
            seen = None if plan.apart else own_head
            if not seen_whole:
                within = lane < until - i * LANES
                if not plan.from_start:
                    within &= lane >= since - i * LANES
                seen = within if seen is None else seen & within
            part = part if seen is None else jnp.where(seen, part, -jnp.inf)
            logits[:, chunk] = part
            top = jnp.maximum(top, part)
        top = jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), top.shape)
        rescale = jnp.exp2(before - top)
        total, weights = denominator[head_set] * rescale, []
        for i in range(plan.columns // LANES):
            weight = jnp.exp2(logits[:, i * LANES : (i + 1) * LANES] - top)
            total += weight
            weights.append((weight * slot_scale(1, i) if plan.scaled else weight).astype(plan.dtype))
        added = product(jnp.concatenate(weights, axis=1), values_of(0, plan.step_groups), (((1,), (0,)), ((), ())))
        maximum[head_set], denominator[head_set] = top, total
        weighted[head_set] = weighted[head_set] * rescale[:, :1] + added

    def attend_step(side, fetch, step, seen_whole, meanwhile=lambda *_: None):
        first_slot = fetch * plan.fetch_slots + step * plan.step_slots

        def load(buffer, first_group, count):
            part = buffer[side, pl.ds(step * plan.step_groups + first_group, count)]
            return operand(part.reshape(-1, plan.head_dim), plan)

        if not plan.apart:
            keys_of, values_of = (functools.partial(load, buffer) for buffer in (k_buffer, v_buffer))
            attend(side, step, first_slot, 0, keys_of, values_of, seen_whole, meanwhile)
            return
        for stage, (_, buffer) in zip(stages, pools, strict=True):
            loaded = load(buffer, 0, plan.step_groups).astype(jnp.float32)
            for i in range(plan.head_dim // LANES):
                stage[i] = loaded[:, i * LANES : (i + 1) * LANES]

        def one_head(head, _):
            def rows_of(stage, first_group, count):
                rows = pl.ds(first_group * group_slots * plan.kv_heads + head, count * group_slots, plan.kv_heads)
                parts = [stage[i, rows, :].astype(plan.dtype) for i in range(plan.head_dim // LANES)]
                return jnp.concatenate(parts, axis=1)

            keys_of, values_of = (functools.partial(rows_of, stage) for stage in stages)
            attend(side, step, first_slot, head, keys_of, values_of, seen_whole)

        lax.fori_loop(0, plan.kv_heads, one_head, None)

    @pl.when(tile == 0)
    def _():
        turn[0] = 0
        pl.when(ends[0] > 0)(lambda: start(0, 0, 0, 0))

    maximum[...] = jnp.full(maximum.shape, LOWEST, jnp.float32)
    denominator[...] = jnp.zeros(denominator.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)
    fetches = lax.div(end + (plan.fetch_slots - 1), jnp.int32(plan.fetch_slots))

    def one_fetch(fetch, _):
        side, last = turn[0], fetch + 1 == fetches
        next_tile = jnp.where(last, jnp.minimum(tile + 1, num_tiles - 1), tile)
        next_fetch = jnp.where(last, 0, fetch + 1)
        more = jnp.logical_not(last) | ((tile + 1 < num_tiles) & (ends[next_tile] > 0))
        left = jnp.minimum(end - fetch * plan.fetch_slots, plan.fetch_slots)
        steps = lax.div(left + (plan.step_slots - 1), jnp.int32(plan.step_slots))
        # Steps that every query of the tile sees whole need no bounds. They start the next fetch as they go.
        seen_by_all = jnp.clip(queries[tile] + 1 - fetch * plan.fetch_slots, 0, left)
        whole = lax.div(seen_by_all, jnp.int32(plan.step_slots)) if plan.from_start else jnp.int32(0)
        hidden = whole if plan.in_table and not plan.apart else jnp.int32(0)
        pl.when(more)(lambda: start(next_tile, next_fetch, 1 - side, hidden * plan.step_groups))
        wait(fetch, side)
        turn[0] = 1 - side
        clear_unread(side, fetch, steps)
        first, blocks = first_of(next_tile, next_fetch), jnp.where(more, blocks_of(next_tile, next_fetch), 0)

        def whole_step(step, _):
            def start_next(first_group, count):
                start_groups(first, blocks, 1 - side, step * plan.step_groups + first_group, count)

            attend_step(side, fetch, step, True, *((start_next,) if plan.in_table and not plan.apart else ()))

        if plan.from_start:
            lax.fori_loop(0, whole, whole_step, None)
        lax.fori_loop(whole, steps, lambda step, _: attend_step(side, fetch, step, False), None)

    lax.fori_loop(0, fetches, one_fetch, None)
    total = jnp.sum(denominator[...], axis=-1, keepdims=True)
    some = total != 0  # where it is NaN, so is the output
    out[0] = jnp.where(some, weighted[...] / jnp.where(some, total, 1), 0)
    logarithm = jnp.where(some, maximum[...][..., :1] + jnp.log2(jnp.where(some, total, 1)), -jnp.inf)
    lse[0] = jnp.broadcast_to(logarithm, lse.shape[1:])


def operand(stored: jax.Array, plan: Plan) -> jax.Array:
    """Stored elements as operands of matrix products with others of `plan.dtype`.

    Matrix units take 8-bit floats beside bfloat16, which halves what they are fed and saves every conversion. Those of
    chips before TPU7x know no float8_e4m3fn, only its forerunner float8_e4m3b11fnuz, whose values are the same bits
    divided by 16, with two exceptions: its NaN is the pattern of -0.0, which is replaced by 0 in four instructions for
    four elements, and the NaN of float8_e4m3fn is its 30, so that a NaN counts as 480. `UNPACK_FACTOR` makes up for the
    rest.
    """
    if plan.unpack:
        bits = pltpu.bitcast(stored, jnp.int32)
        no_sign, ones = jnp.int32(0x7F7F7F7F), jnp.int32(0x01010101)
        # Bit 7 of a byte stays set through the subtraction if any of the other seven is.
        not_zero = (bits | ~no_sign) - ones
        return pltpu.bitcast(bits & (not_zero | no_sign), jnp.float8_e4m3b11fnuz)
    if stored.dtype == jnp.int8:
        return stored.astype(jnp.float32).astype(plan.dtype)
    return stored if stored.dtype.itemsize == 1 and plan.dtype == "bfloat16" else stored.astype(plan.dtype)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
