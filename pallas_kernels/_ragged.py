"""What every attention over a ragged batch checks on the host: shapes, dtypes and options, each refused by name."""

import math
from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

FLOATS = ("float32", "bfloat16", "float16")
CACHED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8")
PACKED = "uint8"  # two 4-bit integers
SCALES = ("float32", "bfloat16", "float8_e8m0fnu")
MAX_INT32 = 2**31 - 1


class Options(TypedDict):
    """The static options of a call, defaults filled in."""

    scale: float
    window: int | None
    soft_cap: float | None
    return_lse: bool
    max_q_len: int


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


def check_options(
    q: jax.Array,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    return_lse: bool,
    max_q_len: int | None,
) -> Options:
    """Checks the static options and fills in their defaults: head_dim**-0.5 and the number of tokens."""
    check_array("q", q, ("tokens", "q_heads", "head_dim"), FLOATS)
    tokens, _, head_dim = q.shape
    require(scale is None or math.isfinite(scale), "scale", "None or finite", scale)
    require(window is None or 1 <= window <= MAX_INT32, "window", "None or at least 1 (the token itself)", window)
    require(soft_cap is None or 0 < soft_cap < math.inf, "soft_cap", "None or positive and finite", soft_cap)
    require(max_q_len is None or max_q_len >= 1, "max_q_len", "None or at least 1", max_q_len)
    return Options(
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        return_lse=return_lse,
        max_q_len=tokens if max_q_len is None else max_q_len,
    )


def check_ragged(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    k_first: jax.Array | None,
    v_first: jax.Array | None,
    sinks: jax.Array | None,
) -> None:
    """Checks the arrays that attention over blocks and over ranges share; `k` and `v` end in [kv_heads, head_dim]."""
    check_array("kv_lens", kv_lens, ("seqs",), ("int32",))
    check_array("cu_q_lens", cu_q_lens, ("seqs + 1",), ("int32",))
    tokens, q_heads, head_dim = q.shape
    kv_heads, seqs, slots = k.shape[-2], kv_lens.shape[0], math.prod(k.shape[:-2])
    require(v.shape[:-1] == k.shape[:-1], "v", f"of k's shape {tuple(k.shape)}", f"shape {tuple(v.shape)}")
    for argument, stored in (("k", k), ("v", v)):
        width = stored.shape[-1] * (2 if stored.dtype.name == PACKED else 1)
        require(width == head_dim, argument, f"of q's head_dim {head_dim}", f"shape {tuple(stored.shape)}")
    require(q_heads % kv_heads == 0, "q_heads", f"a multiple of kv_heads {kv_heads}", q_heads)
    require(slots <= MAX_INT32, "k", f"of at most {MAX_INT32} slots, since slot ids are int32", slots)
    require(cu_q_lens.shape[0] == seqs + 1, "cu_q_lens", f"of length seqs + 1 = {seqs + 1}", cu_q_lens.shape[0])

    require((k_new is None) == (v_new is None), "v_new", "given exactly if k_new is", "one of them alone")
    for argument, new in (("k_new", k_new), ("v_new", v_new)):
        if new is not None:
            check_array(argument, new, ("tokens", "kv_heads", "head_dim"), (q.dtype.name,))
            require(
                new.shape == (tokens, kv_heads, head_dim),
                argument,
                f"of shape [tokens, kv_heads, head_dim] = {(tokens, kv_heads, head_dim)}",
                tuple(new.shape),
            )
    require((k_first is None) == (v_first is None), "v_first", "given exactly if k_first is", "one of them alone")
    for argument, first in (("k_first", k_first), ("v_first", v_first)):
        if first is not None:
            check_array(argument, first, ("seqs", "first_tokens", "kv_heads", "head_dim"), FLOATS)
            expected = (seqs, first.shape[1], kv_heads, head_dim)
            require(first.shape == expected, argument, f"of shape {expected}", f"shape {tuple(first.shape)}")
    if k_first is not None and v_first is not None:
        require(v_first.shape == k_first.shape, "v_first", f"of k_first's shape {k_first.shape}", v_first.shape)
    if sinks is not None:
        check_array("sinks", sinks, ("q_heads",), ("float32",))
        require(sinks.shape[0] == q_heads, "sinks", f"of length q_heads = {q_heads}", sinks.shape[0])


def check_scales(argument: str, scales: jax.Array | None, slots_by_head: tuple[int, ...]) -> None:
    """Raises a ValueError unless `scales` are for a layer, for KV heads, or for slots (or blocks) and KV heads."""
    if scales is None:
        return
    require(scales.dtype.name in SCALES, argument, f"of dtype {' or '.join(SCALES)}", scales.dtype.name)
    blocks_by_head = (slots_by_head[0], slots_by_head[-1])
    shapes = ((), slots_by_head[-1:], tuple(slots_by_head), *([blocks_by_head] if len(slots_by_head) == 3 else []))
    expected = f"of shape {shapes[0]} (per layer), {shapes[1]} (per head) or {shapes[2]} (per token and head)"
    expected += f" or {shapes[3]} (per block and head)" if len(shapes) == 4 else ""
    require(tuple(scales.shape) in shapes, argument, expected, tuple(scales.shape))


def same_scales(
    k_scale: jax.Array | None, v_scale: jax.Array | None, slots_by_head: tuple[int, ...]
) -> tuple[Float32[Array, "..."] | None, Float32[Array, "..."] | None]:
    """Scales as backends take them: float32, both or none, for the layer, for heads, or for slots and heads alike.

    The coarser of two is spread out, and so are scales of blocks: a copy of the scales, not of what they scale.
    """
    check_scales("k_scale", k_scale, slots_by_head)
    check_scales("v_scale", v_scale, slots_by_head)
    if k_scale is None and v_scale is None:
        return None, None
    k, v = (jnp.float32(1) if scale is None else scale.astype(jnp.float32) for scale in (k_scale, v_scale))
    if k.shape == v.shape and k.ndim != 2:
        return k, v
    by_head = max(k.ndim, v.ndim) <= 1
    shape = slots_by_head[-1:] if by_head else slots_by_head

    def spread(scale: jax.Array) -> jax.Array:
        by_block = scale.ndim == 2 and len(slots_by_head) == 3
        return jnp.broadcast_to(scale[:, None] if by_block else scale, shape)

    return spread(k), spread(v)
