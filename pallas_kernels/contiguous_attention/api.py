"""Signature, checks and choice of backend of attention over contiguous ranges."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int32, Num, Shaped

from pallas_kernels._contract import legal_in_ranges, settle
from pallas_kernels._ragged import CACHED, PACKED, check_array, check_options, check_ragged, require, same_scales
from pallas_kernels.contiguous_attention import mosaic_tpu, reference, triton
from pallas_kernels.dispatch import dispatch, only

BACKENDS: Mapping[str, Callable[..., tuple[jax.Array, jax.Array | None]]] = {
    "mosaic_tpu": mosaic_tpu.contiguous_attention,
    "mosaic_tpu_interpret": mosaic_tpu.contiguous_attention_interpreted,
    "triton": triton.contiguous_attention,
    "triton_interpret": functools.partial(triton.contiguous_attention, interpret=True),
    "xla": reference.contiguous_attention,
}


def contiguous_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "slots kv_heads k_width"],
    v: Num[Array, "slots kv_heads v_width"],
    starts: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    k_scale: Shaped[Array, "..."] | None = None,
    v_scale: Shaped[Array, "..."] | None = None,
    k_new: Float[Array, "tokens kv_heads head_dim"] | None = None,
    v_new: Float[Array, "tokens kv_heads head_dim"] | None = None,
    k_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    v_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " q_heads"] | None = None,
    return_lse: bool = False,
    max_q_len: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "tokens q_heads head_dim"] | Any:  # a pair with `return_lse`
    """Causal attention of any mix of decode rows and prefill chunks over one range of slots per sequence.

    Position p of sequence s is stored in slot `starts[s] + p` of one flat arena: `starts = row * max_len` reads it
    as `[rows, max_len]` virtual ranges, any other starts as ranges of any size. All else is as in
    `pallas_kernels.paged_attention.paged_attention`, whose XLA backend gives the same output bit for bit.

    A sequence with kv_len 0 may have any start, and ranges may overlap. What cannot be right shows as NaN: in all
    queries of a sequence with `0 < kv_len < q_len`, a negative kv_len, more than `max_q_len` queries, or a range
    `[start, start + kv_len)` that leaves the arena; in the whole output if `cu_q_lens` does not rise from 0 to at
    most `tokens`.

    Args:
      q: f32, bf16 or f16 queries of all sequences, one after another.
      k: f32, bf16, f16, f8e4m3fn, f8e5m2 or int8 keys, the arena of one layer; or u8 with half of head_dim, which are
        4-bit integers packed by `pallas_kernels.int4`.
      v: values, for as many slots and heads, of any of these dtypes.
      starts: first slot of each sequence.
      kv_lens: tokens stored per sequence, this call's included; 0 for a padded row.
      cu_q_lens: where each sequence's queries start, and last where the last one's end. Tokens beyond are padding.
      k_scale: factor of the stored keys, f32, bf16 or f8e8m0fnu: [] for the layer, [kv_heads] or
        [slots, kv_heads].
      v_scale: that of the stored values, of any of these shapes.
      k_new: keys of this call's tokens in q's dtype, read in place of what is stored at their positions, never scaled.
      v_new: values of this call's tokens, given with `k_new`.
      k_first: keys of every sequence's first positions, f32, bf16 or f16, read in place of what is stored there and
        never scaled. Only the backend `xla` reads them.
      v_first: values of those positions, given with `k_first`.
      scale: factor of the logits, head_dim**-0.5 if None. Static under jit.
      window: positions that a query sees, its own included; all if None. Static under jit.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, if given. Static under jit.
      sinks: a logit for each query head that takes part in every softmax of its head and contributes no value.
        -inf is none; a finite one must lie within 2e38.
      return_lse: also return the logarithms of the softmax denominators. Static under jit.
      max_q_len: most queries that one sequence has, 1 for a decode batch; `tokens` if None. Static under jit.
      backend: None for what suits the platform; `xla`, `triton` (GPU), `mosaic_tpu`, or `interpret` for their kernels
        on a CPU; or names to try in turn. Static under jit.

    Returns:
      The attention output in q's dtype; exactly 0 for tokens of no sequence and of sequences with kv_len 0. With
      `return_lse` a pair of it and the natural logarithms of the denominators, f32[tokens, q_heads], sinks included;
      -inf for those tokens.

    Raises:
      ValueError: a shape, dtype or option is wrong; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    check_array("k", k, ("slots", "kv_heads", "head_dim"), (*CACHED, PACKED))
    check_array("v", v, ("slots", "kv_heads", "head_dim"), (*CACHED, PACKED))
    check_array("starts", starts, ("seqs",), ("int32",))
    options = check_options(
        q, scale=scale, window=window, soft_cap=soft_cap, return_lse=return_lse, max_q_len=max_q_len
    )
    check_ragged(q, k, v, kv_lens, cu_q_lens, k_new=k_new, v_new=v_new, k_first=k_first, v_first=v_first, sinks=sinks)
    k_scale, v_scale = same_scales(k_scale, v_scale, tuple(k.shape[:-1]))
    extras = {"k_scale": k_scale, "v_scale": v_scale, "k_new": k_new, "v_new": v_new, "sinks": sinks}
    backends = BACKENDS
    if k_first is not None:
        backends, extras = only(BACKENDS, ["xla"], "k_first"), extras | {"k_first": k_first, "v_first": v_first}
    seqs = kv_lens.shape[0]
    require(starts.shape[0] == seqs, "starts", f"of length {seqs}, as kv_lens", starts.shape[0])
    starts, batch = legal_in_ranges(
        starts, kv_lens, cu_q_lens, tokens=q.shape[0], slots=k.shape[0], max_q_len=options["max_q_len"]
    )
    arrays = (q, k, v, starts, batch.kv_lens, batch.cu_q_lens)
    out, lse = settle(*dispatch("contiguous_attention", backends, backend, *arrays, **extras, **options), batch)
    return out if lse is None else (out, lse)
