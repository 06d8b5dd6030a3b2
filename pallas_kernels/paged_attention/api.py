"""Signature, checks and choice of backend of paged attention."""

from collections.abc import Callable, Mapping, Sequence

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._ragged import FLOATS, MAX_INT32, check_array, check_ragged, require
from pallas_kernels.dispatch import dispatch
from pallas_kernels.paged_attention import reference

BACKENDS: Mapping[str, Callable[..., jax.Array]] = {"xla": reference.paged_attention}


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "blocks block_size kv_heads head_dim"],
    v: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    scale: float | None = None,
    max_q_len: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention of any mix of decode rows and prefill chunks over keys and values stored in blocks.

    Position p of sequence s is stored in slot `p % block_size` of block `block_tables[s, p // block_size]`.
    Sequence s owns the query tokens `[cu_q_lens[s], cu_q_lens[s + 1])`; they are its last positions, already
    stored, and each sees the positions up to its own. Query head h reads KV head `h // (q_heads // kv_heads)`.
    Logits and sums are float32 whatever the inputs.

    Table entries past the blocks that a sequence uses may hold any number, slots and blocks that no query sees
    may hold NaN, and one block may serve many sequences. What cannot be right in the values given, and so cannot
    raise, shows as NaN: in all queries of a sequence with `0 < kv_len < q_len`, with more positions than
    its table has room for, a negative kv_len or more than `max_q_len` queries; in every query that sees a position
    whose table entry is not a block id; in the whole output if `cu_q_lens` does not rise from 0 to at most `tokens`.

    Args:
      q: f32, bf16 or f16 queries of all sequences, one after another.
      k: f32, bf16 or f16 keys, the pool of one layer.
      v: values, of k's shape.
      block_tables: block ids by sequence and order.
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
    check_array("k", k, ("blocks", "block_size", "kv_heads", "head_dim"), FLOATS)
    check_array("v", v, ("blocks", "block_size", "kv_heads", "head_dim"), FLOATS)
    check_array("block_tables", block_tables, ("seqs", "blocks_per_seq"), ("int32",))
    scale, max_q_len = check_ragged(q, k, v, kv_lens, cu_q_lens, scale=scale, max_q_len=max_q_len)
    seqs, positions = kv_lens.shape[0], block_tables.shape[1] * k.shape[1]
    require(block_tables.shape[0] == seqs, "block_tables", f"of {seqs} rows, as kv_lens", block_tables.shape[0])
    require(positions <= MAX_INT32, "block_tables", f"wide enough for at most {MAX_INT32} positions", positions)
    return dispatch(
        "paged_attention",
        BACKENDS,
        backend,
        q,
        k,
        v,
        block_tables,
        kv_lens,
        cu_q_lens,
        scale=scale,
        max_q_len=max_q_len,
    )
