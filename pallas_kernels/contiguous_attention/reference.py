"""Attention over contiguous ranges in XLA: the paged reference with another rule for where a position lies."""

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._stream import stream_attention


@jax.jit(static_argnames=("scale", "max_q_len"))
def contiguous_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    starts: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    scale: float,
    max_q_len: int,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.contiguous_attention.contiguous_attention`."""

    def slots_of(seq_ids: Int32[Array, " tiles"], positions: Int32[Array, " kv_tile"]) -> Int32[Array, "tiles kv_tile"]:
        # Neither term reaches 2**31, so a sum that wraps is negative: out of range, as it should be.
        return starts[seq_ids][:, None] + positions[None]

    return stream_attention(
        q,
        k,
        v,
        slots_of,
        kv_lens,
        cu_q_lens,
        scale=scale,
        max_q_len=max_q_len,
        capacity=k.shape[0],
    )
