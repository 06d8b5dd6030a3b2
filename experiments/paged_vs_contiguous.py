"""The same requests, the same budget, the same model, under every way of handing out the KV cache."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import polars as pl

from experiments import metrics, paged_vs_contiguous_figures
from experiments.inputs import Inputs, load_inputs, uncalibrated_format
from experiments.progress import Progress
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.serving import Served, serve
from experiments.token_check import compare_tokens
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.capacity import entry_shape, kv_budget, parse_size
from paxkv.config import MemoryConfig, make_memory
from paxkv.contiguous import VAttention
from paxkv.cost_model import StepCost
from paxkv.engine import Engine
from paxkv.memory import KVMemory
from paxkv.model_shapes import KVShape
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.requests import Requests, make_requests
from paxkv.reserved import Reserved
from paxkv.sizes import require_int

DESCRIPTION = "Paged, vAttention-style and reserved memory on the same requests and budget, with a trained model."
MODELLED = metrics.MODELLED
UNITS = {Paged: "block", VAttention: "page group", Reserved: "smallest range"}
"""What a row of a memory's picture is called; `unit` where it is not said."""
GLOSSARY = metrics.GLOSSARY
"""What each metric means, in a sentence."""
REFERENCE_KERNELS = "xla"
REFERENCE_PART = "reference_kernels"
"""The first memory served once more, by the kernels that others are held against."""
figures = paged_vs_contiguous_figures.figures


@dataclasses.dataclass(frozen=True)
class Config:
    """One comparison.

    Attributes:
      experiment: `paged_vs_contiguous`.
      seed: of arrivals, lengths, prompts and sampling, a stream each.
      model: folder of the checkpoint.
      model_sha256: expected hash of its config and weights; empty accepts any, and the run fills it in.
      workload: what is asked of the server.
      kv_memory: budget for keys and values, such as "8 MiB", the same for every memory.
      memory_fraction: share of it that may be used, as decimal text.
      rows: most requests that run at once; a batch never exceeds it, however much memory is left.
      max_model_len: most tokens of one sequence, and what `reserved_max` reserves.
      token_budget: most tokens computed in a step.
      temperature: of all requests; 0 samples greedily. Every request draws from a stream of its own.
      near_tie: a first difference between two runs' tokens is accepted where the best two choices lie within this, in
        logits: recomputation after a preemption adds in another order, and so does another kernel.
      steps_per_dispatch: steps between two looks of the host.
      kernels: backend of attention and cache writes; None picks the best for the device, `interpret` runs the kernels
        of GPUs in an interpreter, which is slow. Kernels that are named must give the tokens that `xla` gives.
      kv_format: how keys and values are stored, such as `f32` or `e4m3_token_head`; its scales must need no
        calibration.
      policy: whom the scheduler preempts and admits, and how. Only memories with `swap_space` can swap, the others
        compute again what a preemption took.
      cost: the modelled clock.
      memories: what is compared, by name. The first one is the reference for the tokens, served by `xla` once more if
        `kernels` names others.
    """

    experiment: str = "paged_vs_contiguous"
    seed: int = 0
    model: pathlib.Path = pathlib.Path("models/checkpoints/byte_llama")
    model_sha256: str = ""
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    kv_memory: str = "8 MiB"
    memory_fraction: str = "1"
    rows: int = 48
    max_model_len: int = 1024
    token_budget: int = 128
    temperature: float = 0.0
    near_tie: float = 1e-4
    steps_per_dispatch: int = 16
    kernels: str | None = None
    kv_format: str = "f32"
    policy: Policy = dataclasses.field(default_factory=Policy)
    cost: StepCost = dataclasses.field(default_factory=StepCost)
    memories: dict[str, MemoryConfig] = dataclasses.field(default_factory=dict)


class _Setup(NamedTuple):
    """What a config asks for, made and checked before anything is served."""

    engines: dict[str, Engine]  # by part: of every memory, and perhaps the reference's
    inputs: Inputs
    requests: Requests
    budget_bytes: int

    def budget_slots(self, memory: KVMemory[Any]) -> float:
        """Slots of a memory that the budget pays for; under groups of layers a slot holds a token of one group."""
        return self.budget_bytes / entry_shape(self.inputs.shape, memory.layer_groups).token_bytes


