"""How a run went, step by step: as a table to compute with, and as a picture that needs nothing beside it."""

import io
import json
import math

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.figure
import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_svg import FigureCanvasSVG

from models.training.config import TrainConfig
from models.training.step import TrainState, learning_rate

TABLE, PICTURE = "curves.jsonl", "curves.svg"

# Okabe and Ito's (2008) blue, vermilion and grey, which stay apart for colour-blind readers.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#999999"
SMOOTHED_OVER = 1 / 25  # of all steps: wide enough to see the trend in, narrow enough to see a turn


def curves(config: TrainConfig, state: TrainState) -> dict[str, Float[np.ndarray, " steps"]]:
    """A column for each quantity, an entry for each step; NaN where it was not measured.

    Returns:
      `loss`, `smoothed_loss` and `heldout` in nats per byte, `learning_rate`, and `gradient_norm` before clipping.
    """
    losses = np.asarray(state.losses, np.float64)
    # optax takes the smaller of an integer step and a Python float.
    with jax.numpy_dtype_promotion("standard"):
        rates = jax.vmap(learning_rate(config.optimizer, config.steps))(jnp.arange(config.steps))
    return {
        "loss": losses,
        "smoothed_loss": _trailing_mean(losses, max(1, round(config.steps * SMOOTHED_OVER))),
        "heldout": np.asarray(state.heldout, np.float64),
        "learning_rate": np.asarray(rates, np.float64),
        "gradient_norm": np.asarray(state.gradient_norms, np.float64),
    }


def as_jsonl(columns: dict[str, Float[np.ndarray, " steps"]]) -> str:
    """A line for each step, counted from 1; what was not measured is null."""
    lines = []
    for step, row in enumerate(zip(*columns.values(), strict=True), start=1):
        values = dict(zip(columns, map(float, row), strict=True))
        lines.append(json.dumps({"step": step} | {k: None if math.isnan(x) else x for k, x in values.items()}) + "\n")
    return "".join(lines)


def as_svg(columns: dict[str, Float[np.ndarray, " steps"]]) -> str:
    """Loss, learning rate and gradient norm over the steps; equal columns give equal bytes."""
    steps = np.arange(1, len(columns["loss"]) + 1)
    figure = matplotlib.figure.Figure(figsize=(7.2, 7.0), layout="constrained")
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    loss.plot(steps, columns["loss"], color=GREY, linewidth=0.6, label="training, each step")
    loss.plot(steps, columns["smoothed_loss"], color=BLUE, label="training, mean of the last steps")
    measured = ~np.isnan(columns["heldout"])
    if measured.any():
        loss.plot(
            steps[measured], columns["heldout"][measured], color=VERMILION, marker="o", markersize=4, label="held out"
        )
    loss.set_ylabel("nats per byte")
    loss.legend(frameon=False)
    rate.plot(steps, columns["learning_rate"], color=BLUE)
    rate.set_ylabel("learning rate")
    norm.plot(steps, columns["gradient_norm"], color=BLUE, linewidth=0.8)
    norm.set_ylabel("gradient norm")
    norm.set_yscale("log")
    norm.set_xlabel("step")
    for axes in (loss, rate, norm):
        axes.grid(color="#d5d9de", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "curves", "svg.fonttype": "path"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return buffer.getvalue()


def _trailing_mean(values: Float[np.ndarray, " steps"], count: int) -> Float[np.ndarray, " steps"]:
    """The mean of up to `count` values, the last of which is that of the step."""
    sums = np.concatenate([np.zeros(1), np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
