"""What a run's tables say: latency as its users felt it, and where the memory went.

The definitions are those of vLLM's serving benchmark and of PagedAttention (SOSP'23):

- TTFT: first token minus arrival. TPOT: (latency - TTFT) / (output - 1), only where the output has two tokens or
  more. ITL: every gap between two moments in which a request got tokens, pooled over all requests, so that long outputs
  weigh more; tokens that came together have no gap. The output is what was generated, not what was asked for.
- Deviations are of the population, percentiles linear between values.
- Normalized latency: the mean over requests of latency / output length.
- Requests that were refused or asked for nothing have no latency; they are counted, and never become a NaN.
- Memories that refuse different requests are compared by the latency of those that all of them served.
- Memory shares and running requests are averages over time, taken while requests were queueing: an idle server
  wastes memory under any policy, and says nothing about it. Where none ever were, all busy time counts.
"""

from typing import NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float64, Int

PERCENTILES = (50, 90, 95, 99)
MODELLED = frozenset(
    {
        *(f"{name}_ms_p{p}" for name in ("ttft", "tpot", "itl", "latency") for p in PERCENTILES),
        *(f"{name}_ms_{of}" for name in ("ttft", "tpot", "itl", "latency") for of in ("mean", "std")),
        "normalized_latency_ms",
        "output_tokens_per_s",
        "prompt_tokens_per_s",
        "prompt_tokens_per_ttft_s",
        "requests_per_s",
        "makespan_s",
        "peak_concurrency",
        "mapping_ms",
        "sync_mapping_ms",
        "swap_ms",
    }
)
"""Metrics that rest on the engine's modelled clock."""
LATENCY_ROWS = {
    f"{name}_ms_{of}": (f"{name.upper()} {of}, ms (modelled)", "{:,.1f}")
    for name in ("ttft", "tpot")
    for of in ("mean", "p50", "p99")
}
"""Rows of a table, as `results.columns` takes them, of the latencies that servers are compared by."""
GLOSSARY = {
    "peak_running": "most requests that held memory at once",
    "mean_running": "requests that held memory, average over the time in which others were queueing "
    "(see `queueing_share`)",
    "pool_utilization": "share of the budget that held tokens, average while requests were queueing",
    "allocated_utilization": "the same, as a share of what was handed out",
    "reservation_waste": "share of the budget that its owner had not filled yet, but would",
    "internal_waste": "share of the budget that its owner would never fill",
    "external_waste": "share of the budget that nobody had: free, or lost to rounding between requests",
    "remainder_waste": "share of the budget that is no memory at all: it does not pay for one more whole unit (block, "
    "page group, smallest range), or `num_blocks` leaves it out",
    "queueing_share": "share of the busy time in which some request was waiting: for memory, for a row, or for its "
    "place in the token budget; averages are over that time, and over all busy time where it is 0",
    "map_calls": "calls into the virtual-memory driver that map a page",
    "mapping_ms": "what those calls take",
    "sync_mapping_ms": "the part of it that a step had to wait for",
    "blocks_saved_share": "blocks that sharing saved, as a share of what would be held without it; of all blocks times "
    "the modelled time that they were held, idle time aside",
    "peak_blocks_saved_share": "the same share in the step in which it was largest",
    "preemptions": "how often a running request lost its memory, to be computed again or to go to the host",
    "recompute_tokens": "stored tokens that preemption threw away",
    "hit_tokens": "stored tokens that a request found when it was admitted: shared, brought back from the host, or "
    "delivered with it",
    "swapped_out_blocks": "blocks copied to the host; one that still has its copy there is not copied again",
    "swapped_in_blocks": "blocks copied back from it; one that is still on the device is not copied",
    "swap_ms": "what those copies take, at `cost.swap_block_ns` each",
    "steps": "steps in which anything was computed",
    "ttft_ms": "time from arrival to the first output token",
    "tpot_ms": "time between output tokens, one value a request of two tokens or more",
    "itl_ms": "time between output tokens, all gaps of all requests pooled; tokens that came together have none",
    "latency_ms": "time from arrival to the last output token",
    "normalized_latency_ms": "mean over requests of latency per output token",
    "output_tokens_per_s": "output tokens of all requests over the time from the first arrival to the last token",
    "prompt_tokens_per_s": "prompt tokens of all served requests over that same time",
    "prompt_tokens_per_ttft_s": "those prompt tokens over the sum of their requests' TTFT: how fast a prompt is read, "
    "with its wait",
    "peak_concurrency": "most requests at once that had arrived and not ended",
    "refused_or_empty": "requests that could never fit, or asked for nothing",
    "compared_requests": "requests that every memory served; TTFT, TPOT, ITL and latency are of these",
    "tokens_reference": "what served the requests whose tokens are right: the first memory, by the XLA reference if "
    "`kernels` names others",
    "tokens_compared": "requests that this memory and `tokens_reference` both served",
    "tokens_equal": "those got the same tokens as from `tokens_reference`, near ties aside; - if there were none",
    "near_tie_differences": "requests whose first differing token was between two choices equal within `near_tie`",
    "budget_tokens": "tokens that the budget pays for laid end to end, the same for every memory",
    "capacity_tokens": "tokens that the budget pays for in whole units of this memory",
}


