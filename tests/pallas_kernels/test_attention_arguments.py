"""What an attention call refuses on the host, and in which words."""

import inspect

import jax.numpy as jnp
import pytest

from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.paged_attention import paged_attention


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def ints(*shape):
    return array(*shape, dtype=jnp.int32)


PAGED = {
    "q": array(5, 4, 8),
    "k": array(3, 2, 2, 8),
    "v": array(3, 2, 2, 8),
    "block_tables": ints(2, 3),
    "kv_lens": ints(2),
    "cu_q_lens": ints(3),
}
CONTIGUOUS = {name: PAGED[name] for name in ("q", "kv_lens", "cu_q_lens")} | {
    "k": array(6, 2, 8),
    "v": array(6, 2, 8),
    "starts": ints(2),
}
BOTH = [
    ({"q": array(5, 8)}, r"q must be \[tokens, q_heads, head_dim\], got shape \(5, 8\)"),
    ({"q": array(0, 4, 8)}, r"q must be .* with no empty axis, got shape \(0, 4, 8\)"),
    ({"q": ints(5, 4, 8)}, r"q must be of dtype float32 or bfloat16 or float16, got int32"),
    ({"q": array(5, 3, 8)}, r"q_heads must be a multiple of kv_heads 2, got 3"),
    ({"q": array(5, 4, 16)}, r"k must be of q's head_dim 16, got shape"),
    ({"kv_lens": ints(3)}, r"cu_q_lens must be of length seqs \+ 1 = 4, got 3"),
    ({"kv_lens": array(2)}, r"kv_lens must be of dtype int32, got float32"),
    ({"cu_q_lens": ints(2)}, r"cu_q_lens must be of length seqs \+ 1 = 3, got 2"),
    ({"max_q_len": 0}, r"max_q_len must be None or at least 1, got 0"),
    ({"scale": float("nan")}, r"scale must be None or finite, got nan"),
    ({"window": 0}, r"window must be None or at least 1 \(the token itself\), got 0"),
    ({"soft_cap": 0.0}, r"soft_cap must be None or positive and finite, got 0.0"),
    ({"soft_cap": float("inf")}, r"soft_cap must be None or positive and finite, got inf"),
    ({"sinks": array(2)}, r"sinks must be of length q_heads = 4, got 2"),
    ({"sinks": array(4, dtype=jnp.bfloat16)}, r"sinks must be of dtype float32, got bfloat16"),
    ({"k_scale": array(3)}, r"k_scale must be of shape \(\) \(per layer\), \(2,\) \(per head\) or .*, got \(3,\)"),
    ({"v_scale": array(2, dtype=jnp.float16)}, r"v_scale must be of dtype float32 or bfloat16 or .*, got float16"),
    ({"k_new": array(5, 2, 8)}, r"v_new must be given exactly if k_new is, got one of them alone"),
    ({"k_new": array(5, 2, 8), "v_new": array(4, 2, 8)}, r"v_new must be of shape .* = \(5, 2, 8\), got \(4, 2, 8\)"),
    (
        {"k_new": array(5, 2, 8, dtype=jnp.bfloat16), "v_new": array(5, 2, 8)},
        r"k_new must be of dtype float32, got bfloat16",
    ),
]


@pytest.mark.parametrize(
    ("attention", "arguments", "change", "message"),
    [
        *((paged_attention, PAGED, *wrong) for wrong in BOTH),
        (paged_attention, PAGED, {"k": array(6, 2, 8)}, r"k must be \[blocks, block_size, kv_heads, head_dim\]"),
        (paged_attention, PAGED, {"v": array(4, 2, 2, 8)}, r"v must be of k's shape \(3, 2, 2, 8\), got shape"),
        (paged_attention, PAGED, {"k": ints(3, 2, 2, 8)}, r"k must be of dtype float32 .* or int8 or uint8, got int32"),
        (paged_attention, PAGED, {"v": array(3, 2, 2, 4)}, r"v must be of q's head_dim 8, got shape \(3, 2, 2, 4\)"),
        (paged_attention, PAGED, {"k": array(3, 2, 2, 8, dtype=jnp.uint8)}, r"k must be of q's head_dim 8, got shape"),
        (paged_attention, PAGED, {"block_tables": ints(3, 3)}, r"block_tables must be of 2 rows, as kv_lens, got 3"),
        (paged_attention, PAGED, {"block_tables": array(2, 3)}, r"block_tables must be of dtype int32, got float32"),
        *((contiguous_attention, CONTIGUOUS, *wrong) for wrong in BOTH),
        (contiguous_attention, CONTIGUOUS, {"k": array(3, 2, 2, 8)}, r"k must be \[slots, kv_heads, head_dim\]"),
        (contiguous_attention, CONTIGUOUS, {"starts": ints(3)}, r"starts must be of length 2, as kv_lens, got 3"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(attention, arguments, change, message):
    # Without the type checker of the test run, which would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attention)(**(arguments | change))


def test_a_missing_backend_is_named():
    with pytest.raises(NotImplementedError, match=r"paged_attention has no backend 'cudnn'; it has \[.*'xla'.*\]"):
        paged_attention(**PAGED, backend="cudnn")
