"""Named cases of attention over stored keys, shared by tests, benchmarks and compile checks.

A case is what a program is compiled for; its batches are lengths that the compiled program is run on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pallas_kernels import tuning

Scales = Literal["none", "layer", "head", "token"]
Platform = Literal["cpu", "gpu", "tpu"]

# Per sequence of a batch: queries of this call, and positions stored, the queries' own included.
Lengths = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Static sizes and options of a call, and batches of lengths to run it on.

    Attributes:
      name: unique among the cases of one kind.
      q_heads: query heads, a multiple of kv_heads.
      kv_heads: key and value heads.
      head_dim: elements per head.
      block_size: slots per block.
      blocks_per_seq: width of the block table; a contiguous range has as many slots.
      tokens: query rows, padding included.
      seqs: rows of the table; a batch may name fewer, the rest are empty.
      max_q_len: most queries of one sequence.
      batches: lengths by name; none for a case that is only compiled.
      q_dtype: dtype of queries and output.
      kv_dtype: dtype of stored keys and values.
      scales: what one scale of stored keys and values is for: the layer, a head, or a token and head.
      reads_new: whether this call's keys and values are read from beside the cache.
      window: positions that a query sees, its own included.
      soft_cap: bound of the logits.
      sinks: whether each head has one.
      return_lse: whether the logarithms of the denominators are asked for.
      offline: whether the case is compiled for devices that are not there, and too large for an interpreter.
      on_demand: whether that is done only when asked for, not with every change.
      platforms: where the case can run.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    blocks_per_seq: int
    tokens: int
    seqs: int
    max_q_len: int
    batches: Mapping[str, Lengths] = dataclasses.field(default_factory=dict, hash=False)
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    scales: Scales = "none"
    reads_new: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    return_lse: bool = False
    offline: bool = False
    on_demand: bool = False
    platforms: tuple[Platform, ...] = ("cpu", "gpu", "tpu")

    @property
    def kind(self) -> Literal["decode", "prefill"]:
        """Which of an operation's kernels the case is for."""
        return "decode" if self.max_q_len == 1 else "prefill"

    def entry_name(self, kernel: str, num_devices: int = 1) -> str:
        """Under which `tuning` has the sizes of `kernel` for this case, its KV heads split over so many devices."""
        return tuning.entry_name(
            kernel,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads // num_devices,
            group=self.q_heads // self.kv_heads,
            block_size=self.block_size if kernel.startswith("paged") else None,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
        )


def _decode(*kv_lens: int) -> Lengths:
    return tuple((1, kv_len) for kv_len in kv_lens)


_SIZES: tuple[AttentionCase, ...] = (
    AttentionCase(
        name="decode_d64_kv2_g4_b16_f32",
        q_heads=8,
        kv_heads=2,
        head_dim=64,
        block_size=16,
        blocks_per_seq=24,
        tokens=8,
        seqs=8,
        max_q_len=1,
        batches={
            "around_a_block": _decode(1, 2, 15, 16, 17, 31, 32, 33),
            "around_a_tile": _decode(127, 128, 129, 255, 256, 257, 383, 384),
            "empty_first_middle_last": ((1, 0), (1, 5), (0, 0), (1, 0), (1, 384), (1, 1), (0, 7), (1, 0)),
            "all_empty": _decode(0, 0, 0, 0, 0, 0, 0, 0),
            "fewer_sequences_than_rows": _decode(300),
        },
    ),
    AttentionCase(
        name="mixed_d32_kv2_g3_b8_f32",
        q_heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=8,
        blocks_per_seq=33,
        tokens=64,
        seqs=8,
        max_q_len=64,
        batches={
            "decode_and_chunks": ((1, 200), (17, 17), (0, 5), (16, 130), (1, 1), (2, 129), (15, 15), (1, 264)),
            "chunk_fills_all_tokens": ((64, 264),),
            "whole_prompts": ((7, 7), (1, 1), (33, 33), (0, 0), (8, 8)),
            "as_many_tiles_as_can_be": ((17, 20), (2, 2), (17, 17), (2, 264), (2, 9), (17, 145), (2, 128), (2, 3)),
            "decode_only": _decode(1, 264, 128, 9, 0, 129, 8, 7),
            "two_chunks_between_empty_rows": ((0, 0), (31, 159), (1, 0), (5, 0), (18, 128), (0, 264)),
            "padding_only": (),
        },
    ),
    AttentionCase(
        name="mixed_d48_kv1_g5_b24_f32_q5",
        q_heads=5,
        kv_heads=1,
        head_dim=48,
        block_size=24,
        blocks_per_seq=6,
        tokens=16,
        seqs=5,
        max_q_len=5,
        batches={
            "around_a_block": ((5, 23), (4, 24), (2, 25), (1, 49), (3, 144)),
            "short_chunks": ((5, 5), (5, 130), (0, 9), (5, 128), (1, 129)),
        },
    ),
    AttentionCase(
        name="decode_d32_kv4_g1_b1_f32",
        q_heads=4,
        kv_heads=4,
        head_dim=32,
        block_size=1,
        blocks_per_seq=140,
        tokens=4,
        seqs=4,
        max_q_len=1,
        batches={"any_length": _decode(1, 2, 140, 129), "one_empty": _decode(128, 0, 127, 77)},
    ),
    AttentionCase(
        name="decode_d128_kv1_g7_b256_f32",
        q_heads=7,
        kv_heads=1,
        head_dim=128,
        block_size=256,
        blocks_per_seq=1,
        tokens=4,
        seqs=3,
        max_q_len=1,
        batches={"a_block_per_sequence": _decode(256, 255, 3)},
    ),
    AttentionCase(
        name="decode_d256_kv1_g8_b32_f16",
        q_heads=8,
        kv_heads=1,
        head_dim=256,
        block_size=32,
        blocks_per_seq=5,
        tokens=4,
        seqs=4,
        max_q_len=1,
        q_dtype="float16",
        kv_dtype="float16",
        batches={"any_length": _decode(1, 160, 33, 128)},
    ),
    AttentionCase(
        name="mixed_d64_kv2_g2_b16_bf16",
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        block_size=16,
        blocks_per_seq=17,
        tokens=48,
        seqs=4,
        max_q_len=48,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        batches={"decode_and_chunks": ((1, 272), (20, 148), (0, 3), (17, 17))},
    ),
    AttentionCase(
        name="decode_d96_kv2_g6_b64_f32_kv_bf16",
        q_heads=12,
        kv_heads=2,
        head_dim=96,
        block_size=64,
        blocks_per_seq=3,
        tokens=4,
        seqs=4,
        max_q_len=1,
        kv_dtype="bfloat16",
        batches={"any_length": _decode(1, 64, 192, 130)},
    ),
)

