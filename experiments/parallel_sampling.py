"""What it saves that samples and beams of one prompt share its blocks: memory, and thereby running sequences."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from experiments import metrics, parallel_sampling_figures
from experiments.inputs import Inputs, load_inputs
from experiments.progress import Progress
from experiments.results import Results
from experiments.run_directory import RunDirectory
from experiments.serving import serve
from experiments.token_check import compare_tokens, scores_without_cache
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.capacity import kv_budget, parse_size
from paxkv.config import MemoryConfig, make_memory
from paxkv.cost_model import StepCost
from paxkv.engine import Engine
from paxkv.memory import KVMemory
from paxkv.policy import Policy
from paxkv.requests import make_requests
from paxkv.sizes import require_int

DESCRIPTION = "Samples and beams of one prompt share its blocks: what that saves, with a trained model."
MODELLED = metrics.MODELLED
GLOSSARY = parallel_sampling_figures.GLOSSARY
"""What each metric means, in a sentence."""
tables = parallel_sampling_figures.tables
figures = parallel_sampling_figures.figures


@dataclasses.dataclass(frozen=True)
class Config:
    """One set of prompts, answered with several sequences each.

    Attributes:
      experiment: `parallel_sampling`.
      seed: of arrivals, lengths, prompts and sampling, a stream each.
      model: folder of the checkpoint.
      model_sha256: expected hash of its config and weights; empty accepts any, and the run fills it in.
      workload: the prompts; each of their sequences gets as many tokens as the request asks for.
      samples: how many samples a prompt gets, one configuration for each number. Served twice: sharing, and as
        requests that have nothing to do with each other.
      beams: widths of a beam search, one configuration for each.
      temperature: of the samples.
      kv_memory: budget for keys and values, such as "4 MiB", the same for all.
      block_size: tokens in a block.
      swap_space: size of the pool on the host, for `policy.preemption: swap`.
      rows: most sequences that run at once.
      max_model_len: most tokens of one sequence.
      token_budget: most tokens computed in a step.
      policy: whom the scheduler preempts and admits, and how.
      near_tie: a first difference between a sample that shares and the same one that does not is accepted where the
        best two choices lie within this, in logits, as the two add in another order; and so may the score of a beam
        differ from that of a model without a cache, per token.
      steps_per_dispatch: steps between two looks of the host.
      kernels: backend of the attention kernels; None picks the best for the device.
      cost: the modelled clock.
    """

    experiment: Literal["parallel_sampling"] = "parallel_sampling"
    seed: int = 0
    model: pathlib.Path = pathlib.Path("models/checkpoints/byte_llama")
    model_sha256: str = ""
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    samples: tuple[int, ...] = (2, 4, 6)
    beams: tuple[int, ...] = (2, 4, 6)
    temperature: float = 1.0
    kv_memory: str = "8 MiB"
    block_size: int = 16
    swap_space: str = "0 GiB"
    rows: int = 48
    max_model_len: int = 512
    token_budget: int = 128
    policy: Policy = dataclasses.field(default_factory=Policy)
    near_tie: float = 1e-4
    steps_per_dispatch: int = 16
    kernels: str | None = None
    cost: StepCost = dataclasses.field(default_factory=StepCost)


class Case(NamedTuple):
    """A configuration: how each prompt is answered, and whether its sequences share."""

    mode: Literal["sampling", "beam"]
    width: int  # sequences of each prompt
    shares: bool

    @property
    def name(self) -> str:
        """Its name in results and files."""
        return f"{self.mode}-{self.width}" + ("" if self.shares else "-unshared")


def cases(config: Config) -> list[Case]:
    """Samples with and without sharing, then beams: a beam search without sharing would copy whole sequences."""
    return [
        *(Case("sampling", width, shares) for width in config.samples for shares in (True, False)),
        *(Case("beam", width, True) for width in config.beams),
    ]


def parts(config: Config) -> list[str]:
    """Each configuration is served, and can be resumed, by itself."""
    return [case.name for case in cases(config)]


def resolve(config: Config) -> Config:
    """Names trace and model by their hashes, so that the run's identity covers the data; refuses what cannot run.

    Raises:
      ValueError: a value is out of range, or the trace or the model is not the one that the config names.
      OSError: a file is missing.
    """
    if not cases(config):
        raise ValueError("samples, beams: expected at least one number of sequences, as in `samples: [2]`, got none")
    for name in ("samples", "beams"):
        widths = getattr(config, name)
        for width in widths:
            require_int(name, width, minimum=2)
            if width > config.rows:
                raise ValueError(
                    f"rows: expected at least {width}, as all {name} of a prompt run together, got {config.rows}"
                )
        if len(set(widths)) < len(widths):
            raise ValueError(f"{name}: expected no number twice, got {list(widths)}")
    if not 0 < config.temperature < float("inf"):
        raise ValueError(
            f"temperature: expected a positive, finite number, as samples without chance are all the same, got "
            f"{config.temperature}"
        )
    if not 0 <= config.near_tie < float("inf"):
        raise ValueError(f"near_tie: expected a finite difference of logits, 0 or more, got {config.near_tie}")
    require_int("steps_per_dispatch", config.steps_per_dispatch)
    inputs = _load(config)
    host_blocks = [_memory(config, inputs, case).host_blocks for case in cases(config)]
    if (config.policy.preemption == "swap") != any(host_blocks):
        raise ValueError(
            "swap_space: expected room for at least one block with policy.preemption: swap, and '0 GiB' otherwise, "
            f"got {config.swap_space!r} with policy.preemption: {config.policy.preemption}"
        )
    for case in cases(config):
        _engine(config, inputs, case)
    workload = with_sha256(config.workload)
    return dataclasses.replace(config, model_sha256=inputs.facts["model_sha256"], workload=workload)


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Answers the prompts in every way in turn, then compares what that took."""
    inputs = _load(config)
    run_dir.add_manifest(**inputs.facts, kv_budget_bytes=_budget(config))
    for case in cases(config):
        if run_dir.finished_part(case.name) is None:
            with progress.task(case.name, total=inputs.workload.num_requests * case.width) as advance:
                _serve(config, inputs, case, run_dir, advance)
    for table in ("steps", "requests"):
        frames = [_labelled(case, run_dir.require_part(case.name).read_parquet(table)) for case in cases(config)]
        run_dir.write_parquet(table, pl.concat(frames, how="diagonal"))
    found = {case.name: _measure(config, inputs, case, run_dir) for case in cases(config)}
    rates = [{"mode": c.mode, "width": c.width, "shares": c.shares} | found[c.name] for c in cases(config)]
    run_dir.write_parquet("cases", pl.DataFrame(rates, infer_schema_length=None))
    return found


