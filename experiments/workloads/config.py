"""The knobs of a workload, and the one function that turns them into requests."""

import dataclasses
import os
import pathlib
from typing import Literal

import numpy as np

from experiments.workloads.arrivals import gamma_arrivals
from experiments.workloads.fit import TooLong, fit_lengths, scale_lengths
from experiments.workloads.lengths import PRESETS, constant_lengths, exponential_lengths, uniform_lengths
from experiments.workloads.streams import stream
from experiments.workloads.traces import TraceKind, ZeroOutput, read_file, read_trace
from experiments.workloads.workload import Provenance, Workload

TRACE_DIR_VARIABLE = "PAXKV_TRACE_DIR"


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """What requests to serve. No field holds a folder, so a config means the same on every machine.

    Attributes:
        kind: A trace format, or `synthetic` for drawn lengths.
        file: Trace file, relative to the folder that PAXKV_TRACE_DIR names. Traces only.
        sha256: Expected hash of the file's bytes; empty accepts any. `with_sha256` fills it in. Traces only.
        num_requests: The first so many requests of a trace (None: all), or how many to draw.
        zero_output: Rows that ask for no output token: `drop`, `keep` as requests of length 0, or `refuse`.
        lengths: Drawn lengths: `sharegpt` and `alpaca` are `exponential` with those datasets' means. Synthetic only.
        prompt_mean: Mean prompt length in tokens (`constant`: the length). None with a preset or a trace.
        output_mean: Mean output length in tokens (`constant`: the length). None with a preset or a trace.
        max_prompt: Longest prompt of drawn exponential lengths, in tokens.
        max_total: Longest prompt + output of drawn exponential lengths, in tokens.
        rate: Mean requests per second of drawn arrivals (`.inf`: all at 0); None takes the trace's own times.
        burstiness: Shape of the gaps between drawn arrivals: 1 is Poisson, `.inf` constant; a coefficient of variation
            of 2 is 0.25.
        rescale: Stretch drawn arrivals so that the last one is at `num_requests / rate`, as vLLM's benchmark does.
        length_scale: Factor on both lengths (rounded up), to bring a trace into a small model's context.
        time_scale: Factor on the arrival times; 0.5 doubles the load.
        too_long: Requests over `max_model_len`: `drop`, `truncate` (output first, then prompt), or `refuse`.
    """

    kind: Literal["synthetic", "azure", "sharegpt_stats", "mooncake", "burstgpt"] = "synthetic"
    file: str = ""
    sha256: str = ""
    num_requests: int | None = None
    zero_output: ZeroOutput = "refuse"
    lengths: Literal["sharegpt", "alpaca", "exponential", "uniform", "constant"] | None = None
    prompt_mean: float | None = None
    output_mean: float | None = None
    max_prompt: int = 1024
    max_total: int = 2048
    rate: float | None = None
    burstiness: float = 1.0
    rescale: bool = False
    length_scale: float = 1.0
    time_scale: float = 1.0
    too_long: TooLong = "refuse"


def load_workload(
    config: WorkloadConfig, max_model_len: int, seed: int, *, trace_dir: pathlib.Path | None = None
) -> Workload:
    """Reads or draws the requests that a config describes.

    In this order: read (or draw) the first `num_requests`; draw arrivals if `rate` is given; scale times and lengths;
    fit to `max_model_len`. So neither a scale nor the policy changes which rows are read or what is drawn.

    Args:
        config: The knobs.
        max_model_len: Most tokens (prompt + output) of one sequence.
        seed: Seed of the experiment; arrivals and lengths use a stream each.
        trace_dir: Folder of the trace files; None takes the one that PAXKV_TRACE_DIR names.

    Raises:
        ValueError: If the config contradicts itself, or a request is too long and the policy is `refuse`.
        TraceError: If the trace file cannot be taken as it is.
    """
    _check(config)
    workload = _draw(config, seed) if config.kind == "synthetic" else _read(config, config.kind, trace_dir)
    if config.rate is not None:
        rng = stream(seed, "arrivals")
        workload = dataclasses.replace(
            workload,
            arrival_ms=gamma_arrivals(
                rng, workload.num_requests, config.rate, config.burstiness, rescale=config.rescale
            ),
            provenance=dataclasses.replace(
                workload.provenance,
                arrivals=f"gamma gaps, rate {config.rate} requests/s, burstiness {config.burstiness}"
                + (", rescaled to end on time" if config.rescale else ""),
            ),
        )
    workload = dataclasses.replace(
        workload,
        arrival_ms=workload.arrival_ms * config.time_scale,
        provenance=dataclasses.replace(workload.provenance, time_scale=config.time_scale),
    )
    return fit_lengths(scale_lengths(workload, config.length_scale), max_model_len, config.too_long)


def with_sha256(config: WorkloadConfig, *, trace_dir: pathlib.Path | None = None) -> WorkloadConfig:
    """The config with its trace's hash filled in, so that a hash of the config covers the data.

    Raises:
        ValueError: If the config contradicts itself.
        TraceError: If the file cannot be read, or is not the one that `sha256` already names.
    """
    _check(config)
    if config.kind == "synthetic":
        return config
    _, digest = read_file(_path(config, trace_dir), config.sha256 or None, config.file)
    return dataclasses.replace(config, sha256=digest)


def _read(config: WorkloadConfig, kind: TraceKind, trace_dir: pathlib.Path | None) -> Workload:
    return read_trace(
        kind,
        _path(config, trace_dir),
        num_requests=config.num_requests,
        zero_output=config.zero_output,
        sha256=config.sha256 or None,
        file=config.file,
    )


