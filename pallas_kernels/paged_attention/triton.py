"""Paged attention on a GPU: the shared kernel, reading slots from the block table."""

from typing import Any

import jax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._triton_attention import STATIC_OPTIONS, Tiling, attend


@jax.jit(static_argnames=STATIC_OPTIONS)
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
    decode_tiling: Tiling | None = None,
    prefill_tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.paged_attention.paged_attention`; the tilings are those of `_triton_attention.attend`."""
    block_size = k.shape[1]

    def slots_of(tables: Any, seq_id: Any, positions: Any, used: Any) -> Any:
        entries = jax.lax.div(positions, block_size)
        block_ids = plgpu.load(tables.at[seq_id, entries], mask=used, other=0)
        return block_ids * block_size + jax.lax.rem(positions, block_size)

    def by_slot(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    def scales_by_slot(scales: Array | None) -> Array | None:
        return scales if scales is None or scales.ndim < 2 else by_slot(scales)

    out, lse = attend(
        q,
        by_slot(k),
        by_slot(v),
        block_tables,
        kv_lens,
        cu_q_lens,
        slots_of=slots_of,
        block_size=block_size,
        capacity=block_tables.shape[1] * block_size,
        k_scale=scales_by_slot(k_scale),
        v_scale=scales_by_slot(v_scale),
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
