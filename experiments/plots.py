"""Plots in one style: the colour of a memory is the same in every figure of a run, and equal data give equal bytes.

Colours are those of Okabe and Ito (2008), which stay apart for colour-blind readers; lines also differ in their
dashes, so that nothing rests on colour alone.
"""

import contextlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.rcsetup
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG

PALETTE = ("#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#999999")
INK, FAINT = "#1b1f24", "#d5d9de"
DASHES: Sequence[Any] = ("solid", (0, (6, 1.5)), (0, (3, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (1, 1)))
MEMORIES = ("paged", "vattention", "reserved_max", "reserved_pow2", "reserved_oracle")
"""Names that have the same colour and dashes in every run: those of their place here."""
USE_COLORS: Mapping[str, str] = {
    "tokens": "#0072B2",
    "reservation": "#56B4E9",
    "internal": "#E69F00",
    "external": "#c9ced4",
    "remainder": "#6e7780",
}
"""Where a budget is: filled, wasted by the memory in one of three ways, or too little for one more unit of it."""
WIDTH = 7.2  # inches


class Figure(NamedTuple):
    """A figure of the report."""

    title: str
    caption: str  # what to see in it, in a sentence or two
    figure: matplotlib.figure.Figure


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The look of every figure, for what is drawn inside the block."""
    with matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": "#8a9199",
            "axes.labelcolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": matplotlib.rcsetup.cycler(color=PALETTE),
            "grid.color": FAINT,
            "grid.linewidth": 0.7,
            "lines.linewidth": 1.9,
            "xtick.color": "#4a525a",
            "ytick.color": "#4a525a",
            "legend.frameon": False,
            "legend.fontsize": 9,
            "figure.constrained_layout.use": True,
            "svg.fonttype": "path",  # looks the same on every machine
        }
    ):
        yield


def canvas(rows: int = 1, columns: int = 1, *, height: float = 3.2, **options: Any) -> tuple[Any, Any]:
    """A figure of the report's width and its axes, as `matplotlib.pyplot.subplots` gives them, without pyplot.

    Args:
      rows: rows of axes.
      columns: columns of axes.
      height: of one row, in inches.
      **options: of `Figure.subplots`, such as `sharex`.
    """
    figure = matplotlib.figure.Figure(figsize=(WIDTH, height * rows))
    return figure, figure.subplots(rows, columns, **options)


def memory_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and label of each memory: the known ones keep theirs, others take what is left, in their order.

    Args:
      names: of all memories of a run, also of those with nothing to draw, so that every figure deals out the same.

    Returns:
      Keywords of `Axes.plot` by name. Pairs of colour and dashes repeat only after 35 names.
    """
    names = list(dict.fromkeys(names))
    left = (i for i in itertools.count() if i >= len(MEMORIES) or MEMORIES[i] not in names)
    places = {name: MEMORIES.index(name) if name in MEMORIES else next(left) for name in names}
    return {
        name: {"color": PALETTE[i % len(PALETTE)], "linestyle": DASHES[i % len(DASHES)], "label": name}
        for name, i in places.items()
    }


def over_time(axes: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], unit: str) -> None:
    """One step line per memory.

    Args:
      axes: to draw into.
      series: times and values by memory; a value holds until the next time.
      unit: what the times are, for the axis.
    """
    styles = memory_styles(series)
    for name, (times, values) in series.items():
        axes.plot(times, values, drawstyle="steps-post", **styles[name])
    axes.set_xlabel(unit)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    legend(axes)


def cdf(axes: Axes, samples: Mapping[str, Sequence[float]], unit: str, *, log: bool = False) -> None:
    """Share of the samples that are at most x, one line per memory; one without samples is left out.

    Args:
      axes: to draw into.
      samples: by memory, none negative; none 0 if `log`.
      unit: what the samples are, for the axis.
      log: whether the axis of the samples is logarithmic.
    """
    styles = memory_styles(samples)
    for name, values in samples.items():
        if len(values):
            ordered = np.sort(np.asarray(values, dtype=float))
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axes.plot([ordered[0], *ordered], [0.0, *share], drawstyle="steps-post", **styles[name])
    if log:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    legend(axes)


def stacked_shares(axes: Axes, shares: Mapping[str, Mapping[str, float]]) -> None:
    """One horizontal bar per memory, split into what its slots are used for.

    Args:
      axes: to draw into.
      shares: fractions by memory, then by kind, in the order of the bar.
    """
    names = list(shares)
    left = np.zeros(len(names))
    for kind in dict.fromkeys(kind for parts in shares.values() for kind in parts):
        widths = np.array([shares[name].get(kind, 0.0) for name in names])
        color = USE_COLORS.get(kind, "#666666")
        axes.barh(names, widths, left=left, color=color, label=kind, height=0.68)
        for row, width in enumerate(widths):
            if width >= 0.05:  # narrower, and the number does not fit
                dark = matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(color))[2] < 0.72
                axes.text(
                    left[row] + width / 2, row, f"{width:.0%}", ha="center", va="center", fontsize=9.5,
                    color="white" if dark else INK,
                )  # fmt: skip
        left += widths
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.grid(axis="y", visible=False)
    legend(axes)


def memory_picture(axes: Axes, owners: Any, num_owners: int, unit: str, *, times: tuple[float, float]) -> None:
    """Who holds each unit of a memory at each time: one colour per owner, white for free.

    Args:
      axes: to draw into.
      owners: int array [units, times]; `num_owners` marks a free unit.
      num_owners: owners that there can be.
      unit: what a row of the picture is, such as `block`.
      times: first and last time.
    """
    picture = np.ma.masked_equal(np.asarray(owners), num_owners)
    # Neighbouring rows must not look alike, so hues are dealt out by the golden ratio.
    hues = (np.arange(num_owners) * 0.61803398875) % 1.0
    value = np.array([0.62, 0.78, 0.9])[np.arange(num_owners) % 3]
    colors = matplotlib.colors.hsv_to_rgb(np.stack([hues, np.full(num_owners, 0.38), value], axis=1))
    axes.imshow(
        picture,
        aspect="auto",
        interpolation="none",
        origin="lower",
        cmap=matplotlib.colors.ListedColormap(colors),
        vmin=-0.5,
        vmax=num_owners - 0.5,
        extent=(times[0], times[1], 0, picture.shape[0]),
    )
    axes.set_ylabel(unit)
    axes.grid(visible=False)


def legend(axes: Axes, columns: int = 5) -> None:
    """A legend above the axes, where it hides no data; fewer columns where names are long."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=columns,
            borderaxespad=0.2,
            handlelength=1.8,
            columnspacing=0.9,
        )


def remove_legend(axes: Axes) -> None:
    """Takes the legend away where another one explains the lines; there is none where nothing was drawn."""
    drawn = axes.get_legend()
    if drawn is not None:
        drawn.remove()


def to_svg(figure: matplotlib.figure.Figure, prefix: str) -> str:
    """A figure as an SVG element for a page: no date, no links, ids that no other figure of the page has."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg, count=3)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'xlink:href="#', 'href="#', svg)
    return re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