_MIXED = AttentionCase(
    name="mixed_d32_kv2_g2_b16_f32",
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    block_size=16,
    blocks_per_seq=20,
    tokens=48,
    seqs=6,
    max_q_len=48,
    batches={
        "decode_and_chunks": ((1, 300), (20, 148), (0, 3), (17, 17), (1, 1), (3, 129)),
        "decode_only": _decode(1, 320, 0, 128, 16, 17),
    },
    return_lse=True,
)
_DECODE = dataclasses.replace(
    _MIXED,
    name="decode_d32_kv2_g2_b16_f32",
    tokens=6,
    max_q_len=1,
    batches={"any_length": _decode(1, 320, 0, 129, 16, 17)},
)


def _with(case: AttentionCase, suffix: str, **changes: Any) -> AttentionCase:
    return dataclasses.replace(case, name=f"{case.name}_{suffix}", **changes)


_WINDOWS: Mapping[str, Lengths] = {
    "around_the_window": ((1, 99), (1, 100), (1, 101), (30, 115), (1, 320), (7, 106)),
    "tiles_before_it": ((1, 300), (20, 300), (0, 3), (17, 250), (1, 1), (3, 229)),
}
_OPTIONS: tuple[AttentionCase, ...] = (
    _with(_MIXED, "window_100", window=100, batches=_WINDOWS),
    _with(_MIXED, "window_1", window=1),
    _with(_MIXED, "window_max", window=2**31 - 1),
    _with(_DECODE, "window_16", window=16, batches={"around_a_block": _decode(15, 16, 17, 31, 32, 33)}),
    _with(_MIXED, "cap_2", soft_cap=2.0),
    _with(_MIXED, "sinks", sinks=True),
    _with(_DECODE, "sinks_cap_5_window_60", sinks=True, soft_cap=5.0, window=60),
    _with(_MIXED, "new", reads_new=True),
    _with(_MIXED, "new_window_20", reads_new=True, window=20),
)
_QUANTISED: tuple[AttentionCase, ...] = (
    _with(_DECODE, "e4m3", kv_dtype="float8_e4m3fn"),
    _with(_MIXED, "e4m3_layer_new", kv_dtype="float8_e4m3fn", scales="layer", reads_new=True),
    _with(_DECODE, "e4m3_token", kv_dtype="float8_e4m3fn", scales="token"),
    _with(_MIXED, "e5m2_head", kv_dtype="float8_e5m2", scales="head"),
    _with(_DECODE, "int8_layer", kv_dtype="int8", scales="layer"),
    _with(_MIXED, "int8_token", kv_dtype="int8", scales="token"),
    _with(_DECODE, "int8_head_new", kv_dtype="int8", scales="head", reads_new=True),
    _with(_MIXED, "bf16_head", kv_dtype="bfloat16", scales="head"),
    dataclasses.replace(
        _MIXED,
        name="mixed_d32_kv2_g2_b16_bf16_int8_token_new_window_50_cap_10_sinks",
        q_dtype="bfloat16",
        kv_dtype="int8",
        scales="token",
        reads_new=True,
        window=50,
        soft_cap=10.0,
        sinks=True,
    ),
)
_HEADS: tuple[AttentionCase, ...] = tuple(
    dataclasses.replace(
        _DECODE,
        name=f"decode_d{head_dim}_kv{kv_heads}_g{group}_b16_{dtype}",
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_dtype=dtype,
        kv_dtype=dtype,
        blocks_per_seq=9,
        batches={"any_length": _decode(1, 144, 0, 129, 16, 17)},
    )
    for head_dim, kv_heads, group, dtype in (
        (80, 1, 20, "float32"),
        (192, 3, 1, "bfloat16"),
        (64, 1, 16, "float16"),
        (128, 2, 12, "float32"),
    )
)
# Compiled for devices that are not there: Llama-3-8B's heads at a context of 4,096, 64 sequences that decode or
# 4 of which 2,048 tokens are computed, then other head sizes and options. Keys are read by all devices alike.
_ACCELERATORS: tuple[Platform, ...] = ("gpu", "tpu")
_OFFLINE_DECODE = AttentionCase(
    name="d128_kv8_g4_b16_bf16",
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    block_size=16,
    blocks_per_seq=256,
    tokens=64,
    seqs=64,
    max_q_len=1,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    offline=True,
    platforms=_ACCELERATORS,
)
_OFFLINE_PREFILL = dataclasses.replace(_OFFLINE_DECODE, tokens=2048, seqs=4, max_q_len=2048)


