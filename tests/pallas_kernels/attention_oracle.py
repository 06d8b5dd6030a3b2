"""Attention written plainly in float64, and memory laid out to catch what a kernel must not read.

Every slot that no query may see holds NaN or infinity, every table entry that no query may follow holds an id that
is out of range or someone else's, and padded queries are NaN.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.shapes import AttentionCase, Lengths

GARBAGE_IDS = (-1, 2**30, -(2**31), 2**31 - 1, -12345678, 0, 1)
GARBAGE_STARTS = (2**31 - 1, -5, -(2**31), 10**6)


@dataclasses.dataclass
class Problem:
    """One batch, stored in blocks and in ranges, with the answer."""

    q: np.ndarray  # [tokens, q_heads, head_dim]
    k_blocks: np.ndarray  # [blocks, block_size, kv_heads, head_dim]
    v_blocks: np.ndarray
    block_tables: np.ndarray
    k_arena: np.ndarray  # [slots, kv_heads, head_dim]
    v_arena: np.ndarray
    starts: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    expected: np.ndarray  # float64

    def paged(self) -> tuple:
        arrays = (self.q, self.k_blocks, self.v_blocks, self.block_tables, self.kv_lens, self.cu_q_lens)
        return tuple(jnp.asarray(array) for array in arrays)

    def contiguous(self) -> tuple:
        arrays = (self.q, self.k_arena, self.v_arena, self.starts, self.kv_lens, self.cu_q_lens)
        return tuple(jnp.asarray(array) for array in arrays)


def attend(q, keys, values, kv_lens, cu_q_lens, scale):
    """Softmax attention token by token; `keys[s]` and `values[s]` are those of sequence s in order."""
    q, out = q.astype(np.float64), np.zeros(q.shape, np.float64)
    for seq, kv_len in enumerate(kv_lens):
        first, last = cu_q_lens[seq], cu_q_lens[seq + 1]
        for token in range(first, last):
            seen = kv_len - (last - token) + 1
            if kv_len == 0:
                continue
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys[seq].shape[1])
                logits = scale * keys[seq][:seen, kv_head].astype(np.float64) @ q[token, head]
                weights = np.exp(logits - logits.max())
                out[token, head] = weights @ values[seq][:seen, kv_head].astype(np.float64) / weights.sum()
    return out


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory in which no value is finite."""
    flat = np.full(math.prod(shape), np.nan, dtype)
    flat[::3], flat[1::3] = np.inf, -np.inf
    return flat.reshape(shape)


def make_problem(
    case: AttentionCase, lengths: Lengths, seed: int, *, sharpness: float = 3.0, use_block_0: bool = True
) -> Problem:
    """Random values for a batch; queries are `sharpness` times normal, so that a few keys carry the weight."""
    rng = np.random.default_rng(seed)
    q_dtype, kv_dtype = jnp.dtype(case.q_dtype), jnp.dtype(case.kv_dtype)
    lengths = lengths + ((0, 0),) * (case.seqs - len(lengths))
    q_lens, kv_lens = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    heads = (case.kv_heads, case.head_dim)
    keys, values = ([rng.standard_normal((n, *heads)).astype(kv_dtype) for n in kv_lens] for _ in range(2))
    q = (sharpness * rng.standard_normal((case.tokens, case.q_heads, case.head_dim))).astype(q_dtype)
    q[cu_q_lens[-1] :] = np.nan

    used = [math.ceil(n / case.block_size) for n in kv_lens]
    blocks = case.seqs * case.blocks_per_seq + 3
    ids = [*(1 + rng.permutation(blocks - 2)), *([0] if use_block_0 else []), blocks - 1]  # the last is used first
    block_tables = np.resize(np.array(GARBAGE_IDS, np.int64), (case.seqs, case.blocks_per_seq)).astype(np.int32)
    k_blocks, v_blocks = (poisoned((blocks, case.block_size, *heads), kv_dtype) for _ in range(2))
    for seq in range(case.seqs):
        for i in range(used[seq]):
            block = ids.pop()
            block_tables[seq, i] = block
            part = slice(i * case.block_size, min((i + 1) * case.block_size, kv_lens[seq]))
            k_blocks[block, : part.stop - part.start] = keys[seq][part]
            v_blocks[block, : part.stop - part.start] = values[seq][part]

    gap, order = 3, rng.permutation([s for s in range(case.seqs) if kv_lens[s] > 0])
    slots = case.seqs * (case.blocks_per_seq * case.block_size + gap)
    starts = np.resize(np.array(GARBAGE_STARTS, np.int64), case.seqs).astype(np.int32)
    k_arena, v_arena = (poisoned((slots, *heads), kv_dtype) for _ in range(2))
    end = slots  # the first range laid down touches the end of the arena
    for seq in order:
        starts[seq] = end - kv_lens[seq]
        k_arena[starts[seq] : end], v_arena[starts[seq] : end] = keys[seq], values[seq]
        end = starts[seq] - gap

    expected = attend(q, keys, values, kv_lens, cu_q_lens, case.head_dim**-0.5)
    return Problem(q, k_blocks, v_blocks, block_tables, k_arena, v_arena, starts, kv_lens, cu_q_lens, expected)


def assert_matches(out, expected: np.ndarray) -> None:
    """Within 2e-5 for float32 and two units in the last place for 16 bits; tokens of nothing exactly 0."""
    out_dtype, out = out.dtype, np.asarray(out).astype(np.float64)
    assert np.all(np.isfinite(out)), "not finite"
    nothing = np.all(expected == 0, axis=(1, 2))
    assert np.all(out[nothing] == 0), "a token of no sequence is not 0"
    tolerance = 2e-5 * (np.abs(expected) + 0.1)
    if out_dtype != jnp.float32:
        exponent = np.floor(np.log2(np.maximum(np.abs(expected), 1e-30)))
        tolerance += 2 * 2.0**exponent * float(jnp.finfo(out_dtype).eps)
    worst = np.max(np.abs(out - expected) / tolerance, initial=0)
    assert worst <= 1, f"error is {worst:.1f} times the tolerance"
