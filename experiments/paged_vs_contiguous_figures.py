"""What the comparison of memories looks like, drawn from the files of its run."""

import pathlib
from typing import Any

import numpy as np
import polars as pl

from experiments import files, metrics, plots


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Running requests and utilisation over time, waste, latency, and the memory itself.

    Args:
      run_path: directory of a finished run of the comparison; nothing else is read.
    """
    steps = files.read_parquet(run_path / "steps.parquet")
    requests = files.read_parquet(run_path / "requests.parquet")
    pool = files.read_parquet(run_path / "pool.parquet")
    names = steps["memory"].unique(maintain_order=True).to_list()
    by_name = {name: steps.filter(pl.col("memory") == name) for name in names}
    return [
        _over_time(by_name),
        _waste({n: metrics.memory_shares(s, _memory(run_path, n)["budget_tokens"]) for n, s in by_name.items()}),
        _latency({name: metrics.served_by_all(requests).filter(pl.col("memory") == name) for name in names}),
        *(
            _picture(run_path, name, pool.filter(pl.col("memory") == name), len(requests) // len(names))
            for name in names
        ),
    ]


def _over_time(by_name: dict[str, pl.DataFrame]) -> plots.Figure:
    figure, (top, bottom) = plots.canvas(2, 1, sharex=True)
    seconds = {name: (steps["clock_ms"] / 1000).to_list() for name, steps in by_name.items()}
    plots.over_time(top, {n: (seconds[n], s["running"].to_list()) for n, s in by_name.items()}, "")
    top.set_ylabel("running requests")
    shares = {
        name: (
            seconds[name],
            (steps["tokens"] / (steps["tokens"] + steps["reserved"] + steps["internal"] + steps["external"])).to_list(),
        )
        for name, steps in by_name.items()
    }
    plots.over_time(bottom, shares, "modelled time in s")
    plots.remove_legend(bottom)
    bottom.set_ylabel("share of the pool\nthat holds tokens")
    return plots.Figure(
        "Over time", "Whoever fits more requests into the same memory is done earlier. Time is modelled.", figure
    )


def _memory(run_path: pathlib.Path, name: str) -> dict[str, Any]:
    return files.read_json(run_path / "parts" / name / "memory.json")


def _waste(shares: dict[str, dict[str, float]]) -> plots.Figure:
    figure, axes = plots.canvas(height=0.5 * len(shares) + 1.0)
    plots.stacked_shares(axes, shares)
    axes.set_xlabel("share of the KV budget, average over the time in which requests were queueing")
    return plots.Figure(
        "Where the memory goes",
        "Its owner will fill a reservation later, and internal waste never; external is free, or lost in between; the "
        "remainder does not pay for one more whole unit. Where nobody ever queued, averages are over all busy time.",
        figure,
    )


def _latency(by_name: dict[str, pl.DataFrame]) -> plots.Figure:
    figure, (left, right) = plots.canvas(1, 2, height=3.4)
    served = {name: requests.filter(pl.col("generated") > 0) for name, requests in by_name.items()}
    ttft_s = {n: ((r["first_token_ms"] - r["arrival_ms"]) / 1000).to_list() for n, r in served.items()}
    per_token_ms = {n: ((r["ended_ms"] - r["arrival_ms"]) / r["generated"]).to_list() for n, r in served.items()}
    # A request that queues waits a hundred times longer than one that does not.
    plots.cdf(left, ttft_s, "time to first token in s (modelled)", log=True)
    plots.cdf(right, per_token_ms, "latency per output token in ms (modelled)", log=True)
    for axes in (left, right):
        plots.remove_legend(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return plots.Figure("Latency", "Share of the requests that every memory served that waited no longer.", figure)


def _picture(run_path: pathlib.Path, name: str, pool: pl.DataFrame, num_requests: int) -> plots.Figure:
    pool = pool.filter(pl.col("memory") == name)
    owners = np.array(pool["owners"].to_list()).T
    figure, axes = plots.canvas(height=2.4)
    last = int(pool["step"].max())  # pyright: ignore[reportArgumentType]
    picture = np.where(owners < 0, num_requests, owners)
    plots.memory_picture(axes, picture, num_requests, _memory(run_path, name)["unit"], times=(0, last))
    axes.set_xlabel("step")
    return plots.Figure(
        f"The memory of {name}", "One colour a request, white is free. One column for every dispatch.", figure
    )