def request_metrics(requests: pl.DataFrame, compared: pl.DataFrame | None = None) -> dict[str, float | int]:
    """Latency and throughput of one memory's requests.

    Args:
      requests: one row a request with `arrival_ms`, `first_token_ms` and `ended_ms` (null for never) and `generated`;
        where they are known, with `prompt_len`, `preemptions` and `token_ms`, the list of the times of its tokens.
      compared: those of them whose latency is measured; all if None.

    Returns:
      Metrics by name, times in ms. A metric that no request, or no column, defines is left out.
    """
    served = requests.filter(pl.col("generated") > 0)
    compared = served if compared is None else compared.filter(pl.col("generated") > 0)
    values: dict[str, float | int] = {
        "requests": len(requests),
        "served": len(served),
        "refused_or_empty": len(requests) - len(served),
        "compared_requests": len(compared),
    }
    if "preemptions" in requests.columns:
        values["preemptions"] = int(requests["preemptions"].sum())
    if served.is_empty():
        return values
    makespan_s = makespan_ms(served) / 1000
    values["makespan_s"] = makespan_s
    values["output_tokens_per_s"] = int(served["generated"].cast(pl.Int64).sum()) / makespan_s
    values["requests_per_s"] = len(served) / makespan_s
    if "prompt_len" in served.columns:
        prompt_tokens = int(served["prompt_len"].cast(pl.Int64).sum())
        values["prompt_tokens_per_s"] = prompt_tokens / makespan_s
        values["prompt_tokens_per_ttft_s"] = prompt_tokens / float(latencies(served).ttft_ms.sum()) * 1000
    values["peak_concurrency"] = peak_concurrency(served["arrival_ms"].to_numpy(), served["ended_ms"].to_numpy())
    return values | (_summaries(compared) if len(compared) else {})


class Latencies(NamedTuple):
    """Of each request."""

    ttft_ms: Float64[np.ndarray, " requests"]
    tpot_ms: Float64[np.ndarray, " requests"]  # NaN where there is a single token
    latency_ms: Float64[np.ndarray, " requests"]
    generated: Int[np.ndarray, " requests"]


def latencies(served: pl.DataFrame) -> Latencies:
    """The latencies of requests that all got a token, as for `request_metrics`."""
    latency_ms = (served["ended_ms"] - served["arrival_ms"]).to_numpy()
    ttft_ms = (served["first_token_ms"] - served["arrival_ms"]).to_numpy()
    generated = served["generated"].to_numpy()
    gaps = np.where(generated > 1, generated - 1, np.nan)
    return Latencies(ttft_ms, (latency_ms - ttft_ms) / gaps, latency_ms, generated)


def makespan_ms(served: pl.DataFrame) -> float:
    """From the first arrival to the last token of requests that all got a token."""
    return float(served["ended_ms"].max() - served["arrival_ms"].min())  # pyright: ignore


def peak_concurrency(begin: Float64[np.ndarray, " requests"], end: Float64[np.ndarray, " requests"]) -> int:
    """Most requests at once: whoever ends in the moment in which another one begins makes way for it."""
    times, changes = np.concatenate([end, begin]), np.repeat([-1, 1], [len(end), len(begin)])
    return int(np.cumsum(changes[np.argsort(times, kind="stable")]).max(initial=0))


def _summaries(served: pl.DataFrame) -> dict[str, float | int]:
    values: dict[str, float | int] = {}
    times = latencies(served)
    samples = {"ttft": times.ttft_ms, "tpot": times.tpot_ms[times.generated > 1], "latency": times.latency_ms}
    if "token_ms" in served.columns:
        gaps = np.concatenate([np.diff(of_one) for of_one in served["token_ms"].to_list()])
        samples["itl"] = gaps[gaps > 0]
    for name, sample in samples.items():
        if len(sample):
            values[f"{name}_ms_mean"] = float(sample.mean())
            values[f"{name}_ms_std"] = float(sample.std())
            values |= {f"{name}_ms_p{p}": float(np.percentile(sample, p)) for p in PERCENTILES}
    values["normalized_latency_ms"] = float((times.latency_ms / times.generated).mean())
    return values


