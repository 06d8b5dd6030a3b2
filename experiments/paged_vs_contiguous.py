"""The same requests, the same budget, the same model, under every way of handing out the KV cache."""

import dataclasses
import hashlib
import pathlib
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from experiments import metrics, paged_vs_contiguous_figures
from experiments.progress import Progress
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.serving import Served, serve
from experiments.token_check import compare_tokens
from experiments.workloads.config import WorkloadConfig, load_workload, with_sha256
from experiments.workloads.tokens import prompt_tokens
from experiments.workloads.workload import Workload
from models.checkpoint import load_checkpoint, load_record, model_sha256
from models.decoder import Decoder, make_decode
from models.text import load_corpus
from paxkv.capacity import kv_budget, parse_size
from paxkv.config import MemoryConfig, make_memory
from paxkv.contiguous import VAttention
from paxkv.cost_model import StepCost
from paxkv.engine import Engine
from paxkv.memory import KVMemory
from paxkv.model_shapes import KVShape
from paxkv.paged import Paged
from paxkv.requests import Requests, make_requests
from paxkv.reserved import Reserved
from paxkv.sizes import require_int

DESCRIPTION = "Paged, vAttention-style and reserved memory on the same requests and budget, with a trained model."
MODELLED = metrics.MODELLED
UNITS = {Paged: "block", VAttention: "page group", Reserved: "smallest range"}
"""What a row of a memory's picture is called; `unit` where it is not said."""
GLOSSARY = metrics.GLOSSARY
"""What each metric means, in a sentence."""
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
      temperature: 0 samples greedily, which is what makes memories comparable token by token.
      near_tie: a first difference between two memories' greedy tokens is accepted where the best two logits lie
        within this: recomputation after a preemption adds in another order.
      steps_per_dispatch: steps between two looks of the host.
      kernels: backend of the attention kernels; None picks the best for the device.
      cost: the modelled clock.
      memories: what is compared, by name. The first one is the reference for the tokens.
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
    cost: StepCost = dataclasses.field(default_factory=StepCost)
    memories: dict[str, MemoryConfig] = dataclasses.field(default_factory=dict)


class _Setup(NamedTuple):
    """What a config asks for, made and checked before anything is served."""

    engines: dict[str, Engine]  # by memory
    params: Any
    workload: Workload
    requests: Requests
    shape: KVShape
    budget_tokens: float
    inputs: dict[str, Any]  # for the manifest


def resolve(config: Config) -> Config:
    """Names trace and model by their hashes, so that the run's identity covers the data; refuses what cannot run.

    Raises:
      ValueError: a value is out of range, the memories do not fit the budget, or the trace or the model is not the one
        that the config names.
      OSError: a file is missing.
    """
    model_hash = _prepare(config).inputs["model_sha256"]
    return dataclasses.replace(config, model_sha256=model_hash, workload=with_sha256(config.workload))


def parts(config: Config) -> list[str]:
    """Each memory is served, and can be resumed, by itself."""
    return list(config.memories)


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Serves the workload with each memory in turn, then compares what they did."""
    setup = _prepare(config)
    run_dir.add_manifest(**setup.inputs)
    workload = setup.workload
    for name, engine in setup.engines.items():
        if run_dir.finished_part(name) is None:
            with progress.task(name, total=workload.num_requests) as advance:
                shown = 0

                def show(ended: int) -> None:
                    nonlocal shown
                    advance(ended - shown)
                    shown = ended

                served = serve(
                    engine, setup.params, setup.requests, workload, setup.shape, config.steps_per_dispatch, show
                )
            with run_dir.part(name) as part:
                _write(part, served, engine.memory, setup.budget_tokens)
    for table in ("steps", "requests", "pool"):
        run_dir.write_parquet(f"{table}.parquet", _gather(run_dir, list(setup.engines), table))
    return _results(config, run_dir, setup)


def _prepare(config: Config) -> _Setup:
    if not config.memories:
        raise ValueError("memories: expected at least one, as in `memories: {paged: {kind: paged}}`, got none")
    if not 0 <= config.near_tie < float("inf"):
        raise ValueError(f"near_tie: expected a finite difference of logits, 0 or more, got {config.near_tie}")
    require_int("steps_per_dispatch", config.steps_per_dispatch)
    budget_bytes = kv_budget(parse_size(config.kv_memory, "kv_memory"), config.memory_fraction)
    model = _load_model(config)
    shape = KVShape(model.config.layers, model.config.kv_heads, model.config.head_dim, element_bytes=4)
    decode, params = make_decode(model)
    workload = load_workload(config.workload, config.max_model_len, config.seed)
    corpus = load_corpus()
    prompts = prompt_tokens(workload, config.seed, corpus.heldout.tobytes())
    return _Setup(
        engines={
            name: Engine(
                _make_memory(name, config, shape, budget_bytes),
                decode,
                config.token_budget,
                config.cost,
                config.kernels,
            )
            for name in config.memories
        },
        params=params,
        workload=workload,
        requests=make_requests(
            prompts,
            workload.prompt_len,
            workload.output_len,
            workload.arrival_ms,
            seed=config.seed,
            temperature=config.temperature,
        ),
        shape=shape,
        budget_tokens=budget_bytes / shape.token_bytes,
        inputs={
            "workload": dataclasses.asdict(workload.provenance),
            "prompt_text_sha256": corpus.sha256,
            "prompts_sha256": hashlib.sha256(np.ascontiguousarray(prompts).tobytes()).hexdigest(),
            "model_sha256": model_sha256(model),
            "model": load_record(config.model),
            "kv_budget_bytes": budget_bytes,
            "kv_bytes_per_token": shape.token_bytes,
        },
    )


def _load_model(config: Config) -> Decoder:
    model = load_checkpoint(config.model)
    digest = model_sha256(model)
    if config.model_sha256 not in ("", digest):
        raise ValueError(
            f"model_sha256: expected the model {config.model_sha256}, got {digest} in {config.model}; restore the "
            "checkpoint, or leave model_sha256 out"
        )
    if config.max_model_len > model.config.max_len:
        raise ValueError(
            f"max_model_len: expected at most {model.config.max_len}, the context that {config.model} was trained for, "
            f"got {config.max_model_len}; scale the workload's lengths down instead"
        )
    return model


def _make_memory(name: str, config: Config, shape: KVShape, budget_bytes: int) -> KVMemory[Any]:
    try:
        memory = make_memory(config.memories[name], shape, budget_bytes, config.rows, config.max_model_len)
    except ValueError as error:
        raise ValueError(f"memories.{name}: {error}") from error
    if memory.capacity * shape.token_bytes > budget_bytes:
        raise ValueError(
            f"memories.{name}: expected room for at most {budget_bytes // shape.token_bytes} tokens, which is what "
            f"kv_memory pays for under every memory, got {memory.capacity}; lower num_blocks, or raise kv_memory"
        )
    return memory


def _write(part: Any, served: Served, memory: KVMemory[Any], budget_tokens: float) -> None:
    part.write_parquet("steps.parquet", served.steps)
    part.write_parquet("requests.parquet", served.requests)
    part.write_parquet("pool.parquet", served.pool)
    part.write_json(
        "memory.json",
        {
            "budget_tokens": budget_tokens,
            "capacity_tokens": memory.capacity,
            "units": memory.num_units,
            "unit": UNITS.get(type(memory), "unit"),
            "slots": memory.num_slots,
            "wall_compile_s": served.wall_compile_s,
        },
    )


def _gather(run_dir: RunDirectory, names: list[str], table: str) -> pl.DataFrame:
    """The parts' tables below one another, with a column that names the memory."""
    frames = [_part(run_dir, name).read_parquet(f"{table}.parquet") for name in names]
    return pl.concat(f.select(pl.lit(n).alias("memory"), pl.all()) for n, f in zip(names, frames, strict=True))


