"""Service-level objectives: which requests were served well enough, and how many of them a second."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import polars as pl

from experiments import metrics
from experiments.errors import did_you_mean
from experiments.results import Results


@dataclasses.dataclass(frozen=True)
class Slo:
    """Bounds that a request has to keep, all of them. None is no bound.

    Attributes:
      ttft_ms: on the time to its first token.
      tpot_ms: on the mean time between its tokens.
      latency_ms: on the time to its last token.
      one_token: whether a request with a single token, which has no time between tokens, `meets` a bound on it, as in
        vLLM's benchmark, or `fails` it.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    one_token: Literal["meets", "fails"] = "meets"

    def __post_init__(self) -> None:
        """Refuses bounds that nothing could keep, and none at all."""
        bounds = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "latency_ms": self.latency_ms}
        for name, bound in bounds.items():
            if bound is not None and not bound > 0:
                raise ValueError(f"{name}: expected more than 0, got {bound}; leave it out for no bound")
        if not any(bounds.values()):
            raise ValueError(f"expected at least one of {', '.join(bounds)}, got none")


MLPERF: Mapping[str, Slo] = {
    "llama2_70b": Slo(ttft_ms=2000, tpot_ms=200),
    "llama2_70b_interactive": Slo(ttft_ms=450, tpot_ms=40),
    "llama3_1_8b": Slo(ttft_ms=2000, tpot_ms=100),
    "llama3_1_8b_interactive": Slo(ttft_ms=500, tpot_ms=30),
    "llama3_1_405b": Slo(ttft_ms=6000, tpot_ms=175),
    "mixtral_8x7b": Slo(ttft_ms=2000, tpot_ms=200),
}
"""Bounds of MLPerf Inference's server scenario (rules of MLCommons), where the 99th percentile has to keep them."""

GLOSSARY = {
    "goodput_per_s": "requests that kept every bound of the SLO, over the time from first arrival to last token",
    "slo_share": "share of all requests, refused ones included, that kept every bound of the SLO",
    "slo_p99_kept": "whether the 99th percentiles of TTFT, TPOT and latency keep the bounds, as MLPerf asks",
}
MODELLED = frozenset(GLOSSARY)
"""Metrics that rest on the engine's modelled clock."""
PRESET_GLOSSARY = {
    f"{preset}_{name}": f"{words}, under {preset}" for preset in MLPERF for name, words in GLOSSARY.items()
}
"""The same under each of MLPerf's bounds."""
_ROWS = {
    "goodput_per_s": ("goodput, requests per s", "{:.2f}"),
    "slo_share": ("requests within", "{:.1%}"),
    "slo_p99_kept": ("99th percentiles within", "{}"),
}


def preset(name: str) -> Slo:
    """An SLO by its name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in MLPERF:
        raise ValueError(f"slo: expected one of {', '.join(MLPERF)}, got {name!r}{did_you_mean(name, MLPERF)}")
    return MLPERF[name]


def preset_metrics(requests: pl.DataFrame, names: Sequence[str]) -> dict[str, float | bool]:
    """`slo_metrics` under each of these presets, whose name comes before that of the metric."""
    under = {name: slo_metrics(requests, preset(name)) for name in names}
    return {f"{name}_{metric}": value for name, found in under.items() for metric, value in found.items()}


def preset_rows(results: Results) -> dict[str, tuple[str, str]]:
    """Rows of a table, as `results.columns` takes them, of the presets under which anything was measured."""
    there = [name for name in MLPERF if any(f"{name}_slo_share" in values for values in results.values())]
    return {
        f"{name}_{metric}": (f"{words}, {name} (modelled)", form)
        for name in there
        for metric, (words, form) in _ROWS.items()
    }


def slo_metrics(requests: pl.DataFrame, slo: Slo) -> dict[str, float | bool]:
    """How many requests were served within an SLO.

    Args:
      requests: as `metrics.request_metrics` takes them.
      slo: the bounds.

    Returns:
      `goodput_per_s`, `slo_share` and `slo_p99_kept`; 0, 0 and False where nobody was served.
    """
    served = requests.filter(pl.col("generated") > 0)
    if served.is_empty():
        return {"goodput_per_s": 0.0, "slo_share": 0.0, "slo_p99_kept": False}
    times = metrics.latencies(served)
    bounds = ((times.ttft_ms, slo.ttft_ms), (times.tpot_ms, slo.tpot_ms), (times.latency_ms, slo.latency_ms))
    bounded = [(sample, bound) for sample, bound in bounds if bound is not None]
    kept = [np.where(np.isnan(sample), slo.one_token == "meets", sample <= bound) for sample, bound in bounded]
    good = int(np.all(kept, axis=0).sum())
    defined = [(sample[~np.isnan(sample)], bound) for sample, bound in bounded]
    return {
        "goodput_per_s": good / metrics.makespan_ms(served) * 1000,
        "slo_share": good / len(requests),
        "slo_p99_kept": all(bool(np.percentile(sample, 99) <= bound) for sample, bound in defined if len(sample)),
    }