def _path(config: WorkloadConfig, trace_dir: pathlib.Path | None) -> pathlib.Path:
    if trace_dir is None:
        if not os.environ.get(TRACE_DIR_VARIABLE):
            raise ValueError(
                f"{TRACE_DIR_VARIABLE} is not set: it must name the folder that holds the trace file {config.file!r}"
            )
        trace_dir = pathlib.Path(os.environ[TRACE_DIR_VARIABLE])
    if not (trace_dir / config.file).is_file():
        raise ValueError(f"no trace file {config.file!r} in {trace_dir}, the folder that {TRACE_DIR_VARIABLE} names")
    return trace_dir / config.file


def _draw(config: WorkloadConfig, seed: int) -> Workload:
    requests, rng = config.num_requests or 0, stream(seed, "lengths")
    means = PRESETS.get(config.lengths or "", (config.prompt_mean or 0.0, config.output_mean or 0.0))
    if config.lengths == "constant":
        prompt_len, output_len = constant_lengths(requests, *means)
        said = f"constant: prompt {means[0]:g}, output {means[1]:g}"
    elif config.lengths == "uniform":
        prompt_len, output_len = uniform_lengths(rng, requests, *means)
        said = f"uniform on whole numbers from 1: prompt mean {means[0]:g}, output mean {means[1]:g}"
    else:
        prompt_len, output_len = exponential_lengths(rng, requests, *means, config.max_prompt, config.max_total)
        said = (
            f"exponential truncated to prompt <= {config.max_prompt} and prompt + output <= {config.max_total}, "
            f"with means after truncation of {means[0]:g} prompt and {means[1]:g} output tokens"
        )
    return Workload(
        Provenance(source="synthetic", rows_read=requests, lengths=said, arrivals="all at 0"),
        arrival_ms=np.zeros(requests),
        prompt_len=prompt_len,
        output_len=output_len,
    )


def _check(config: WorkloadConfig) -> None:
    """Refuses knobs that contradict each other or that nothing would read."""
    kind, synthetic = f"kind: {config.kind}", config.kind == "synthetic"
    inside = not pathlib.PurePath(config.file).is_absolute() and ".." not in pathlib.PurePath(config.file).parts
    means = (config.prompt_mean, config.output_mean)
    cuts, no_cuts = (config.max_prompt, config.max_total), (WorkloadConfig.max_prompt, WorkloadConfig.max_total)
    takes_means = config.lengths in ("exponential", "uniform", "constant")
    # Whether it holds, the fields, what was expected, what came, and what to do.
    rules: tuple[tuple[bool, str, str, object, str], ...] = (
        (
            config.num_requests is not None or not synthetic,
            "num_requests",
            f"a number with {kind}",
            config.num_requests,
            "say how many to draw",
        ),
        (
            config.num_requests is None or config.num_requests >= 1,
            "num_requests",
            "at least 1",
            config.num_requests,
            "leave it out for all requests of a trace",
        ),
        (
            not synthetic or not config.file,
            "file",
            f"nothing with {kind}",
            repr(config.file),
            "leave it out, or name the trace's kind",
        ),
        (
            not synthetic or not config.sha256,
            "sha256",
            f"nothing with {kind}",
            repr(config.sha256),
            "leave it out, or name the trace's kind",
        ),
        (
            synthetic or bool(config.file),
            "file",
            f"a name with {kind}",
            repr(config.file),
            f"name the trace, relative to the folder of {TRACE_DIR_VARIABLE}",
        ),
        (
            inside,
            "file",
            f"a path below the folder that {TRACE_DIR_VARIABLE} names",
            repr(config.file),
            "give it relative to that folder",
        ),
        (
            config.lengths is not None or not synthetic,
            "lengths",
            f"a distribution with {kind}",
            config.lengths,
            "set lengths: sharegpt, for example",
        ),
        (
            config.lengths is None or synthetic,
            "lengths",
            f"nothing with {kind}, which has its own",
            config.lengths,
            "leave it out",
        ),
        (
            None not in means if takes_means else means == (None, None),
            "prompt_mean, output_mean",
            f"{'numbers' if takes_means else 'nothing'} with lengths: {config.lengths}",
            f"{means[0]} and {means[1]}",
            "give both" if takes_means else "leave both out, or take lengths: exponential, uniform or constant",
        ),
        (
            config.lengths in ("sharegpt", "alpaca", "exponential") or cuts == no_cuts,
            "max_prompt, max_total",
            f"{no_cuts[0]} and {no_cuts[1]}, their defaults, with lengths: {config.lengths}",
            f"{cuts[0]} and {cuts[1]}",
            "leave them out: they cut exponential lengths only",
        ),
        (
            config.zero_output == "refuse" or not synthetic,
            "zero_output",
            f"refuse, its default, with {kind}",
            config.zero_output,
            "leave it out: no drawn length is 0",
        ),
        (
            config.rate is not None or config.kind not in ("synthetic", "sharegpt_stats"),
            "rate",
            f"requests per second with {kind}, which has no arrival times",
            config.rate,
            "give it; .inf puts every arrival at 0",
        ),
        (
            config.rate is not None or config.burstiness == 1,
            "burstiness",
            "1, its default, without rate",
            config.burstiness,
            "give a rate to draw arrivals, or leave it out",
        ),
        (
            config.rate is not None or not config.rescale,
            "rescale",
            "false, its default, without rate",
            config.rescale,
            "give a rate to draw arrivals, or leave it out",
        ),
        (
            0 < config.time_scale < float("inf"),
            "time_scale",
            "a positive number",
            config.time_scale,
            "1 leaves the times as they are",
        ),
    )
    for holds, fields, expected, got, remedy in rules:
        if not holds:
            raise ValueError(f"{fields}: expected {expected}, got {got}; {remedy}")
