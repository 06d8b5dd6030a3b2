"""What servers on meshes look like: what they hold, exchange and do; and of compiled ones, how they scale by model."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from experiments import config as configs
from experiments import files, plots
from experiments.sharded_model import StepWork
from experiments.sharded_setup import parse_mesh, part_of
from pallas_kernels.targets import TOPOLOGIES
from paxkv.sharding import MeshShape

_SPLITS = {"heads": "solid", "blocks": (0, (3, 1.2))}

Points = Sequence[tuple[int, float, float]]  # devices, ms of a step, tokens per s


def scaling(run_path: pathlib.Path) -> list[plots.Figure]:
    """Strong and weak scaling; nothing where all meshes have as many devices.

    Args:
      run_path: directory of a finished run; nothing else is read.
    """
    found = files.read_json(run_path / "compiled.json")
    if len({row.get("devices") for row in found.values() if "work" in row}) < 2:
        return []
    config = configs.read_yaml(run_path / "config.yaml")
    rows, context = config["rows"], config["offline"]["context"]
    return [
        _figure(
            "Strong scaling",
            f"The same {rows} requests on more devices, by the model of a step. Reading weights and stored tokens is "
            "shared out; exchanges are not. Lines begin where the model fits.",
            _lines(found, rows, context, weak=False),
        ),
        _figure(
            "Weak scaling",
            f"{rows} requests for every device. The step grows by what is exchanged, and by what each device reads.",
            _lines(found, rows, context, weak=True),
        ),
    ]


def _lines(
    found: Mapping[str, Mapping[str, Any]], rows: int, context: int, *, weak: bool
) -> dict[str, dict[tuple[str, str], Points]]:
    """By model, then by target and by what is split."""
    lines: dict[str, dict[tuple[str, str], list[tuple[int, float, float]]]] = {}
    for row in found.values():
        shape = parse_mesh(row["mesh"])
        if "work" not in row or not row["fits"] or shape.data > 1:
            continue
        asked = rows * (shape.size if weak else 1)
        seconds = StepWork(**row["work"]).seconds(TOPOLOGIES[row["target"]].target, asked, context)
        for split in _SPLITS:
            if shape == (MeshShape(1, shape.size, 1) if split == "heads" else MeshShape(1, 1, shape.size)):
                points = lines.setdefault(row["model"], {}).setdefault((row["target"], split), [])
                points.append((shape.size, 1000 * seconds, asked / seconds))
    return {model: {key: sorted(points) for key, points in of.items()} for model, of in lines.items()}


def _figure(title: str, caption: str, lines: Mapping[str, Mapping[tuple[str, str], Points]]) -> plots.Figure:
    figure, grid = plots.canvas(2, max(1, len(lines)), height=2.7, sharex=True, squeeze=False)
    targets = list(dict.fromkeys(target for of_model in lines.values() for target, _ in of_model))
    colors = dict(zip(targets, plots.PALETTE, strict=False))
    for column, (model, of_model) in enumerate(lines.items()):
        for (target, split), points in of_model.items():
            devices, *values = zip(*points, strict=True)
            for axes, of_step in zip(grid[:, column], values, strict=True):
                label = f"{target}, {split}"
                axes.plot(devices, of_step, marker="o", color=colors[target], linestyle=_SPLITS[split], label=label)
        for axes, unit in zip(grid[:, column], ("step in ms (modelled)", "tokens per s (modelled)"), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
            axes.set_ylabel(unit if column == 0 else "")
        grid[1, column].set_xlabel(f"devices that share {model}")
    handles: dict[str, Any] = {}
    for axes in grid[0]:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4)
    return plots.Figure(title, caption, figure)


def served(run_path: pathlib.Path) -> list[plots.Figure]:
    """Capacity and exchange by mesh, and requests over time.

    Args:
      run_path: directory of a finished run; nothing else is read.
    """
    steps = files.read_parquet(run_path / "steps.parquet")
    names = steps["mesh"].unique(maintain_order=True).to_list()
    facts = {name: files.read_json(run_path / "parts" / part_of(name) / "devices.json") for name in names}
    return [_capacity(facts), _exchange(facts), _over_time(steps, names)]


def _capacity(facts: Mapping[str, Mapping[str, Any]]) -> plots.Figure:
    figure, axes = plots.canvas(height=0.8 + 0.3 * len(facts))
    axes.barh(list(facts), [fact["capacity_tokens"] for fact in facts.values()], height=0.68)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("tokens that fit, over all replicas")
    return plots.Figure(
        "Capacity",
        "Equal memory on every device. Heads can be split no further than there are; blocks can.",
        figure,
    )


def _exchange(facts: Mapping[str, Mapping[str, Any]]) -> plots.Figure:
    figure, axes = plots.canvas(height=0.8 + 0.3 * len(facts))
    merge = [fact["merge_bytes_per_step"] / 1024 for fact in facts.values()]
    other = [fact["collective_bytes_per_step"] / 1024 - m for fact, m in zip(facts.values(), merge, strict=True)]
    axes.barh(list(facts), other, height=0.68, label="sums of the decoder")
    axes.barh(list(facts), merge, left=other, height=0.68, label="merging attention")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("KiB that a device gives into exchanges, per decode step")
    plots.legend(axes)
    return plots.Figure("Exchange", "What devices tell one another in a decode step of all rows.", figure)


def _over_time(steps: pl.DataFrame, names: list[str]) -> plots.Figure:
    figure, axes = plots.canvas()
    series = {}
    for name in names:
        own = (
            steps.filter(pl.col("mesh") == name).group_by("step").agg(pl.col("clock_ms").min(), pl.col("running").sum())
        )
        own = own.sort("step")
        series[name] = ((own["clock_ms"] / 1000).to_list(), own["running"].to_list())
    plots.over_time(axes, series, "modelled time in s")
    axes.set_ylabel("running requests")
    return plots.Figure("Over time", "More memory lets more requests run at once. Time is modelled.", figure)