def _offline(case: AttentionCase, options: str = "", **changes: Any) -> AttentionCase:
    """A case of the same context, named after its sizes and `options`."""
    case = dataclasses.replace(case, **changes)
    names = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "int8": "int8"}
    parts = [f"d{case.head_dim}", f"kv{case.kv_heads}", f"g{case.q_heads // case.kv_heads}", f"b{case.block_size}"]
    parts += [names[case.kv_dtype], *([options] if options else [])]
    return dataclasses.replace(case, name="_".join(parts), blocks_per_seq=-(-4096 // case.block_size))


# What every change is held to; the rest takes the compilers many minutes.
_CHECKED = {
    *(("decode", f"d128_kv8_g4_b{block_size}_{kv}") for block_size in (16, 32, 128) for kv in ("bf16", "fp8")),
    ("decode", "d128_kv8_g4_b16_int8_token"),
    ("decode", "d64_kv8_g8_b16_bf16_w128_sinks"),
    ("prefill", "d128_kv8_g4_b16_bf16"),
}
_COMPILED: tuple[AttentionCase, ...] = (
    *(
        _offline(_OFFLINE_DECODE, block_size=block_size, kv_dtype=kv_dtype)
        for block_size in (16, 32, 128)
        for kv_dtype in ("bfloat16", "float8_e4m3fn")
    ),
    _offline(_OFFLINE_DECODE, block_size=8),
    _offline(_OFFLINE_DECODE, block_size=1, platforms=("gpu",)),
    _offline(_OFFLINE_DECODE, block_size=24, platforms=("gpu",)),
    *(_offline(_OFFLINE_DECODE, head_dim=head_dim) for head_dim in (64, 80, 96, 192, 256)),
    *(_offline(_OFFLINE_DECODE, head_dim=head_dim, kv_dtype="float8_e4m3fn") for head_dim in (64, 256)),
    _offline(_OFFLINE_DECODE, "token", kv_dtype="int8", scales="token"),
    _offline(_OFFLINE_DECODE, "head_new", kv_dtype="float8_e4m3fn", scales="head", reads_new=True),
    _offline(_OFFLINE_DECODE, "w128_sinks", q_heads=64, head_dim=64, window=128, sinks=True),
    _offline(_OFFLINE_DECODE, "cap50_lse", q_heads=8, kv_heads=4, head_dim=256, soft_cap=50.0, return_lse=True),
    _offline(_OFFLINE_DECODE, q_heads=28, kv_heads=4),
    *(_offline(_OFFLINE_PREFILL, kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", "float8_e4m3fn")),
    *(_offline(_OFFLINE_PREFILL, head_dim=head_dim) for head_dim in (64, 256)),
    _offline(_OFFLINE_PREFILL, "w128_sinks", q_heads=64, head_dim=64, window=128, sinks=True),
    _offline(_OFFLINE_PREFILL, "head_new", kv_dtype="float8_e4m3fn", scales="head", reads_new=True),
)
_OFFLINE = tuple(dataclasses.replace(case, on_demand=(case.kind, case.name) not in _CHECKED) for case in _COMPILED)
CASES: tuple[AttentionCase, ...] = _SIZES + _OPTIONS + _QUANTISED + _HEADS + _OFFLINE
