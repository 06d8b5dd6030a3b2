"""Attention written plainly in float64, and memory laid out to catch what a kernel must not read.

Every slot that no query may see holds NaN or infinity and so does its scale, every table entry that no query may
follow holds an id that is out of range or someone else's, and padded rows are NaN.
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
    k_scale_blocks: np.ndarray | None  # [], [kv_heads] or [blocks, block_size, kv_heads]
    v_scale_blocks: np.ndarray | None
    block_tables: np.ndarray
    k_arena: np.ndarray  # [slots, kv_heads, head_dim]
    v_arena: np.ndarray
    k_scale_arena: np.ndarray | None  # [], [kv_heads] or [slots, kv_heads]
    v_scale_arena: np.ndarray | None
    starts: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    k_new: np.ndarray | None  # [tokens, kv_heads, head_dim]
    v_new: np.ndarray | None
    sinks: np.ndarray | None
    options: dict  # window, soft_cap, return_lse, max_q_len
    keys: list[np.ndarray]  # float64 per sequence [kv_len, kv_heads, head_dim]: what the stored ones stand for
    values: list[np.ndarray]

    def paged(self) -> dict:
        """The arguments of `paged_attention`."""
        return self._arguments("blocks") | {"block_tables": jnp.asarray(self.block_tables)}

    def contiguous(self) -> dict:
        """The arguments of `contiguous_attention`."""
        return self._arguments("arena") | {"starts": jnp.asarray(self.starts)}

    def _arguments(self, place: str) -> dict:
        stored = {name: getattr(self, f"{name}_{place}") for name in ("k", "v", "k_scale", "v_scale")}
        other = {name: getattr(self, name) for name in ("q", "kv_lens", "cu_q_lens", "k_new", "v_new", "sinks")}
        arrays = {name: None if array is None else jnp.asarray(array) for name, array in (stored | other).items()}
        return arrays | self.options

    def expected(self) -> "Expected":
        """The answer to the problem as it is now."""
        options = {name: self.options.get(name) for name in ("scale", "window", "soft_cap")}
        return attend(self.q, self.keys, self.values, self.kv_lens, self.cu_q_lens, sinks=self.sinks, **options)


@dataclasses.dataclass
class Expected:
    """The answer in float64; `size` is the output with every value's absolute: what rounding errors are small to."""

    out: np.ndarray
    lse: np.ndarray
    size: np.ndarray


