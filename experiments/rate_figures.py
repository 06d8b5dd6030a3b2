"""Figures of latency, batch and memory against request rate."""

import pathlib

import polars as pl

from experiments import files, plots

CURVES = "curves.parquet"
"""One row a case, seed and rate, with the limit that decides what a rate is."""


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Latency with the limit, and what the memory held; means over the seeds."""
    curves = files.read_parquet(run_path / CURVES)
    metrics = ("normalized_latency_s", "mean_running", "token_states")
    means = curves.group_by("case", "rate", maintain_order=True).agg(pl.col(metrics).mean()).sort("rate")
    styles = plots.memory_styles(curves["case"].unique(maintain_order=True))

    latency, axes = plots.canvas(height=3.4)
    _lines(axes, means, "normalized_latency_s", styles)
    axes.axhline(curves["limit_s"][0], color=plots.INK, linewidth=0.9, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylabel("normalised latency, s a token (modelled)")

    memory, (batch, share) = plots.canvas(1, 2, height=3.2)
    _lines(batch, means, "mean_running", styles)
    batch.set_ylabel("running requests (modelled)")
    _lines(share, means, "token_states", styles)
    plots.remove_legend(share)
    share.set_ylabel("share of memory with tokens (modelled)")
    share.set_ylim(0, 1)
    return [
        plots.Figure(
            "Latency against load",
            "A memory sustains the rate at which its curve crosses the dotted limit. Above it a queue grows for as "
            "long as the trace lasts.",
            latency,
        ),
        plots.Figure("Batch and memory against load", "Averages over the time in which requests arrive.", memory),
    ]


def _lines(axes: plots.Axes, means: pl.DataFrame, metric: str, styles: dict[str, dict]) -> None:
    for name, style in styles.items():
        own = means.filter(pl.col("case") == name)
        axes.plot(own["rate"], own[metric], marker="o", markersize=3, **style)
    axes.set_xlabel("requests/s")
    axes.set_xlim(left=0)
    plots.legend(axes)
