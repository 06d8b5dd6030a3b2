"""Attention over contiguous ranges in XLA: the paged reference with another rule for where a position lies."""

import jax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._stream import Source, stream_attention


@jax.jit(static_argnames=("scale", "window", "soft_cap", "return_lse", "max_q_len"))
def contiguous_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "slots kv_heads k_width"],
    v: Num[Array, "slots kv_heads v_width"],
    starts: Int32[Array, " seqs"],
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
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.contiguous_attention.contiguous_attention`."""

    def slots_of(
        seq_ids: Int32[Array, " tiles"], positions: Int32[Array, "tiles kv_tile"]
    ) -> Int32[Array, "tiles kv_tile"]:
        return starts[seq_ids][:, None] + positions

    return stream_attention(
        q,
        Source(k, v, k_scale, v_scale, slots_of, k.shape[0]),
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