def resolve(config: Config) -> Config:
    """Names trace and model by their hashes, so that the run's identity covers the data; refuses what cannot run.

    Raises:
      ValueError: a value is out of range, the memories do not fit the budget, or the trace or the model is not the one
        that the config names.
      OSError: a file is missing.
    """
    model_hash = _prepare(config).inputs.facts["model_sha256"]
    return dataclasses.replace(config, model_sha256=model_hash, workload=with_sha256(config.workload))


def parts(config: Config) -> list[str]:
    """Each memory is served, and can be resumed, by itself; so is what named kernels are held against."""
    return [*config.memories, *([REFERENCE_PART] if _names_kernels(config) else [])]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Serves the workload with each memory in turn, then compares what they did."""
    setup = _prepare(config)
    inputs = setup.inputs
    run_dir.add_manifest(**inputs.facts, kv_budget_bytes=setup.budget_bytes)
    for name, engine in setup.engines.items():
        if run_dir.finished_part(name) is None:
            with progress.task(name, total=inputs.workload.num_requests) as advance:
                served = serve(
                    engine,
                    inputs.params,
                    setup.requests,
                    inputs.workload,
                    inputs.shape,
                    config.steps_per_dispatch,
                    advance,
                )
            with run_dir.part(name) as part:
                _write(part, served, engine.memory, setup.budget_slots(engine.memory))
    for table in ("steps", "requests", "pool"):
        run_dir.write_parquet(f"{table}.parquet", _gather(run_dir, list(config.memories), table))
    return _results(config, run_dir, setup)


def _prepare(config: Config) -> _Setup:
    if not config.memories:
        raise ValueError("memories: expected at least one, as in `memories: {paged: {kind: paged}}`, got none")
    if REFERENCE_PART in config.memories:
        raise ValueError(f"memories.{REFERENCE_PART}: expected another name, as a part of the run has this one")
    if not 0 <= config.near_tie < float("inf"):
        raise ValueError(f"near_tie: expected a finite difference of logits, 0 or more, got {config.near_tie}")
    require_int("steps_per_dispatch", config.steps_per_dispatch)
    budget_bytes = kv_budget(parse_size(config.kv_memory, "kv_memory"), config.memory_fraction)
    fmt = uncalibrated_format(config.kv_format)
    inputs = load_inputs(config.model, config.model_sha256, config.workload, config.max_model_len, config.seed, fmt)
    memories = {name: _make_memory(name, config, inputs, budget_bytes) for name in config.memories}
    _check_swapping(config.policy, memories)
    engines = {
        name: Engine(
            memory,
            inputs.decode,
            config.token_budget,
            config.cost,
            config.kernels,
            config.policy if memory.host_blocks else dataclasses.replace(config.policy, preemption="recompute"),
            kv_format=fmt,
        )
        for name, memory in memories.items()
    }
    if _names_kernels(config):
        engines[REFERENCE_PART] = dataclasses.replace(next(iter(engines.values())), backend=REFERENCE_KERNELS)
    return _Setup(
        engines=engines,
        inputs=inputs,
        requests=make_requests(
            inputs.prompts,
            inputs.workload.prompt_len,
            inputs.workload.output_len,
            inputs.workload.arrival_ms,
            seed=config.seed,
            temperature=config.temperature,
        ),
        budget_bytes=budget_bytes,
    )


def _names_kernels(config: Config) -> bool:
    """Whether the tokens are those of kernels that the config names, and so are held against the reference's."""
    return config.kernels not in (None, REFERENCE_KERNELS)


