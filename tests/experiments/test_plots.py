"""Figures keep one look per memory, and equal data give equal bytes."""

import itertools
import re

import matplotlib.colors
import numpy as np
import pytest

from experiments import plots

NAMES = ("paged", "vattention", "reserved_max", "reserved_pow2", "reserved_oracle")


def drawing():
    with plots.style():
        figure, (left, right) = plots.canvas(1, 2)
        plots.cdf(left, {"paged": [3.0, 1.0, 2.0, 2.0], "vattention": []}, "ms")
        plots.stacked_shares(right, {"paged": {"tokens": 0.9, "external": 0.1}, "reserved_max": {"tokens": 0.25}})
    return figure


def looks(names):
    return {name: (style["color"], str(style["linestyle"])) for name, style in plots.memory_styles(names).items()}


def test_the_known_memories_keep_their_colours_whoever_stands_beside_them():
    alone = {name: looks([name])[name] for name in NAMES}
    assert len({dashes for _, dashes in alone.values()}) == len(NAMES)
    assert looks(["block_8", *reversed(NAMES), "block_16"]).items() >= alone.items()


@pytest.mark.parametrize("known", [(), ("reserved_max", "paged"), NAMES])
def test_other_memories_get_colours_of_their_own_in_their_order(known):
    names = ["block_8", *known, *(f"block_{n}" for n in range(16, 45))]
    found = looks(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names), "two memories look alike"
    first = [np.array(matplotlib.colors.to_rgb(color)) for color, _ in list(found.values())[:7]]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(first, 2)) > 0.2
    assert looks(["block_8", "other", *known]) != looks(["other", "block_8", *known])


def test_a_line_has_the_colour_of_its_memory_even_beside_one_that_is_not_drawn():
    with plots.style():
        _, (left, right) = plots.canvas(1, 2)
        plots.over_time(left, {"small": ([0, 1], [1, 2]), "large": ([0, 1], [1, 2])}, "step")
        plots.cdf(right, {"small": [], "large": [1.0]}, "ms")
    (_, large), (alone,) = left.lines, right.lines
    assert left.lines[0].get_color() != large.get_color() == alone.get_color()
    assert drawing().axes[0].lines[0].get_color() == "#0072B2"


def test_a_cdf_steps_up_by_the_share_of_each_sample():
    line = drawing().axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [1, 1, 2, 2, 3])
    np.testing.assert_array_equal(line.get_ydata(), [0, 0.25, 0.5, 0.75, 1])
    assert line.get_drawstyle() == "steps-post"


def test_stacked_bars_stand_on_one_another():
    bars = drawing().axes[1].patches
    drawn = [(bar.get_x(), bar.get_width()) for bar in bars]
    np.testing.assert_allclose(drawn, [(0, 0.9), (0, 0.25), (0.9, 0.1), (0.25, 0)])


def test_a_step_line_holds_each_value_until_the_next_time():
    with plots.style():
        _, axes = plots.canvas()
        plots.over_time(axes, {"paged": ([0, 2, 5], [1, 4, 2])}, "step")
    line = axes.lines[0]
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_ydata(), [1, 4, 2])


def test_a_picture_leaves_free_units_white_and_gives_each_owner_one_colour():
    owners = np.array([[0, 0, 2], [1, 3, 3]])
    with plots.style():
        _, axes = plots.canvas()
        plots.memory_picture(axes, owners, 3, "block", times=(10, 40))
    (image,) = axes.images
    pixels = image.cmap(image.norm(image.get_array()))
    assert (pixels[1, 1, 3], pixels[1, 2, 3]) == (0, 0)
    assert tuple(pixels[0, 0]) == tuple(pixels[0, 1])
    assert len({tuple(pixels[0, 0]), tuple(pixels[0, 2]), tuple(pixels[1, 0])}) == 3
    assert image.get_extent() == [10, 40, 0, 2]


def test_equal_data_give_equal_bytes_and_another_place_on_the_page_other_ids():
    first, again, other = plots.to_svg(drawing(), "f0"), plots.to_svg(drawing(), "f0"), plots.to_svg(drawing(), "f1")
    assert first == again
    ids = [set(re.findall(r'\sid="([^"]+)"', svg)) for svg in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_an_svg_has_no_date_no_size_and_no_address():
    svg = plots.to_svg(drawing(), "f0")
    assert svg.startswith("<svg")
    opening = svg[: svg.index(">")]
    assert "viewBox" in opening
    assert "width" not in opening
    assert "height" not in opening
    assert "http" not in svg
    assert "date" not in svg


def test_the_style_of_a_figure_does_not_leak():
    before = matplotlib.rcParams["axes.grid"]
    drawing()
    assert matplotlib.rcParams["axes.grid"] == before
