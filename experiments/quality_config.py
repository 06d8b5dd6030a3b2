"""What `fp8_quality` can be asked."""

import dataclasses
import pathlib
from typing import Any, Literal, NamedTuple

from experiments.quality_texts import TextConfig
from experiments.workloads.config import WorkloadConfig


class Case(NamedTuple):
    """A scheme, perhaps under an outlier or in blocks of another size."""

    scheme: str
    factor: int = 1  # of the outlier
    block_size: int | None = None  # None: as the config has it

    @property
    def name(self) -> str:
        """Its name in results."""
        if self.block_size is not None:
            return f"block_{self.block_size}/{self.scheme}"
        return self.scheme if self.factor == 1 else f"lambda_{self.factor}/{self.scheme}"

    @property
    def part(self) -> str:
        """Its name as a part of a run."""
        return self.name.replace("/", "-")

    @property
    def labels(self) -> dict[str, Any]:
        """What it is, for a table."""
        return {"scheme": self.scheme, "factor": self.factor, "block_size": self.block_size}


def _texts() -> dict[str, TextConfig]:
    return {"prose": TextConfig("prose"), "code": TextConfig("code")}


@dataclasses.dataclass(frozen=True)
class Config:
    """One model, read with its keys and values stored in many ways.

    Attributes:
      experiment: `fp8_quality`.
      seed: of the workload's lengths and arrivals. Quality has no chance in it.
      model: where the model lies, in any format that `models` reads; `smollm2` for the one that `python -m models
        fetch smollm2` brings.
      model_sha256: expected hash of its config and weights; empty accepts any, and the run fills it in.
      texts: what is read, by name: at least two kinds.
      windows: of each text.
      context: tokens that each window predicts.
      calibration_windows: of each text's other part, of `context` tokens, that static scales are calibrated on.
      chunk_tokens: computed in one call; must divide `context`.
      reference: scheme of the cache that all are compared with: `f32` or `bf16`.
      schemes: what is compared, such as `e4m3_layer` or `int8_token_head_k`, which quantises keys alone.
      block_size: tokens in a block.
      block_sizes: others, in which scales of blocks are other scales and no other scale is.
      block_schemes: compared in each of those; one without scales of blocks must give the same logits, bit for bit.
      outlier_factors: powers of two by which one RoPE pair of the keys' weights is multiplied, and that of the queries'
        divided: the model stays the same, its keys get an outlier.
      outlier_pair: which pair.
      outlier_schemes: compared under each factor.
      outlier_windows: of each text, read for it.
      kv_memory: budget for keys and values, in which blocks of all schemes are counted.
      workload: requests that are served in those blocks, by the scheduler alone.
      rows: most sequences that run at once there.
      max_model_len: most tokens of one sequence there.
      token_budget: most tokens computed in a step there.
      expected: by result and metric, the least and the most that it may be.
      kernels: backend of the attention kernels; None picks the best for the device.
    """

    experiment: Literal["fp8_quality"] = "fp8_quality"
    seed: int = 0
    model: pathlib.Path = pathlib.Path("models/checkpoints/byte_llama")
    model_sha256: str = ""
    texts: dict[str, TextConfig] = dataclasses.field(default_factory=_texts)
    windows: int = 3
    context: int = 1024
    calibration_windows: int = 4
    chunk_tokens: int = 256
    reference: Literal["f32", "bf16"] = "f32"
    schemes: tuple[str, ...] = (
        "bf16",
        "e4m3_none",
        "e4m3_layer",
        "e4m3_head",
        "e4m3_block_head",
        "e4m3_token_head",
        "e5m2_none",
        "int8_layer",
        "int8_head",
        "int8_token_head",
        "int4_token_head",
        "e4m3_layer_k",
        "e4m3_layer_v",
    )
    block_size: int = 16
    block_sizes: tuple[int, ...] = ()
    block_schemes: tuple[str, ...] = ("e4m3_layer", "e4m3_block_head", "int8_token_head")
    outlier_factors: tuple[int, ...] = ()
    outlier_pair: int = 0
    outlier_schemes: tuple[str, ...] = ("f32", "e4m3_layer", "int8_layer", "int8_token_head")
    outlier_windows: int = 1
    kv_memory: str = "64 MiB"
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    rows: int = 64
    max_model_len: int = 1024
    token_budget: int = 256
    expected: dict[str, dict[str, tuple[float, float]]] = dataclasses.field(default_factory=dict)
    kernels: str | None = None


def cases(config: Config) -> list[Case]:
    """Every scheme as it is, under every outlier, and in every other block size."""
    factors, sizes = config.outlier_factors, config.block_sizes
    return [
        *(Case(name) for name in config.schemes),
        *(Case(name, factor=factor) for factor in factors for name in config.outlier_schemes),
        *(Case(name, block_size=size) for size in sizes for name in config.block_schemes),
    ]