def _check_swapping(policy: Policy, memories: dict[str, KVMemory[Any]]) -> None:
    """Refuses host memory that nobody would use, and a policy that nobody could follow."""
    able = [name for name, memory in memories.items() if memory.host_blocks]
    if policy.preemption == "swap" and not able:
        raise ValueError(
            "policy.preemption: 'swap' needs a memory with `swap_space` for at least one block, got none; give a paged "
            "one some, or recompute"
        )
    if policy.preemption != "swap" and able:
        raise ValueError(
            f"memories.{able[0]}.swap_space: expected '0 GiB', as policy.preemption is {policy.preemption!r}; leave it "
            "out, or set policy.preemption: swap"
        )


def _make_memory(name: str, config: Config, inputs: Inputs, budget_bytes: int) -> KVMemory[Any]:
    shape = inputs.shape
    try:
        memory = make_memory(
            config.memories[name],
            shape,
            budget_bytes,
            config.rows,
            config.max_model_len,
            kv_format=uncalibrated_format(config.kv_format).name,
            windows=inputs.decode.config.windows,
            max_chunk=config.token_budget,
        )
    except ValueError as error:
        raise ValueError(f"memories.{name}: {error}") from error
    capacity_bytes = _capacity_bytes(memory, shape)
    if capacity_bytes > budget_bytes:
        raise ValueError(
            f"memories.{name}: expected room for at most {budget_bytes // shape.token_bytes} tokens, which is what "
            f"kv_memory pays for under every memory, got {capacity_bytes // shape.token_bytes}; lower num_blocks, or "
            "raise kv_memory"
        )
    return memory


def _capacity_bytes(memory: KVMemory[Any], shape: KVShape) -> int:
    return memory.capacity * entry_shape(shape, memory.layer_groups).token_bytes


def _write(part: Any, served: Served, memory: KVMemory[Any], budget_slots: float) -> None:
    part.write_parquet("steps.parquet", served.steps)
    part.write_parquet("requests.parquet", served.requests)
    part.write_parquet("pool.parquet", served.pool)
    part.write_json(
        "memory.json",
        {
            "budget_tokens": budget_slots,
            "capacity_tokens": memory.capacity,
            "units": memory.num_units,
            "unit": UNITS.get(type(memory), "unit"),
            "slots": memory.num_slots,
            "wall_compile_s": served.wall_compile_s,
        },
    )


def _gather(run_dir: RunDirectory, names: list[str], table: str) -> pl.DataFrame:
    """The parts' tables below one another, with a column that names the memory."""
    frames = [run_dir.require_part(name).read_parquet(f"{table}.parquet") for name in names]
    return pl.concat(f.select(pl.lit(n).alias("memory"), pl.all()) for n, f in zip(names, frames, strict=True))


def _results(config: Config, run_dir: RunDirectory, setup: _Setup) -> dict[str, dict[str, Any]]:
    requests = run_dir.read_parquet("requests.parquet")
    steps = run_dir.read_parquet("steps.parquet")
    reference_name, reference = _reference(config, run_dir, requests)
    served_by_all = metrics.served_by_all(requests)
    found: dict[str, dict[str, Any]] = {}
    for name in config.memories:
        memory = setup.engines[name].memory
        own = requests.filter(pl.col("memory") == name)
        # What one of the two refused, or what asks for no tokens, has none to compare.
        refused = reference["reason"].str.starts_with("refused") | own["reason"].str.starts_with("refused")
        both = ~refused & (own["output_len"] > 0)
        same = compare_tokens(reference.filter(both), own.filter(both), config.near_tie)
        compared = int(both.sum())
        found[name] = {
            **metrics.memory_metrics(steps.filter(pl.col("memory") == name), setup.budget_slots(memory)),
            **metrics.request_metrics(own, served_by_all.filter(pl.col("memory") == name)),
            "tokens_reference": reference_name,
            "tokens_compared": compared,
            "tokens_equal": same.unexplained == 0 if compared else None,
            "near_tie_differences": same.near_ties,
            "unexplained_differences": same.unexplained,
            "budget_tokens": setup.budget_bytes / setup.inputs.shape.token_bytes,
            "capacity_tokens": _capacity_bytes(memory, setup.inputs.shape) // setup.inputs.shape.token_bytes,
        }
    return found


