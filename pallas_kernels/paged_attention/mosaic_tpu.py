"""Paged attention on a TPU; the kernel is `pallas_kernels._mosaic_tpu`."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._mosaic_tpu import SMALL_SIZES, Sizes
from pallas_kernels._mosaic_tpu_batch import attend_batch


@jax.jit(static_argnames=("scale", "window", "soft_cap", "return_lse", "max_q_len", "interpret", "sizes"))
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
    interpret: bool | pltpu.InterpretParams = False,
    sizes: Sizes | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.paged_attention.paged_attention`; `sizes` are the budgets of a kernel's plan.

    Pools are read in place if head_dim is 128 and kv_heads a power of two, or head_dim a larger multiple of 128 and
    kv_heads one of 8. Others are padded or laid out anew in each call, which costs a copy of the pool (`temp_bytes` of
    `python -m experiments compile`): store them padded instead. Scales of every slot are gathered first.
    """
    return attend_batch(
        q,
        k,
        v,
        block_tables,
        None,
        kv_lens,
        cu_q_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        k_new=k_new,
        v_new=v_new,
        sinks=sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        return_lse=return_lse,
        max_q_len=max_q_len,
        interpret=interpret,
        sizes=sizes,
    )


paged_attention_interpreted = functools.partial(paged_attention, interpret=pltpu.InterpretParams(), sizes=SMALL_SIZES)