def attend(q, keys, values, kv_lens, cu_q_lens, *, scale=None, window=None, soft_cap=None, sinks=None) -> Expected:
    """Softmax attention token by token; `keys[s]` and `values[s]` are those of sequence s in order."""
    q = q.astype(np.float64)
    out, size, lse = np.zeros(q.shape), np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for seq, kv_len in enumerate(kv_lens):
        first, last = cu_q_lens[seq], cu_q_lens[seq + 1]
        for token in range(first, last) if kv_len > 0 else ():
            position = kv_len - (last - token)
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys[seq].shape[1])
                logits = scale * keys[seq][seen, kv_head].astype(np.float64) @ q[token, head]
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                everything = logits if sinks is None else np.append(logits, np.float64(sinks[head]))
                lse[token, head] = everything.max() + np.log(np.exp(everything - everything.max()).sum())
                weights, seen_values = np.exp(logits - lse[token, head]), values[seq][seen, kv_head].astype(np.float64)
                out[token, head], size[token, head] = weights @ seen_values, weights @ np.abs(seen_values)
    return Expected(out, lse, size)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory in which no value is finite, or none is small."""
    if dtype == np.int8:
        return np.resize(np.array([127, -128, -127], np.int8), shape)
    flat = np.full(math.prod(shape), np.nan, dtype)
    if dtype != jnp.float8_e4m3fn:  # which has no infinity
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
    kv_heads, head_dim = heads = (case.kv_heads, case.head_dim)
    q = (sharpness * rng.standard_normal((case.tokens, case.q_heads, head_dim))).astype(q_dtype)
    q[cu_q_lens[-1] :] = np.nan

    # Positions of which the cache is read: from the first query's window on, and with `reads_new` up to the queries.
    num_stored = np.where(kv_lens > 0, kv_lens - q_lens, 0) if case.reads_new else kv_lens
    first_read = np.maximum(kv_lens - q_lens + 1 - case.window, 0) if case.window else np.zeros_like(kv_lens)
    blocks = case.seqs * case.blocks_per_seq + 3
    slots = case.seqs * (case.blocks_per_seq * case.block_size + 3)
    ids = [*(1 + rng.permutation(blocks - 2)), *([0] if use_block_0 else []), blocks - 1]  # the last is used first
    block_tables = np.resize(np.array(GARBAGE_IDS, np.int64), (case.seqs, case.blocks_per_seq)).astype(np.int32)
    for seq in range(case.seqs):
        for i in range(first_read[seq] // case.block_size, math.ceil(num_stored[seq] / case.block_size)):
            block_tables[seq, i] = ids.pop()
    starts = np.resize(np.array(GARBAGE_STARTS, np.int64), case.seqs).astype(np.int32)
    end = slots  # the first range laid down touches the end of the arena
    for seq in rng.permutation(np.flatnonzero(kv_lens)):
        starts[seq] = end - kv_lens[seq]
        end = starts[seq] - 3

    def store(dtype: np.dtype) -> tuple:
        """Normal values as they are stored in blocks and in the arena, with scales, and what they stand for."""
        places = {"blocks": (blocks, case.block_size), "arena": (slots,)}
        pools = {name: poisoned((*place, *heads), dtype) for name, place in places.items()}
        scales: dict[str, np.ndarray | None] = dict.fromkeys(places)
        if case.scales == "layer":
            scales = dict.fromkeys(places, np.float32(rng.uniform(0.03, 0.3)))
        elif case.scales == "head":
            scales = dict.fromkeys(places, rng.uniform(0.03, 0.3, kv_heads).astype(np.float32))
        elif case.scales == "token":
            scales = {name: poisoned((*place, kv_heads), np.dtype(np.float32)) for name, place in places.items()}
        meant = []
        for seq in range(case.seqs):
            n = int(kv_lens[seq])
            if case.scales == "token":
                scale = rng.uniform(0.03, 0.3, (n, kv_heads)).astype(np.float32)
            else:
                scale = np.broadcast_to(1.0 if scales["blocks"] is None else scales["blocks"], (n, kv_heads))
            stored = rng.standard_normal((n, *heads)) / scale[..., None]
            stored = np.clip(np.rint(stored), -127, 127).astype(np.int8) if dtype == np.int8 else stored.astype(dtype)
            meant.append(stored.astype(np.float64) * scale[..., None])
            for p in range(int(first_read[seq]), int(num_stored[seq])):
                block, arena = (block_tables[seq, p // case.block_size], p % case.block_size), starts[seq] + p
                pools["blocks"][block], pools["arena"][arena] = stored[p], stored[p]
                if case.scales == "token":
                    scales["blocks"][block], scales["arena"][arena] = scale[p], scale[p]
        return pools, scales, meant

    (k_pools, k_scales, keys), (v_pools, v_scales, values) = store(kv_dtype), store(kv_dtype)
    k_new = v_new = None
    if case.reads_new:
        k_new, v_new = (rng.standard_normal((case.tokens, *heads)).astype(q_dtype) for _ in range(2))
        k_new[cu_q_lens[-1] :], v_new[cu_q_lens[-1] :] = np.nan, np.nan
        for seq in np.flatnonzero(kv_lens):
            own = slice(cu_q_lens[seq], cu_q_lens[seq + 1])
            keys[seq][num_stored[seq] :], values[seq][num_stored[seq] :] = k_new[own], v_new[own]
    return Problem(
        q=q,
        k_blocks=k_pools["blocks"],
        v_blocks=v_pools["blocks"],
        k_scale_blocks=k_scales["blocks"],
        v_scale_blocks=v_scales["blocks"],
        block_tables=block_tables,
        k_arena=k_pools["arena"],
        v_arena=v_pools["arena"],
        k_scale_arena=k_scales["arena"],
        v_scale_arena=v_scales["arena"],
        starts=starts,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        k_new=k_new,
        v_new=v_new,
        sinks=rng.normal(0, 3, case.q_heads).astype(np.float32) if case.sinks else None,
        options={
            "window": case.window,
            "soft_cap": case.soft_cap,
            "return_lse": case.return_lse,
            "max_q_len": case.max_q_len,
        },
        keys=keys,
        values=values,
    )


def problem_of(case: AttentionCase, batch: str) -> Problem:
    """A problem of a case's named batch; in every other batch block 0 is somebody's."""
    place = list(case.batches).index(batch)
    return make_problem(case, case.batches[batch], place, use_block_0=place % 2 == 1)


def assert_matches(result, expected: Expected) -> None:
    """Within 2e-5 for float32 and two units in the last place for 16 bits; tokens of nothing exactly 0 and -inf.

    Both are relative to what the output would be if no values cancelled, as that is what rounding depends on.
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    out_dtype, out = out.dtype, np.asarray(out).astype(np.float64)
    assert np.all(np.isfinite(out)), "not finite"
    nothing = np.isneginf(expected.lse)
    assert np.all(out[nothing] == 0), "a token of no sequence is not 0"
    tolerance = 2e-5 * np.maximum(expected.size, 1e-3)
    if out_dtype != jnp.float32:
        exponent = np.floor(np.log2(np.maximum(expected.size, 1e-30)))
        tolerance += 2 * 2.0**exponent * float(jnp.finfo(out_dtype).eps)
    worst = np.max(np.abs(out - expected.out) / tolerance, initial=0)
    assert worst <= 1, f"error is {worst:.1f} times the tolerance"
    if lse is not None:
        assert lse.dtype == jnp.float32
        lse, right = np.asarray(lse), expected.lse[~nothing]
        assert np.all(np.isneginf(lse[nothing])), "the logarithm of a token of no sequence is not -inf"
        wrong = np.abs(lse[~nothing] - right) / (2e-5 * np.maximum(np.abs(right), 1))
        assert np.max(wrong, initial=0) <= 1, f"logarithm is off by {np.max(wrong):.1f} times the tolerance"
