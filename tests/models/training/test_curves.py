import dataclasses
import json
import re
import xml.etree.ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from models.training import Phase, TrainState
from models.training.curves import as_jsonl, as_svg, curves
from models.training.step import learning_rate
from tests.models.training.tiny import CONFIG

LOSSES = np.float32(5 * 0.9 ** np.arange(33))
HELDOUT = np.where(np.arange(33) % 10 == 9, LOSSES + 1, np.nan).astype(np.float32)
STATE = TrainState(
    step=jnp.int32(33),
    params={},
    optimizer=(),
    losses=jnp.asarray(LOSSES),
    gradient_norms=jnp.asarray(LOSSES / 2),
    heldout=jnp.asarray(HELDOUT),
)


def test_a_line_of_the_table_is_a_step():
    rows = [json.loads(line) for line in as_jsonl(curves(CONFIG, STATE)).splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 34))
    for i, row in enumerate(rows):
        # A mean over the 25th part of 33 steps is of one.
        assert row["loss"] == row["smoothed_loss"] == pytest.approx(float(LOSSES[i]), rel=1e-12)
        assert row["gradient_norm"] == float(LOSSES[i] / 2)
        assert row["learning_rate"] == pytest.approx(float(learning_rate(CONFIG.optimizer, 33)(i)))
        assert row["heldout"] == (float(HELDOUT[i]) if i % 10 == 9 else None)


def test_the_smoothed_loss_is_a_mean_of_the_last_steps():
    config = dataclasses.replace(CONFIG, phases=(Phase(steps=100, context=16, batch=8),))
    losses = np.random.default_rng(0).uniform(1, 6, 100).astype(np.float32)
    nothing = jnp.full(100, jnp.nan)
    state = TrainState(jnp.int32(100), {}, (), jnp.asarray(losses), nothing, nothing)
    found = curves(config, state)["smoothed_loss"]
    expected = [np.mean(losses[max(0, i - 3) : i + 1], dtype=np.float64) for i in range(100)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_picture_stands_by_itself_and_depends_on_the_data_only():
    columns = curves(CONFIG, STATE)
    svg = as_svg(columns)
    assert svg == as_svg(columns)
    assert svg != as_svg(columns | {"heldout": columns["heldout"] + 1})
    assert svg != as_svg(columns | {"heldout": columns["heldout"] * np.nan})
    assert xml.etree.ElementTree.fromstring(svg).tag.endswith("svg")
    # Nothing is fetched: every reference is to a part of the picture, letters are drawn, and there is no date.
    assert all(reference.startswith("#") for reference in re.findall(r'href="([^"]*)"', svg))
    assert "<text" not in svg
    assert "dc:date" not in svg
