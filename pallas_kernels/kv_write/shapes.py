"""Named cases of writing keys and values, shared by tests, benchmarks and compile checks."""

import dataclasses

from pallas_kernels.paged_attention.shapes import Platform, Scales


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """Static sizes of a call: `tokens` new keys and values into a pool of `slots`.

    Attributes:
      name: unique among the cases.
      slots: of the pool.
      tokens: rows of new keys and values.
      kv_heads: key and value heads.
      head_dim: elements per head.
      pool_dtype: dtype of the pool.
      new_dtype: dtype of the new rows.
      scales: what one scale is for; those of a token and head are written, others given.
      offline: whether the case is compiled for devices that are not there.
      on_demand: whether that is done only when asked for.
      platforms: where the case can run.
    """

    name: str
    slots: int
    tokens: int
    kv_heads: int
    head_dim: int
    pool_dtype: str
    new_dtype: str
    scales: Scales = "none"
    offline: bool = False
    on_demand: bool = False
    platforms: tuple[Platform, ...] = ("cpu", "gpu", "tpu")


_PLAIN: tuple[WriteCase, ...] = tuple(
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
        ("int8", "int8"),
    )
)
_BY_SCALES: tuple[tuple[str, str, Scales], ...] = (
    ("float8_e4m3fn", "float32", "layer"),
    ("float8_e4m3fn", "bfloat16", "head"),
    ("float8_e4m3fn", "float32", "token"),
    ("float8_e5m2", "float32", "layer"),
    ("float8_e5m2", "float16", "token"),
    ("int8", "float32", "head"),
    ("int8", "bfloat16", "token"),
    ("bfloat16", "float32", "head"),
)
_QUANTISED: tuple[WriteCase, ...] = tuple(
    WriteCase(f"d32_kv2_{pool}_from_{new}_by_{scales}", 96, 24, 2, 32, pool, new, scales)
    for pool, new, scales in _BY_SCALES
)
_SERVED: tuple[tuple[str, str, Scales], ...] = (
    ("bf16", "bfloat16", "none"),
    ("fp8", "float8_e4m3fn", "head"),
    ("int8_token", "int8", "token"),
)
_OFFLINE: tuple[WriteCase, ...] = tuple(
    WriteCase(
        f"d128_kv8_t64_{suffix}",
        64 * 4096,
        64,
        8,
        128,
        pool,
        "bfloat16",
        scales,
        offline=True,
        on_demand=suffix != "int8_token",
        platforms=("gpu", "tpu"),
    )
    for suffix, pool, scales in _SERVED
)
CASES: tuple[WriteCase, ...] = _PLAIN + _QUANTISED + _OFFLINE
