"""Attention over contiguous ranges on a TPU: the paged kernel, with blocks that follow one another for a table."""

import functools
import math

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels._mosaic_tpu import SMALL_SIZES, SUBLANES, Sizes
from pallas_kernels._mosaic_tpu_batch import attend_batch
from pallas_kernels._ragged import require

MOST_BLOCK = 32  # slots; what a range has beyond whole blocks costs a DMA for each block of a group


@jax.jit(static_argnames=("scale", "window", "soft_cap", "return_lse", "max_q_len", "interpret", "sizes"))
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
    interpret: bool | pltpu.InterpretParams = False,
    sizes: Sizes | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """See `pallas_kernels.contiguous_attention.contiguous_attention`; `sizes` are the budgets of a kernel's plan.

    The arena is fetched in blocks of up to 32 slots, as many as divide it. A block is whole tiles of 8 rows only if
    the slots times kv_heads are a multiple of 8. For what is read in place see
    `pallas_kernels.paged_attention.mosaic_tpu.paged_attention`.

    Raises:
      ValueError: the arena cannot be cut into whole tiles.
    """
    slots, kv_heads, head_dim = k.shape
    block_size = math.gcd(slots, MOST_BLOCK)
    require(block_size * kv_heads % SUBLANES == 0, "k", "of slots that 8 divides", f"{slots} slots of {kv_heads} heads")
    k, v = (x.reshape(-1, block_size, kv_heads, head_dim) for x in (k, v))
    return attend_batch(
        q,
        k,
        v,
        None,
        starts,
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


contiguous_attention_interpreted = functools.partial(
    contiguous_attention, interpret=pltpu.InterpretParams(), sizes=SMALL_SIZES
)
