"""Signature, checks and choice of backend of attention over contiguous ranges."""

from collections.abc import Callable, Mapping, Sequence

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._ragged import FLOATS, check_array, check_ragged, require
from pallas_kernels.contiguous_attention import reference
from pallas_kernels.dispatch import dispatch

BACKENDS: Mapping[str, Callable[..., jax.Array]] = {"xla": reference.contiguous_attention}


def contiguous_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "slots kv_heads head_dim"],
    v: Float[Array, "slots kv_heads head_dim"],
    starts: Int32[Array, " seqs"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    scale: float | None = None,
    max_q_len: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention of any mix of decode rows and prefill chunks over one range of slots per sequence.

    Position p of sequence s is stored in slot `starts[s] + p` of one flat arena: `starts = row * max_len` reads it
    as `[rows, max_len]` virtual ranges, any other starts as ranges of any size. All else is as in
    `pallas_kernels.paged_attention.paged_attention`, whose XLA backend gives the same output bit for bit.

    A sequence with kv_len 0 may have any start, and ranges may overlap. What cannot be right shows as NaN: in all
    queries of a sequence with `0 < kv_len < q_len`, more positions than the arena has slots, a negative kv_len or
    more than `max_q_len` queries; in every query that sees a position outside the arena; in the whole output if
    `cu_q_lens` does not rise from 0 to at most `tokens`.

    Args:
      q: f32, bf16 or f16 queries of all sequences, one after another.
      k: f32, bf16 or f16 keys, the arena of one layer.
      v: values, of k's shape.
      starts: first slot of each sequence.
      kv_lens: tokens stored per sequence, this call's included; 0 for a padded row.
      cu_q_lens: where each sequence's queries start, and last where the last one's end. Tokens beyond are padding.
      scale: factor of the logits, head_dim**-0.5 if None. Static under jit.
      max_q_len: most queries that one sequence has, 1 for a decode batch; `tokens` if None. Static under jit.
      backend: None for what suits the platform, a backend's name, or names to try in turn. Static under jit.

    Returns:
      The attention output in q's dtype; exactly 0 for tokens of no sequence and of sequences with kv_len 0.

    Raises:
      ValueError: a shape, dtype or option is wrong; the message names it.
      NotImplementedError: no backend asked for exists or can do this call.
    """
    check_array("k", k, ("slots", "kv_heads", "head_dim"), FLOATS)
    check_array("v", v, ("slots", "kv_heads", "head_dim"), FLOATS)
    check_array("starts", starts, ("seqs",), ("int32",))
    scale, max_q_len = check_ragged(q, k, v, kv_lens, cu_q_lens, scale=scale, max_q_len=max_q_len)
    seqs = kv_lens.shape[0]
    require(starts.shape[0] == seqs, "starts", f"of length {seqs}, as kv_lens", starts.shape[0])
    return dispatch(
        "contiguous_attention",
        BACKENDS,
        backend,
        q,
        k,
        v,
        starts,
        kv_lens,
        cu_q_lens,
        scale=scale,
        max_q_len=max_q_len,
    )