def _reference(config: Config, run_dir: RunDirectory, requests: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """What served the requests whose tokens are right, and these."""
    first = next(iter(config.memories))
    if _names_kernels(config):
        frame = run_dir.require_part(REFERENCE_PART).read_parquet("requests.parquet")
        return f"{first} with kernels: {REFERENCE_KERNELS}", frame
    return first, requests.filter(pl.col("memory") == first)


def failed_checks(results: dict[str, dict[str, Any]]) -> list[str]:
    """What every run must show, whatever the workload."""
    failures = [
        f"{name}: {values['unexplained_differences']} requests got other tokens than from {values['tokens_reference']}"
        for name, values in results.items()
        if values["tokens_equal"] is False
    ]
    shares = ("pool_utilization", "reservation_waste", "internal_waste", "external_waste", "remainder_waste")
    for name, values in results.items():
        total = sum(values[share] for share in shares)
        if abs(total - 1) > 1e-9 or min(values[share] for share in shares) < 0:
            failures.append(f"{name}: the shares of the budget add up to {total} instead of 1, or one is negative")
    return failures


_ROWS = {
    "capacity_tokens": ("capacity in tokens", "{:,.0f}"),
    "served": ("requests served", "{:,.0f}"),
    "peak_running": ("peak running requests", "{:.0f}"),
    "queueing_share": ("time with requests queueing", "{:.1%}"),
    "mean_running": ("mean running requests", "{:.1f}"),
    "pool_utilization": ("budget that holds tokens", "{:.1%}"),
    "reservation_waste": ("wasted: reservation", "{:.1%}"),
    "internal_waste": ("wasted: internal", "{:.1%}"),
    "external_waste": ("wasted: external", "{:.1%}"),
    "remainder_waste": ("wasted: remainder", "{:.1%}"),
    "allocated_utilization": ("allocated that holds tokens", "{:.1%}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "swapped_out_blocks": ("blocks swapped out", "{:,.0f}"),
    "swapped_in_blocks": ("blocks swapped in", "{:,.0f}"),
    "hit_tokens": ("tokens found stored", "{:,.0f}"),
    "blocks_saved_share": ("saved by sharing", "{:.1%}"),
    "map_calls": ("map calls", "{:,.0f}"),
    "steps": ("steps", "{:,.0f}"),
    "ttft_ms_p50": ("TTFT p50, ms (modelled)", "{:,.0f}"),
    "tpot_ms_p50": ("TPOT p50, ms (modelled)", "{:.2f}"),
    "normalized_latency_ms": ("ms per token (modelled)", "{:.1f}"),
    "output_tokens_per_s": ("tokens per s (modelled)", "{:,.0f}"),
    "tokens_compared": ("requests with tokens compared", "{:,.0f}"),
    "tokens_equal": ("same tokens", "{}"),
}
_IF_ANY = ("swapped_out_blocks", "swapped_in_blocks", "hit_tokens", "blocks_saved_share")
"""Rows for what only some memories and policies do."""


def tables(results: Results) -> list[Table]:
    """The figures that tell the memories apart, a column for each."""
    shown = {m: row for m, row in _ROWS.items() if m not in _IF_ANY or any(values[m] for values in results.values())}
    title = "; ".join(["The same requests and KV budget under each memory", *_notes(results)])
    return [columns(results, shown, title)]


def _notes(results: Results) -> list[str]:
    """What is compared otherwise than a reader would think."""
    notes: list[str] = []
    first, of_first = next(iter(results.items()))
    if of_first["tokens_reference"] != first:
        notes.append("tokens are compared with those of {tokens_reference}".format(**of_first))
    if of_first["compared_requests"] != of_first["requests"]:
        notes.append(
            "latencies are of the {compared_requests} of {requests} that every memory served".format(**of_first)
        )
    if never := [name for name, values in results.items() if values["steps"] and not values["queueing_share"]]:
        notes.append(f"nobody ever queued under {', '.join(never)}: averages there are over all busy time")
    return notes
