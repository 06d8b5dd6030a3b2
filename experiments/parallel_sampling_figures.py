"""What a run of `parallel_sampling` shows: its tables, its figures, and what its metrics mean."""

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib.ticker
import polars as pl

from experiments import files, metrics, plots
from experiments.results import Results, Table

GLOSSARY: Mapping[str, str] = {
    **metrics.GLOSSARY,
    "sequences_per_prompt": "samples of each prompt, or width of the beam search; a sequence is counted as a request",
    "blocks_saved_share": f"{metrics.GLOSSARY['blocks_saved_share']}. PagedAttention (SOSP'23, figure 15) found 6.1 to "
    "9.8 % for 2 to 6 samples and 37.6 to 55.2 % for as many beams, with OPT-13B on prompts of Alpaca. Only the trend "
    "and the order compare with that: another model diverges elsewhere, and lengths are drawn, not Alpaca's own",
    "peak_running": "most sequences that held memory at once",
    "mean_running": "sequences that held memory, average over the time in which others were queueing",
    "copied_blocks": "blocks copied because a sequence was about to write into one that others share",
    "swapped_bytes": "bytes copied to the host and back",
    "tokens_equal": "every sample is the one that is drawn where nothing is shared, near ties aside",
    "near_tie_differences": "samples whose first differing token was between two choices equal within `near_tie`",
    "score_error": "largest difference between a beam's score and its log probability by the model without a cache, "
    "per token",
    "scores_equal": "that is within `near_tie`",
    "best_score": "log probability of a prompt's best beam per token, mean over prompts. It mostly rises with the "
    "width, but a beam search promises nothing of the kind",
    "miscounted_steps": "steps in which the uses of memory do not add up to its capacity",
}

Columns = Mapping[str, tuple[str, str]]  # heading and format by metric

_SAVED: Columns = {
    "blocks_saved_share": ("blocks saved", "{:.1%}"),
    "peak_blocks_saved_share": ("at peak", "{:.1%}"),
    "copied_blocks": ("copied", "{:,}"),
    "tokens_equal": ("same tokens", "{}"),
    "scores_equal": ("true scores", "{}"),
    "best_score": ("best score", "{:.3f}"),
}
_SERVED: Columns = {
    "peak_running": ("peak running", "{:,}"),
    "mean_running": ("on average", "{:.1f}"),
    "preemptions": ("preemptions", "{:,}"),
    "recompute_tokens": ("recomputed", "{:,}"),
    "output_tokens_per_s": ("tokens/s (modelled)", "{:,.0f}"),
}
_SWAPPED: Columns = {
    "swapped_out_blocks": ("blocks out", "{:,}"),
    "swapped_in_blocks": ("blocks in", "{:,}"),
    "swapped_bytes": ("bytes", "{:,}"),
    "swap_ms": ("ms (modelled)", "{:,.1f}"),
}


def tables(results: Results) -> list[Table]:
    """What was saved, how it was served, and what was swapped if anything was; a line a configuration."""
    found = [
        _table(results, _SAVED, "What sharing the blocks of a prompt saves"),
        _table(results, _SERVED, "How many sequences that lets run"),
    ]
    swapping = {name: values for name, values in results.items() if values["swapped_bytes"]}
    return [*found, _table(swapping, _SWAPPED, "Swapped to the host and back")] if swapping else found


def _table(results: Results, columns: Columns, title: str) -> Table:
    rows = [
        [name, *(_cell(values.get(m), form) for m, (_, form) in columns.items())] for name, values in results.items()
    ]
    return Table(["", *(heading for heading, _ in columns.values())], rows, title)


def _cell(value: Any, form: str) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
    return form.format(value)


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """The share of blocks saved against the number of sequences, and running sequences over time.

    Args:
      run_path: directory of a finished run; nothing else is read.
    """
    cases = files.read_parquet(run_path / "cases.parquet")
    steps = files.read_parquet(run_path / "steps.parquet")
    return [
        _saved(cases.filter("shares")),
        *(_running(steps, mode) for mode in cases["mode"].unique(maintain_order=True)),
    ]


def _saved(cases: pl.DataFrame) -> plots.Figure:
    figure, axes = plots.canvas()
    for mode, style in plots.memory_styles(cases["mode"].unique(maintain_order=True)).items():
        own = cases.filter(pl.col("mode") == mode).sort("width")
        axes.plot(own["width"], own["blocks_saved_share"], marker="o", **style)
    axes.set_xticks(cases["width"].unique().sort().to_list())
    axes.set_xlabel("sequences of each prompt")
    axes.set_ylabel("share of blocks\nsaved by sharing")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    plots.legend(axes)
    return plots.Figure(
        "What sharing saves",
        "Samples share their prompt; beams also share what they generated before they parted.",
        figure,
    )


def _running(steps: pl.DataFrame, mode: str) -> plots.Figure:
    own = steps.filter(pl.col("mode") == mode)
    widths = own["width"].unique(maintain_order=True).to_list()
    figure, grid = plots.canvas(len(widths), height=1.9, sharex=True, sharey=True, squeeze=False)
    for axes, width in zip(grid[:, 0], widths, strict=True):
        lines = own.filter(pl.col("width") == width).partition_by("case", as_dict=True, maintain_order=True)
        labels = {name: "not sharing" if name.endswith("-unshared") else "sharing" for (name,) in lines}
        series = {
            labels[name]: ((line["clock_ms"] / 1000).to_list(), line["running"].to_list())
            for (name,), line in lines.items()
        }
        plots.over_time(axes, series, "")
        if width != widths[0] or len(lines) == 1:
            plots.remove_legend(axes)
        axes.set_ylabel(f"running\n({width} a prompt)")
    grid[-1, 0].set_xlabel("modelled time in s")
    return plots.Figure(
        f"Running sequences: {mode}",
        "What sharing saves makes room for others: more sequences run at once, and all are done earlier.",
        figure,
    )