def _part(run_dir: RunDirectory, name: str) -> Any:
    part = run_dir.finished_part(name)
    if part is None:
        raise RuntimeError(f"part {name!r} of {run_dir.path} is missing")
    return part


def _results(config: Config, run_dir: RunDirectory, setup: _Setup) -> dict[str, dict[str, Any]]:
    requests = run_dir.read_parquet("requests.parquet")
    steps = run_dir.read_parquet("steps.parquet")
    reference = requests.filter(pl.col("memory") == next(iter(setup.engines)))
    served_by_all = metrics.served_by_all(requests)
    found: dict[str, dict[str, Any]] = {}
    for name, engine in setup.engines.items():
        own = requests.filter(pl.col("memory") == name)
        # What one of the two refused, or what asks for no tokens, has none to compare.
        refused = reference["reason"].str.starts_with("refused") | own["reason"].str.starts_with("refused")
        both = ~refused & (own["output_len"] > 0)
        same = compare_tokens(reference.filter(both), own.filter(both), config.near_tie)
        compared = int(both.sum()) if config.temperature == 0 else 0
        found[name] = {
            **metrics.memory_metrics(steps.filter(pl.col("memory") == name), setup.budget_tokens),
            **metrics.request_metrics(own, served_by_all.filter(pl.col("memory") == name)),
            "tokens_compared": compared,
            "tokens_equal": same.unexplained == 0 if compared else None,
            "near_tie_differences": same.near_ties,
            "unexplained_differences": same.unexplained,
            "budget_tokens": setup.budget_tokens,
            "capacity_tokens": engine.memory.capacity,
        }
    return found


def failed_checks(results: dict[str, dict[str, Any]]) -> list[str]:
    """What every run must show, whatever the workload."""
    failures = [
        f"{name}: {values['unexplained_differences']} requests got other greedy tokens than under the first memory"
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
    "map_calls": ("map calls", "{:,.0f}"),
    "steps": ("steps", "{:,.0f}"),
    "ttft_ms_p50": ("TTFT p50, ms (modelled)", "{:,.0f}"),
    "tpot_ms_p50": ("TPOT p50, ms (modelled)", "{:.2f}"),
    "normalized_latency_ms": ("ms per token (modelled)", "{:.1f}"),
    "output_tokens_per_s": ("tokens per s (modelled)", "{:,.0f}"),
    "tokens_compared": ("requests with tokens compared", "{:,.0f}"),
    "tokens_equal": ("same greedy tokens", "{}"),
}


def tables(results: Results) -> list[Table]:
    """The figures that tell the memories apart, a column for each."""

    def cell(value: Any, form: str) -> str:
        match value:
            case None:
                return "-"
            case bool():
                return "yes" if value else "no"
        return form.format(value)

    rows = [
        [label, *(cell(values.get(metric), form) for values in results.values())]
        for metric, (label, form) in _ROWS.items()
    ]
    return [
        Table(["", *results], rows, "; ".join(["The same requests and KV budget under each memory", *_notes(results)]))
    ]


def _notes(results: Results) -> list[str]:
    """What is compared otherwise than a reader would think."""
    notes: list[str] = []
    of_first = next(iter(results.values()))
    if of_first["compared_requests"] != of_first["requests"]:
        notes.append(
            "latencies are of the {compared_requests} of {requests} that every memory served".format(**of_first)
        )
    if never := [name for name, values in results.items() if values["steps"] and not values["queueing_share"]]:
        notes.append(f"nobody ever queued under {', '.join(never)}: averages there are over all busy time")
    return notes