def _labelled(case: Case, table: pl.DataFrame) -> pl.DataFrame:
    labels = {"case": case.name, "mode": case.mode, "width": case.width}
    return table.select(*(pl.lit(value).alias(label) for label, value in labels.items()), pl.all())


def _load(config: Config) -> Inputs:
    return load_inputs(config.model, config.model_sha256, config.workload, config.max_model_len, config.seed)


def _budget(config: Config) -> int:
    return kv_budget(parse_size(config.kv_memory, "kv_memory"), "1")


def _memory(config: Config, inputs: Inputs, case: Case) -> KVMemory[Any]:
    return make_memory(
        MemoryConfig("paged", config.block_size, forks=case.shares, swap_space=config.swap_space),
        inputs.shape,
        _budget(config),
        config.rows,
        config.max_model_len,
        windows=inputs.decode.config.windows,
        max_chunk=config.token_budget,
    )


def _engine(config: Config, inputs: Inputs, case: Case) -> Engine:
    return Engine(
        _memory(config, inputs, case),
        inputs.decode,
        config.token_budget,
        config.cost,
        config.kernels,
        config.policy,
    )


def _serve(config: Config, inputs: Inputs, case: Case, run_dir: RunDirectory, advance: Any) -> None:
    workload = inputs.workload
    requests = make_requests(
        inputs.prompts,
        workload.prompt_len,
        workload.output_len,
        workload.arrival_ms,
        seed=config.seed,
        temperature=0.0 if case.mode == "beam" else config.temperature,
        samples=case.width,
        beams=case.mode == "beam",
    )
    engine = _engine(config, inputs, case)
    served = serve(engine, inputs.params, requests, workload, inputs.shape, config.steps_per_dispatch, advance)
    sequences = served.requests
    if case.mode == "beam":
        prompts = np.repeat(inputs.prompts, case.width, axis=0)
        scores = scores_without_cache(inputs.decode, inputs.params, prompts, sequences)
        sequences = sequences.with_columns(score_without_cache=scores)
    with run_dir.part(case.name) as part:
        part.write_parquet("steps", served.steps)
        part.write_parquet("requests", sequences)
        part.write_json("memory", {"capacity_tokens": engine.memory.capacity, "wall_compile_s": served.wall_compile_s})


