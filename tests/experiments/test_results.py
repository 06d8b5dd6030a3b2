"""Results become plain JSON and readable tables, and nothing undefined passes for a number."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import results

MEMORIES = {
    "paged": {"peak": 30, "share": 0.95, "ms": 2661.27, "ok": True},
    "vattention": {"peak": 12345, "share": 0.0125, "ms": 0.0, "ok": False},
}


def test_scalars_of_arrays_become_plain_numbers():
    given = {"a": {"f": np.float32(0.5), "i": jnp.int32(3), "b": np.bool_(True), "n": None, "t": "x"}}
    plain = results.plain(given)
    assert plain == {"a": {"f": 0.5, "i": 3, "b": True, "n": None, "t": "x"}}
    assert [type(value) for value in plain["a"].values()] == [float, int, bool, type(None), str]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), [1], object()])
def test_what_is_no_metric_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"paged\.ttft_ms must be"):
        results.plain({"paged": {"ttft_ms": value}})


def test_the_summary_is_one_compact_line_in_the_agreed_form():
    line = results.summary_line(results.summary("x", "runs/x-1-0", "finished", {"paged": {"peak": 3}}))
    assert line == '{"experiment":"x","run_dir":"runs/x-1-0","status":"finished","results":{"paged":{"peak":3}}}'
    assert json.loads(line)["results"]["paged"]["peak"] == 3


def test_the_longer_side_runs_down_the_page():
    table = results.table(MEMORIES, frozenset({"ms"}))
    assert list(table.headings) == ["", "paged", "vattention"]
    assert [list(row) for row in table.rows] == [
        ["peak", "30", "12,345"],
        ["share", "0.9500", "0.0125"],
        ["ms (modelled)", "2,661", "0"],
        ["ok", "yes", "no"],
    ]
    many = {f"case{i}": {"value": i, "ok": None} for i in range(3)}
    table = results.table(many, frozenset({"value"}))
    assert list(table.headings) == ["", "value (modelled)", "ok"]
    assert [list(row) for row in table.rows] == [["case0", "0", "-"], ["case1", "1", "-"], ["case2", "2", "-"]]


def test_names_that_share_no_metrics_get_a_line_per_metric():
    table = results.table({"a": {"x": 1, "y": 2}, "b": {"z": 3}, "c": {"w": 4}}, frozenset({"z"}))
    assert [list(row) for row in table.rows] == [
        ["a", "x", "1"], ["", "y", "2"], ["b", "z (modelled)", "3"], ["c", "w", "4"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.95, 0.01, 0.158], ["0.9500", "0.0100", "0.1580"]),
        ([23.456, None], ["23.46", "-"]),
        ([500.0, 0.003], ["500.0000", "0.0030"]),
        ([1234567.0, 1.0], ["1,234,567.0", "1.0"]),
        ([1e-9, 0.5], ["1e-09", "0.5"]),
        ([0.0], ["0"]),
        ([-0.5, 3], ["-0.5000", "3"]),
    ],
)
def test_the_values_of_a_metric_share_their_decimals(values, texts):
    assert results.show(values) == texts


def test_no_results_are_an_empty_table():
    assert list(results.table({}, frozenset()).rows) == []


def test_numbers_stand_right_and_words_left():
    rows = [["a", "1,234", "1e-09", "no", "7", "-", "95%", ""], ["b", "-0.50", "-", "yes", "seven", "", "-", "3"]]
    table = results.Table([""] * 8, rows)
    assert [table.aligned_right(i) for i in range(8)] == [False, True, True, True, False, True, True, True]
