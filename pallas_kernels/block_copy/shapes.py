"""Named cases of copying blocks, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CopyCase:
    """Static sizes of a call: `pairs` places in a list over a pool of `num_blocks`, each slot holding one `item`."""

    name: str
    num_blocks: int
    block_size: int
    pairs: int
    item: tuple[int, ...]
    dtype: str


CASES: tuple[CopyCase, ...] = (
    *(
        CopyCase(f"block16_d32_kv2_{dtype}", 24, 16, 12, (2, 32), dtype)
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    ),
    CopyCase("block1_d8_kv1_bfloat16", 40, 1, 16, (1, 8), "bfloat16"),
    CopyCase("block3_d5_kv3_float32", 17, 3, 8, (3, 5), "float32"),
    CopyCase("block7_d5_kv3_float8_e4m3fn", 13, 7, 8, (3, 5), "float8_e4m3fn"),
    CopyCase("scale_of_each_slot_and_head", 24, 16, 12, (2,), "float32"),
    CopyCase("scale_of_each_block", 24, 1, 12, (), "bfloat16"),
)
