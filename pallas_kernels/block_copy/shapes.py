"""Named cases of copying blocks, shared by tests, benchmarks and compile checks."""

import dataclasses

from pallas_kernels.paged_attention.shapes import Platform


@dataclasses.dataclass(frozen=True)
class CopyCase:
    """Static sizes of a call: `pairs` places in a list over a pool of `num_blocks`, each slot holding one `item`.

    Attributes:
      name: unique among the cases.
      num_blocks: of the pool.
      block_size: slots per block.
      pairs: places in the list.
      item: shape of what a slot holds.
      dtype: its dtype.
      offline: whether the case is compiled for devices that are not there.
      on_demand: whether that is done only when asked for.
      platforms: where the case can run.
    """

    name: str
    num_blocks: int
    block_size: int
    pairs: int
    item: tuple[int, ...]
    dtype: str
    offline: bool = False
    on_demand: bool = False
    platforms: tuple[Platform, ...] = ("cpu", "gpu", "tpu")


CASES: tuple[CopyCase, ...] = (
    *(
        CopyCase(f"block16_d32_kv2_{dtype}", 24, 16, 12, (2, 32), dtype)
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    ),
    CopyCase("block1_d8_kv1_bfloat16", 40, 1, 16, (1, 8), "bfloat16"),
    CopyCase("block3_d5_kv3_float32", 17, 3, 8, (3, 5), "float32"),
    CopyCase("block7_d5_kv3_float8_e4m3fn", 13, 7, 8, (3, 5), "float8_e4m3fn"),
    CopyCase("block16_d40_kv4_float32", 10, 16, 8, (4, 40), "float32"),  # more than one program of a GPU moves
    CopyCase("scale_of_each_slot_and_head", 24, 16, 12, (2,), "float32"),
    CopyCase("scale_of_each_block", 24, 1, 12, (), "bfloat16"),
    *(
        CopyCase(
            f"d128_kv8_b16_{name}",
            64 * 256,
            16,
            64,
            (8, 128),
            dtype,
            offline=True,
            on_demand=name != "bf16",
            platforms=("gpu", "tpu"),
        )
        for name, dtype in (("bf16", "bfloat16"), ("fp8", "float8_e4m3fn"))
    ),
)
