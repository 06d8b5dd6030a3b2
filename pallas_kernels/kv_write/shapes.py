"""Named cases of writing keys and values, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """Static sizes of a call: `tokens` new keys and values into a pool of `slots`."""

    name: str
    slots: int
    tokens: int
    kv_heads: int
    head_dim: int
    pool_dtype: str
    new_dtype: str


CASES: tuple[WriteCase, ...] = tuple(
    WriteCase(f"d32_kv2_{pool}_from_{new}", 96, 24, 2, 32, pool, new)
    for pool, new in (
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float16", "float16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    )
)