def _measure(config: Config, inputs: Inputs, case: Case, run_dir: RunDirectory) -> dict[str, Any]:
    part = run_dir.require_part(case.name)
    steps, requests = part.read_parquet("steps"), part.read_parquet("requests")
    block_bytes = inputs.shape.block_bytes(config.block_size)
    found = metrics.memory_metrics(steps) | metrics.request_metrics(requests)
    swapped = found["swapped_out_blocks"] + found["swapped_in_blocks"]
    capacity = part.read_json("memory")["capacity_tokens"]
    return {
        "sequences_per_prompt": case.width,
        **found,
        "swapped_bytes": swapped * block_bytes,
        "copied_blocks": int(steps["copied_blocks"].sum()),
        "miscounted_steps": _miscounted(steps, capacity, case.shares),
        **(_compare_samples(config, requests, run_dir, case) if case.mode == "sampling" and case.shares else {}),
        **(_compare_scores(config, requests, case.width) if case.mode == "beam" else {}),
    }


def _miscounted(steps: pl.DataFrame, capacity: int, shares: bool) -> int:
    """Steps in which the kinds of usage do not add up, or in which something is saved that nobody shares."""
    kinds = [pl.col(kind) for kind in ("tokens", "reserved", "internal", "external")]
    wrong = (pl.sum_horizontal(kinds) != capacity) | (pl.min_horizontal(*kinds, "saved") < 0)
    return steps.filter(wrong if shares else wrong | (pl.col("saved") != 0)).height


def _compare_samples(config: Config, requests: pl.DataFrame, run_dir: RunDirectory, case: Case) -> dict[str, Any]:
    """Samples that share are the same as those that do not."""
    alone = run_dir.require_part(case._replace(shares=False).name).read_parquet("requests")
    same = compare_tokens(alone, requests, config.near_tie)
    return {
        "tokens_equal": same.unexplained == 0,
        "near_tie_differences": same.near_ties,
        "unexplained_differences": same.unexplained,
    }


def _compare_scores(config: Config, requests: pl.DataFrame, width: int) -> dict[str, Any]:
    """Beams have the log probability that the model gives them when it reads them anew."""
    answered = requests.filter(pl.col("generated") > 0)
    error = ((pl.col("score") - pl.col("score_without_cache")).abs() / pl.col("generated")).max()
    best = pl.col("score").max() / pl.col("generated").max()
    worst_error, nats = answered.select(error).item(), answered.group_by(pl.col("request") // width).agg(best)["score"]
    return {
        "score_error": worst_error,
        "scores_equal": None if worst_error is None else worst_error <= config.near_tie,
        "best_score": None if nats.is_empty() else nats.sort().mean(),
    }


def failed_checks(results: Results) -> list[str]:
    """What must hold for any prompts: the same samples, true scores, whole accounts; and more sharing saves more."""
    failures: list[str] = []
    for name, found in results.items():
        if found.get("unexplained_differences"):
            failures.append(f"{name}: {found['unexplained_differences']} samples are not those drawn without sharing")
        if found.get("scores_equal") is False:
            failures.append(
                f"{name}: scores are off by up to {found['score_error']} a token from those without a cache"
            )
        if found["miscounted_steps"]:
            failures.append(f"{name}: the usage of {found['miscounted_steps']} steps does not add up")
        if found["refused_or_empty"]:
            failures.append(
                f"{name}: {found['refused_or_empty']} sequences were not served, so that savings are of other prompts "
                "than elsewhere; raise kv_memory, or ask for shorter answers"
            )
    for less, more in _expected_order(results):
        below, above = (float(results[name]["blocks_saved_share"] or 0) for name in (less, more))
        if below > above:
            failures.append(f"{more}: saves {above:.2%} of the blocks, less than the {below:.2%} of {less}")
    return failures


def _expected_order(results: Results) -> Iterator[tuple[str, str]]:
    """Pairs of which the second should save more: more sequences of the same kind, and beams beside samples.

    Samples part after the prompt for good, while beams have a common past further on, as most of them descend from
    one that was the best a while ago; both share a prompt among more the more there are.
    """
    widths = {
        mode: sorted(int(n.split("-")[1]) for n in results if n.split("-")[0] == mode and not n.endswith("-unshared"))
        for mode in ("sampling", "beam")
    }
    for mode, own in widths.items():
        yield from ((f"{mode}-{fewer}", f"{mode}-{more}") for fewer, more in itertools.pairwise(own))
    yield from ((f"sampling-{width}", f"beam-{width}") for width in widths["sampling"] if width in widths["beam"])
