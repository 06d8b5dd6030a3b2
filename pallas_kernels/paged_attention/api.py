"""Signature, checks and choice of backend of paged attention."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int32, Num, Shaped

from pallas_kernels._contract import legal_in_blocks, settle
from pallas_kernels._ragged import (
    CACHED,
    MAX_INT32,
    PACKED,
    check_array,
    check_options,
    check_ragged,
    require,
    same_scales,
)
from pallas_kernels.dispatch import dispatch, only
from pallas_kernels.paged_attention import mosaic_tpu, reference, triton

BACKENDS: Mapping[str, Callable[..., tuple[jax.Array, jax.Array | None]]] = {
    "mosaic_tpu": mosaic_tpu.paged_attention,
    "mosaic_tpu_interpret": mosaic_tpu.paged_attention_interpreted,
    "triton": triton.paged_attention,
    "triton_interpret": functools.partial(triton.paged_attention, interpret=True),
    "xla": reference.paged_attention,
}


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Num[Array, "blocks block_size kv_heads k_width"],
    v: Num[Array, "blocks block_size kv_heads v_width"],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    k_scale: Shaped[Array, "..."] | None = None,
    v_scale: Shaped[Array, "..."] | None = None,
    k_new: Float[Array, "tokens kv_heads head_dim"] | None = None,
    v_new: Float[Array, "tokens kv_heads head_dim"] | None = None,
    k_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    v_first: Float[Array, "seqs first_tokens kv_heads head_dim"] | None = None,
    block_order: Int32[Array, "seqs blocks_per_seq"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " q_heads"] | None = None,
    return_lse: bool = False,
    max_q_len: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "tokens q_heads head_dim"] | Any:  # a pair with `return_lse`
    """Causal attention of any mix of decode rows and prefill chunks over keys and values stored in blocks.

    Position p of sequence s is stored in slot `p % block_size` of block `block_tables[s, p // block_size]`.
    Sequence s owns the query tokens `[cu_q_lens[s], cu_q_lens[s + 1])`; they are its last positions, already
    stored, and each sees the positions up to its own. Query head h reads KV head `h // (q_heads // kv_heads)`.
    Logits and sums are float32 whatever the inputs.

    A query's weights are a softmax over `cap(scale * q . k)` for the keys it sees and its head's sink. Stored keys
    and values stand for what is stored times their scale: of the layer, of the KV head, or of the slot and KV head.

    Table entries past the blocks that a sequence uses may hold any number, as may those of blocks that lie wholly
    before every window; slots and blocks that no query sees may hold NaN, and so may their scales; one block may serve
    many sequences. What cannot be right in the values given, and so cannot raise, shows as NaN: in all queries of a
    sequence with `0 < kv_len < q_len`, with more positions than its table has room for, a negative kv_len or
    more than `max_q_len` queries; in every query that sees a position whose table entry is not a block id; in the
    whole output if `cu_q_lens` does not rise from 0 to at most `tokens`.

    Args:
      q: f32, bf16 or f16 queries of all sequences, one after another.
      k: f32, bf16, f16, f8e4m3fn, f8e5m2 or int8 keys, the pool of one layer; or u8 with half of head_dim, which are
        4-bit integers packed by `pallas_kernels.int4`.
      v: values, for as many slots and heads, of any of these dtypes.
      block_tables: block ids by sequence and order.
      kv_lens: tokens stored per sequence, this call's included; 0 for a padded row.
      cu_q_lens: where each sequence's queries start, and last where the last one's end. Tokens beyond are padding.
      k_scale: factor of the stored keys, f32, bf16 or f8e8m0fnu: [] for the layer, [kv_heads], [blocks, kv_heads]
        or [blocks, block_size, kv_heads].
      v_scale: that of the stored values, of any of these shapes.
      k_new: keys of this call's tokens in q's dtype, read in place of what is stored at their positions and never
        scaled, so that a token meets itself unrounded. Their slots may hold anything, and their table entries too.
      v_new: values of this call's tokens, given with `k_new`.
      k_first: keys of every sequence's first positions, f32, bf16 or f16, read in place of what is stored there and
        never scaled. Only the backend `xla` reads them.
      v_first: values of those positions, given with `k_first`.
      block_order: for a table that has only some of a sequence's blocks: which block of it each entry is, rising along
        the row. Entries whose order is past the sequence's end may hold anything; the positions of blocks that are
        missing are not seen. A sequence may then be longer than its row of the table. Only the backend `xla` reads it.
      scale: factor of the logits, head_dim**-0.5 if None. Static under jit.
      window: positions that a query sees, its own included; all if None. Static under jit.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, if given. Static under jit.
      sinks: a logit for each query head that takes part in every softmax of its head, once and uncapped, and
        contributes no value. -inf is none; a finite one must lie within 2e38.
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
    check_array("k", k, ("blocks", "block_size", "kv_heads", "head_dim"), (*CACHED, PACKED))
    check_array("v", v, ("blocks", "block_size", "kv_heads", "head_dim"), (*CACHED, PACKED))
    check_array("block_tables", block_tables, ("seqs", "blocks_per_seq"), ("int32",))
    options = check_options(
        q, scale=scale, window=window, soft_cap=soft_cap, return_lse=return_lse, max_q_len=max_q_len
    )
    check_ragged(q, k, v, kv_lens, cu_q_lens, k_new=k_new, v_new=v_new, k_first=k_first, v_first=v_first, sinks=sinks)
    k_scale, v_scale = same_scales(k_scale, v_scale, tuple(k.shape[:-1]))
    extras = {"k_scale": k_scale, "v_scale": v_scale, "k_new": k_new, "v_new": v_new, "sinks": sinks}
    backends = BACKENDS
    if k_first is not None:
        backends, extras = only(BACKENDS, ["xla"], "k_first"), extras | {"k_first": k_first, "v_first": v_first}
    if block_order is not None:
        shape = tuple(block_tables.shape)
        check_array("block_order", block_order, ("seqs", "blocks_per_seq"), ("int32",))
        require(block_order.shape == shape, "block_order", f"of block_tables' shape {shape}", tuple(block_order.shape))
        require(k_new is None and k_first is None, "block_order", "None with k_new or k_first", "both")
        backends, extras = only(BACKENDS, ["xla"], "block_order"), extras | {"block_order": block_order}
    seqs, positions = kv_lens.shape[0], block_tables.shape[1] * k.shape[1]
    require(block_tables.shape[0] == seqs, "block_tables", f"of {seqs} rows, as kv_lens", block_tables.shape[0])
    require(positions <= MAX_INT32, "block_tables", f"wide enough for at most {MAX_INT32} positions", positions)
    tables, batch = legal_in_blocks(
        block_tables,
        kv_lens,
        cu_q_lens,
        tokens=q.shape[0],
        blocks=k.shape[0],
        block_size=k.shape[1],
        max_q_len=options["max_q_len"],
        window=window,
        reads_new=k_new is not None,
        block_order=block_order,
    )
    arrays = (q, k, v, tables, batch.kv_lens, batch.cu_q_lens)
    out, lse = settle(*dispatch("paged_attention", backends, backend, *arrays, **extras, **options), batch)
    return out if lse is None else (out, lse)
