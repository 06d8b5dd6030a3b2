"""Paged attention in XLA: blocks are read as they are needed, the table is never gathered as a whole."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._ragged import MAX_INT32
from pallas_kernels._stream import Source, Sparse, stream_attention


@jax.jit(static_argnames=("scale", "window", "soft_cap", "return_lse", "max_q_len"))
def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "blocks block_size kv_heads k_width"],
    v: Num[Array, "blocks block_size kv_heads v_width"],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
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
    k_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    v_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    block_order: Int32[Array, "seqs blocks_per_seq"] | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    block_size = k.shape[1]
    capacity = block_tables.shape[1] * block_size

    def slots_of(
        seq_ids: Int32[Array, " tiles"], positions: Int32[Array, "tiles kv_tile"]
    ) -> Int32[Array, "tiles kv_tile"]:
        block_ids = block_tables.at[seq_ids[:, None], positions // block_size].get(mode="clip")
        return block_ids * block_size + positions % block_size

    sparse = None if block_order is None else _sparse(block_order, block_size)

    def by_slot(blocks: Array) -> Array:
        return blocks.reshape(-1, *blocks.shape[2:])

    def scale_by_slot(scales: Array | None) -> Array | None:
        return scales if scales is None or scales.ndim < 3 else by_slot(scales)

    return stream_attention(
        q,
        Source(by_slot(k), by_slot(v), scale_by_slot(k_scale), scale_by_slot(v_scale), slots_of, capacity, sparse),
        kv_lens,
        cu_q_lens,
        k_new=k_new,
        v_new=v_new,
        k_first=k_first,
        v_first=v_first,
        sinks=sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        return_lse=return_lse,
        max_q_len=max_q_len,
    )


def _sparse(block_order: Int32[Array, "seqs blocks_per_seq"], block_size: int) -> Sparse:
    """Places of a table that has some of each sequence's blocks, in their order."""

    def positions_of(
        seq_ids: Int32[Array, " tiles"], places: Int32[Array, "tiles kv_tile"]
    ) -> Int32[Array, "tiles kv_tile"]:
        last_block = MAX_INT32 // block_size - 1
        order = block_order.at[seq_ids[:, None], places // block_size].get(mode="fill", fill_value=last_block)
        return jnp.clip(order, 0, last_block) * block_size + places % block_size

    def span_of(
        seq_ids: Int32[Array, " tiles"], starts: Int32[Array, " tiles"], ends: Int32[Array, " tiles"]
    ) -> tuple[Int32[Array, " tiles"], Int32[Array, " tiles"]]:
        order = block_order[seq_ids]
        first, last = starts // block_size, (ends + (block_size - 1)) // block_size
        before, until = (jnp.sum(order < bound[:, None], axis=1, dtype=jnp.int32) for bound in (first, last))
        return before * block_size, jnp.maximum(before, until) * block_size

    return Sparse(positions_of, span_of)
