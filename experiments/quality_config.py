"""What `fp8_quality` can be asked."""

import dataclasses
import pathlib
from typing import Any, Literal, NamedTuple

from experiments import quality_passkey
from experiments.quality_texts import TextConfig
from experiments.workloads.config import WorkloadConfig
from paxkv.kv_format import scheme
from paxkv.sizes import require_int


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
        """Its name as a part of a run: `:` and `+` of a format's name are no letters of a folder's."""
        return self.name.replace("/", "-").replace(":", "..").replace("+", "_and_")

    @property
    def is_plain(self) -> bool:
        """Whether it is a scheme and nothing else."""
        return self.factor == 1 and self.block_size is None

    def is_continued(self, config: "Config") -> bool:
        """Whether its greedy continuations are compared."""
        return self.is_plain and config.greedy_prompts > 0

    def is_asked(self, config: "Config") -> bool:
        """Whether it is asked for pass keys."""
        return self.is_plain and bool(config.passkey_contexts) and self.scheme in config.passkey_schemes

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
      seed: of the workload's lengths and arrivals, and of pass keys. Other quality has no chance in it.
      model: where the model lies, in any format that `models` reads; `smollm2` for the one that `python -m models
        fetch smollm2` brings.
      model_sha256: expected hash of its config and weights; empty accepts any, and the run fills it in.
      texts: what is read, by name: at least two kinds.
      windows: of each text.
      context: tokens that each window predicts.
      calibration_windows: of each text's other part, of `context` tokens, that static scales are calibrated on.
      chunk_tokens: computed in one call.
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
      greedy_prompts: of each text, continued greedily by the reference and by every scheme; 0 for none.
      greedy_prompt_tokens: of each prompt.
      greedy_tokens: that continue it.
      passkey_contexts: tokens of prompts in which pass keys are hidden; () for none.
      passkey_depths: shares of a prompt's text that stand before each of its keys, ascending.
      passkey_trials: prompts of each context, in turn from one text and the next.
      passkey_schemes: that are asked for the keys, some of `schemes`.
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
    greedy_prompts: int = 3
    greedy_prompt_tokens: int = 192
    greedy_tokens: int = 64
    passkey_contexts: tuple[int, ...] = ()
    passkey_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    passkey_trials: int = 2
    passkey_schemes: tuple[str, ...] = ("bf16", "e4m3_layer", "e5m2_none", "int8_layer", "int4_token_head")
    kv_memory: str = "64 MiB"
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    rows: int = 64
    max_model_len: int = 1024
    token_budget: int = 256
    expected: dict[str, dict[str, tuple[float, float]]] = dataclasses.field(default_factory=dict)
    kernels: str | None = None


def longest(config: Config) -> int:
    """Most tokens of any sequence that is read."""
    greedy = config.greedy_prompt_tokens + config.greedy_tokens if config.greedy_prompts else 0
    return max(config.context, greedy, *config.passkey_contexts)


def cases(config: Config) -> list[Case]:
    """Every scheme as it is, under every outlier, and in every other block size."""
    factors, sizes = config.outlier_factors, config.block_sizes
    return [
        *(Case(name) for name in config.schemes),
        *(Case(name, factor=factor) for factor in factors for name in config.outlier_schemes),
        *(Case(name, block_size=size) for size in sizes for name in config.block_schemes),
    ]


def all_schemes(config: Config) -> list[str]:
    """Every scheme that is read in some way, once."""
    return list(dict.fromkeys((*config.schemes, *config.outlier_schemes, *config.block_schemes)))


def check(config: Config) -> None:
    """Refuses what no model can run.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    for name in (
        "windows", "context", "calibration_windows", "chunk_tokens", "outlier_windows", "block_size",
        "greedy_prompt_tokens", "greedy_tokens", "passkey_trials",
    ):  # fmt: skip
        require_int(name, getattr(config, name))
    require_int("greedy_prompts", config.greedy_prompts, minimum=0)
    for name in (
        "schemes", "outlier_schemes", "block_schemes", "block_sizes", "outlier_factors", "passkey_contexts",
        "passkey_schemes",
    ):  # fmt: skip
        values = getattr(config, name)
        if len(set(values)) < len(values):
            raise ValueError(f"{name}: expected no value twice, got {list(values)}")
    if not config.schemes:
        raise ValueError("schemes: expected at least one, got none")
    for name in all_schemes(config):
        if (first := scheme(name).precise_tokens) >= config.context:
            raise ValueError(
                f"schemes: expected first tokens fewer than context = {config.context}, as all others are what is "
                f"compared, got {first} in {name}"
            )
    if len({text.kind for text in config.texts.values()}) < 2 and "file" not in {t.kind for t in config.texts.values()}:
        raise ValueError(f"texts: expected at least two kinds, as one alone misleads, got {list(config.texts)}")
    for size in (config.block_size, *config.block_sizes):
        if config.context % size:
            raise ValueError(f"block_size, block_sizes: expected divisors of context = {config.context}, got {size}")
    if config.block_size in config.block_sizes:
        raise ValueError(f"block_sizes: expected sizes other than block_size, got {list(config.block_sizes)}")
    if config.outlier_windows > config.windows:
        raise ValueError(f"outlier_windows: expected at most windows = {config.windows}, got {config.outlier_windows}")
    depths, most = config.passkey_depths, len(quality_passkey.NAMES)
    if not 1 <= len(depths) <= most or sorted({d for d in depths if 0 <= d <= 1}) != list(depths):
        raise ValueError(f"passkey_depths: expected 1 to {most} ascending numbers from 0 to 1, got {list(depths)}")
    if config.passkey_contexts and (unknown := set(config.passkey_schemes) - set(config.schemes)):
        raise ValueError(f"passkey_schemes: expected some of schemes, got {', '.join(sorted(unknown))}")
