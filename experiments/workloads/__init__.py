"""Workloads: requests read from public traces or drawn from stated distributions, with their provenance."""

from experiments.workloads.arrivals import gamma_arrivals
from experiments.workloads.config import TRACE_DIR_VARIABLE, WorkloadConfig, load_workload, with_sha256
from experiments.workloads.fit import TooLong, fit_lengths, scale_lengths
from experiments.workloads.lengths import PRESETS, constant_lengths, exponential_lengths, uniform_lengths
from experiments.workloads.records import TraceError
from experiments.workloads.streams import stream
from experiments.workloads.tokens import prompt_tokens
from experiments.workloads.traces import TraceKind, ZeroOutput, read_trace
from experiments.workloads.workload import Provenance, Workload, statistics

__all__ = [
    "PRESETS",
    "TRACE_DIR_VARIABLE",
    "Provenance",
    "TooLong",
    "TraceError",
    "TraceKind",
    "Workload",
    "WorkloadConfig",
    "ZeroOutput",
    "constant_lengths",
    "exponential_lengths",
    "fit_lengths",
    "gamma_arrivals",
    "load_workload",
    "prompt_tokens",
    "read_trace",
    "scale_lengths",
    "statistics",
    "stream",
    "uniform_lengths",
    "with_sha256",
]
