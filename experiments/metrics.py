"""What a run's tables say: latency as its users felt it, and where the memory went.

The definitions are those of vLLM's serving benchmark and of PagedAttention (SOSP'23):

- TTFT: first token minus arrival. TPOT: (latency - TTFT) / (output - 1), only where the output has two tokens or
  more. ITL: every gap between two tokens of a request, pooled over all requests, so that long outputs weigh more.
- Normalized latency: the mean over requests of latency / output length.
- Requests that were refused or asked for nothing have no latency; they are counted, and never become a NaN.
- Memory shares and running requests are averages over time, taken while requests were queueing: an idle server
  wastes memory under any policy, and says nothing about it.
"""

import math

import numpy as np
import polars as pl

PERCENTILES = (50, 90, 99)
MODELLED = frozenset(
    {
        *(f"{name}_ms_p{p}" for name in ("ttft", "tpot", "itl", "latency") for p in PERCENTILES),
        *(f"{name}_ms_mean" for name in ("ttft", "tpot", "itl", "latency")),
        "normalized_latency_ms",
        "output_tokens_per_s",
        "requests_per_s",
        "makespan_s",
        "mapping_ms",
    }
)
"""Metrics that rest on the engine's modelled clock."""


def request_metrics(requests: pl.DataFrame) -> dict[str, float | int]:
    """Latency and throughput of one memory's requests.

    Args:
      requests: one row a request with `arrival_ms`, `first_token_ms` and `ended_ms` (null for never), `generated`,
        `preemptions` and `token_ms`, the list of the times of its tokens.

    Returns:
      Metrics by name, times in ms. A metric that no request defines is left out.
    """
    served = requests.filter(pl.col("generated") > 0)
    values: dict[str, float | int] = {
        "requests": len(requests),
        "served": len(served),
        "refused_or_empty": len(requests) - len(served),
        "preemptions": int(requests["preemptions"].sum()),
    }
    if served.is_empty():
        return values
    latency = (served["ended_ms"] - served["arrival_ms"]).to_numpy()
    ttft = (served["first_token_ms"] - served["arrival_ms"]).to_numpy()
    generated = served["generated"].to_numpy()
    several = generated > 1
    gaps = [np.diff(times) for times in served["token_ms"].to_list()]
    samples = {
        "ttft": ttft,
        "tpot": (latency - ttft)[several] / (generated[several] - 1),
        "itl": np.concatenate(gaps),
        "latency": latency,
    }
    for name, sample in samples.items():
        if len(sample):
            values[f"{name}_ms_mean"] = float(sample.mean())
            values |= {f"{name}_ms_p{p}": float(np.percentile(sample, p)) for p in PERCENTILES}
    makespan_ms = float(served["ended_ms"].max() - served["arrival_ms"].min())  # pyright: ignore
    values["normalized_latency_ms"] = float((latency / generated).mean())
    values["makespan_s"] = makespan_ms / 1000
    values["output_tokens_per_s"] = float(generated.sum()) / makespan_ms * 1000
    values["requests_per_s"] = len(served) / makespan_ms * 1000
    return values


def memory_metrics(steps: pl.DataFrame, capacity: int) -> dict[str, float | int]:
    """Memory use of one memory's steps.

    Args:
      steps: one row a step with `duration_ms`, `new_tokens`, `running`, `waiting`, `tokens`, `reserved`, `internal`,
        `external`, `allocated`, `map_calls` and `mapping_ms`.
      capacity: tokens that the memory budget pays for.

    Returns:
      Metrics by name. Shares are fractions of `capacity`, but `allocated_utilization` is one of what was allocated.
    """
    busy = steps.filter(pl.col("new_tokens") > 0)
    queueing = busy.filter(pl.col("waiting") > 0)
    measured = busy if queueing.is_empty() else queueing
    weight = measured["duration_ms"].to_numpy()

    def mean(column: str) -> float:
        return float(np.average(measured[column].to_numpy(), weights=weight))

    busy_ms = float(busy["duration_ms"].sum())
    return {
        "peak_running": int(busy["running"].max()),  # pyright: ignore
        "mean_running": mean("running"),
        "pool_utilization": mean("tokens") / capacity,
        "allocated_utilization": mean("tokens") / mean("allocated"),
        "reservation_waste": mean("reserved") / capacity,
        "internal_waste": mean("internal") / capacity,
        "external_waste": mean("external") / capacity,
        "queueing_share": float(queueing["duration_ms"].sum()) / busy_ms,
        "map_calls": int(steps["map_calls"].sum()),
        "mapping_ms": float(steps["mapping_ms"].sum()),
        "recompute_tokens": int(steps["recompute_tokens"].sum()),
        "steps": len(busy),
    }


def is_finite(values: dict[str, float | int]) -> bool:
    """Whether every metric is a number that can be compared and plotted."""
    return all(math.isfinite(value) for value in values.values())
