"""Named cases of attention over stored keys, shared by tests and benchmarks.

A case is what a program is compiled for; its batches are lengths that the compiled program is run on.
"""

import dataclasses
from collections.abc import Mapping

# Per sequence of a batch: queries of this call, and positions stored, the queries' own included.
Lengths = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Static sizes of a call, and batches of lengths to run it on.

    Attributes:
      name: unique among the cases.
      q_heads: query heads, a multiple of kv_heads.
      kv_heads: key and value heads.
      head_dim: elements per head.
      block_size: slots per block.
      blocks_per_seq: width of the block table; a contiguous range has as many slots.
      tokens: query rows, padding included.
      seqs: rows of the table; a batch may name fewer, the rest are empty.
      max_q_len: most queries of one sequence.
      q_dtype: dtype of queries and output.
      kv_dtype: dtype of keys and values.
      batches: lengths by name.
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
    batches: Mapping[str, Lengths] = dataclasses.field(hash=False)
    q_dtype: str = "float32"
    kv_dtype: str = "float32"


def _decode(*kv_lens: int) -> Lengths:
    return tuple((1, kv_len) for kv_len in kv_lens)


CASES: tuple[AttentionCase, ...] = (
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
