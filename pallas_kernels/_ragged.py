"""The contract of a ragged batch: what is checked on the host, and what becomes of a row that breaks it.

Sequence s owns the query tokens `[cu_q_lens[s], cu_q_lens[s + 1])`; its j-th query has position
`kv_lens[s] - q_len + j` and sees every position up to its own. Shapes and dtypes are known on the host and are
checked there. Lengths are values inside a compiled program, where nothing can be raised: a sequence whose
lengths cannot be right gets NaN, so that the fault shows where it is and nowhere else.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

FLOATS = ("float32", "bfloat16", "float16")
MAX_INT32 = 2**31 - 1


def require(condition: bool, argument: str, expected: str, got: object) -> None:
    """Raises the ValueError of a wrong argument."""
    if not condition:
        raise ValueError(f"{argument} must be {expected}, got {got}")


def check_array(argument: str, array: jax.Array, axes: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    """Raises a ValueError unless `array` has these named axes, none of them empty, and one of `dtypes`."""
    shape = tuple(array.shape)
    require(len(shape) == len(axes), argument, f"[{', '.join(axes)}]", f"shape {shape}")
    require(0 not in shape, argument, f"[{', '.join(axes)}] with no empty axis", f"shape {shape}")
    require(array.dtype.name in dtypes, argument, f"of dtype {' or '.join(dtypes)}", array.dtype.name)


def check_ragged(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float | None,
    max_q_len: int | None,
) -> tuple[float, int]:
    """Checks what every attention over stored keys shares; `k` and `v` end in `[kv_heads, head_dim]`.

    Returns:
      `scale` and `max_q_len` with their defaults filled in: head_dim**-0.5 and the number of tokens.
    """
    check_array("q", q, ("tokens", "q_heads", "head_dim"), FLOATS)
    check_array("kv_lens", kv_lens, ("seqs",), ("int32",))
    check_array("cu_q_lens", cu_q_lens, ("seqs + 1",), ("int32",))
    tokens, q_heads, head_dim = q.shape
    kv_heads, seqs, slots = k.shape[-2], kv_lens.shape[0], math.prod(k.shape[:-2])
    require(v.shape == k.shape, "v", f"of k's shape {tuple(k.shape)}", f"shape {tuple(v.shape)}")
    require(k.shape[-1] == head_dim, "k", f"of q's head_dim {head_dim}", f"shape {tuple(k.shape)}")
    require(q_heads % kv_heads == 0, "q_heads", f"a multiple of kv_heads {kv_heads}", q_heads)
    require(slots <= MAX_INT32, "k", f"of at most {MAX_INT32} slots, since slot ids are int32", slots)
    require(cu_q_lens.shape[0] == seqs + 1, "cu_q_lens", f"of length seqs + 1 = {seqs + 1}", cu_q_lens.shape[0])
    require(max_q_len is None or max_q_len >= 1, "max_q_len", "None or at least 1", max_q_len)
    require(scale is None or math.isfinite(scale), "scale", "None or finite", scale)
    return (head_dim**-0.5 if scale is None else scale), (tokens if max_q_len is None else max_q_len)


def within_contract(
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    *,
    max_q_len: int,
    capacity: int,
) -> Bool[Array, " seqs"]:
    """Which sequences have lengths that can be right, as far as each can tell by itself.

    A sequence that holds its own queries (kv_len >= q_len), fits `capacity` positions and keeps to `max_q_len`,
    or one that holds nothing (kv_len 0), which is how a padded row looks.
    """
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    return ((kv_lens >= q_lens) & (kv_lens <= capacity) & (q_lens <= max_q_len)) | (kv_lens == 0)


def climbs(cu_q_lens: Int32[Array, " bounds"], tokens: int) -> Bool[Array, ""]:
    """Whether the bounds of the sequences rise from 0 to at most `tokens` and never fall."""
    return (cu_q_lens[0] == 0) & jnp.all(cu_q_lens[:-1] <= cu_q_lens[1:]) & (cu_q_lens[-1] <= tokens)


def poison_tokens(
    out: Float[Array, "tokens q_heads head_dim"],
    right: Bool[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
) -> Float[Array, "tokens q_heads head_dim"]:
    """NaN for the tokens of sequences that are not `right`, and for all tokens where `cu_q_lens` does not climb."""
    token_ids = jnp.arange(out.shape[0], dtype=jnp.int32)
    seq_ids = jnp.searchsorted(cu_q_lens[1:], token_ids, side="right")
    keep = climbs(cu_q_lens, out.shape[0]) & right.at[seq_ids].get(mode="fill", fill_value=True)
    return jnp.where(keep[:, None, None], out, jnp.nan)