def served_by_all(requests: pl.DataFrame) -> pl.DataFrame:
    """Requests that no memory refused: the latencies of several memories are comparable on these alone.

    Args:
      requests: one row a memory and request, with the number of the `request` and the `reason` for its end.
    """
    refused = requests.filter(pl.col("reason").str.starts_with("refused"))["request"].unique().to_list()
    return requests.filter(~pl.col("request").is_in(refused))


def memory_metrics(steps: pl.DataFrame, budget_tokens: float | None = None) -> dict[str, float | int]:
    """Memory use of one memory's steps.

    Args:
      steps: one row a step with `duration_ms`, `new_tokens`, `running`, `waiting`, `tokens`, `reserved`, `internal`,
        `external`, `allocated`, `saved`, `recompute_tokens`, `hit_tokens`, `swapped_out_blocks`, `swapped_in_blocks`,
        `swap_ms`, `map_calls`, `mapping_ms` and `sync_mapping_ms`.
      budget_tokens: tokens that the budget pays for; what the memory makes of it if None.

    Returns:
      Metrics by name. Shares are fractions of the budget, but `allocated_utilization` is one of what was allocated, and
      left out if nothing was.
    """
    busy = steps.filter(pl.col("new_tokens") > 0)
    queueing = busy.filter(pl.col("waiting") > 0)
    measured = _while_queueing(steps)
    busy_ms = float(busy["duration_ms"].sum())
    shares = memory_shares(steps, budget_tokens)
    allocated = _mean(measured, "allocated")
    saved, unshared = busy["saved"], busy["saved"] + busy["allocated"]
    unshared_ms = float((unshared * busy["duration_ms"]).sum())
    return {
        "peak_running": int(steps["running"].max()),  # pyright: ignore[reportArgumentType]
        "mean_running": _mean(measured, "running"),
        "pool_utilization": shares["tokens"],
        **({"allocated_utilization": _mean(measured, "tokens") / allocated} if allocated else {}),
        "reservation_waste": shares["reservation"],
        "internal_waste": shares["internal"],
        "external_waste": shares["external"],
        "remainder_waste": shares["remainder"],
        "queueing_share": float(queueing["duration_ms"].sum()) / busy_ms if busy_ms else 0.0,
        "map_calls": int(steps["map_calls"].sum()),
        "mapping_ms": float(steps["mapping_ms"].sum()),
        "sync_mapping_ms": float(steps["sync_mapping_ms"].sum()),
        "blocks_saved_share": float((saved * busy["duration_ms"]).sum()) / unshared_ms if unshared_ms else 0.0,
        "peak_blocks_saved_share": float((saved / unshared).fill_nan(0).max() or 0),  # pyright: ignore
        **{
            name: int(steps[name].sum())
            for name in ("recompute_tokens", "hit_tokens", "swapped_out_blocks", "swapped_in_blocks")
        },
        "swap_ms": float(steps["swap_ms"].sum()),
        "steps": len(busy),
    }


def memory_shares(steps: pl.DataFrame, budget_tokens: float | None = None) -> dict[str, float]:
    """Average shares of the budget that hold tokens and that are wasted, by kind; they add up to 1.

    `remainder` is what the budget pays for beyond the memory's capacity; `budget_tokens` is that capacity if None.
    """
    measured = _while_queueing(steps)
    capacity = sum(int(measured[kind][0]) for kind in ("tokens", "reserved", "internal", "external"))
    budget = capacity if budget_tokens is None else budget_tokens
    names = {"tokens": "tokens", "reservation": "reserved", "internal": "internal", "external": "external"}
    shares = {name: _mean(measured, column) / budget for name, column in names.items()}
    return shares | {"remainder": 1 - capacity / budget}


def _while_queueing(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps that computed anything while requests waited; all that computed anything if none ever did.

    All steps if nothing was ever computed, as where every request is refused: the memory then lay idle as a whole.
    """
    busy = steps.filter(pl.col("new_tokens") > 0)
    queueing = busy.filter(pl.col("waiting") > 0)
    return next((some for some in (queueing, busy) if len(some)), steps)


def _mean(steps: pl.DataFrame, column: str) -> float:
    """Average over time: each step weighs as long as it lasted; all the same if none lasted."""
    values, duration_ms = steps[column].to_numpy(), steps["duration_ms"].to_numpy()
    return float(np.average(values, weights=duration_ms) if duration_ms.any() else np.mean(values))
