"""Attention over contiguous ranges on a GPU: the shared kernel with another rule for where a position lies."""

from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._triton_attention import STATIC_OPTIONS, Tiling, attend


@jax.jit(static_argnames=STATIC_OPTIONS)
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
    decode_tiling: Tiling | None = None,
    prefill_tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.contiguous_attention.contiguous_attention`; the tilings as in `_triton_attention.attend`."""

    def slots_of(starts: Any, seq_id: Any, positions: Any, used: Any) -> Any:
        del used  # the range is contiguous, so a slot is known without a look
        return starts[seq_id] + positions

    out, lse = attend(
        q,
        k,
        v,
        starts,
        kv_lens,
        cu_q_lens,
        slots_of=slots_of,
        block_size=None,
        capacity=k.shape[0],
        k_scale=k_scale,
        v_scale=v_scale,
        k_new=k_new,
        v_new=v_new,
        sinks=sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        max_q_len=max_q_len,
        decode_tiling=decode_tiling,
        prefill_tiling=prefill_tiling,
        interpret=interpret,
    )
    return out, lse if return_lse else None
