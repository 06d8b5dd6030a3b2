"""Paged attention in XLA: blocks are read as they are needed, the table is never gathered as a whole."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._stream import stream_attention


@jax.jit(static_argnames=("scale", "max_q_len"))
def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "blocks block_size kv_heads head_dim"],
    v: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    scale: float,
    max_q_len: int,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    blocks, block_size, *_ = k.shape
    slots = blocks * block_size

    def slots_of(seq_ids: Int32[Array, " tiles"], positions: Int32[Array, " kv_tile"]) -> Int32[Array, "tiles kv_tile"]:
        entries = (seq_ids[:, None], (positions // block_size)[None])
        block_ids = block_tables.at[entries].get(mode="fill", fill_value=blocks)
        # An id out of range is replaced before it is multiplied: 2**30 times a block size would wrap into range.
        is_block = (block_ids >= 0) & (block_ids < blocks)
        return jnp.where(is_block, block_ids * block_size + (positions % block_size)[None], slots)

    return stream_attention(
        q,
        k.reshape(slots, *k.shape[2:]),
        v.reshape(slots, *v.shape[2:]),
        slots_of,
        kv_lens,
        cu_q_lens,
        scale=scale,
        max_q_len=max_q_len,
        capacity=block_tables.shape[1] * block_size,
    )
