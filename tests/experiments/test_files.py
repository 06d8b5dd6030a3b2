"""Files are whole or not there, and equal tables are equal bytes."""

import os

import polars as pl
import pytest

from experiments import files
from experiments.errors import UserError


def table(**changes):
    columns = {
        "step": [1, 2, 3],
        "share": [0.5, None, float("nan")],
        "name": ["a", "b", "c"],
        "wall_s": [1.0, 2.0, 3.0],
    }
    return pl.DataFrame(columns | changes)


def test_a_file_that_could_not_be_written_whole_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*a\.json: No space left on device"):
        files.write_json(path, {"new": 2})
    assert files.read_json(path) == {"old": 1}


def test_nan_is_not_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "\x00\x00"])
def test_a_damaged_file_is_named(tmp_path, text):
    for name, read in (("a.json", files.read_json), ("a.parquet", files.read_parquet)):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            read(tmp_path / name)


def test_equal_tables_give_equal_bytes_however_they_were_put_together(tmp_path):
    large = pl.DataFrame({"x": range(100_000), "name": [f"n{i % 7}" for i in range(100_000)]})
    pieces = pl.concat([large[:10], large[10:70_000], large[70_000:]], rechunk=False)
    assert pieces.n_chunks() > 1
    files.write_parquet(tmp_path / "a.parquet", large)
    files.write_parquet(tmp_path / "b.parquet", pieces)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert files.read_parquet(tmp_path / "a.parquet").equals(large)


def test_same_contents_sees_everything_but_measured_times(tmp_path):
    files.write_parquet(tmp_path / "a.parquet", table())
    for same in (table(), table(wall_s=[9.0, 9.0, 9.0])):
        files.write_parquet(tmp_path / "b.parquet", same)
        assert files.same_contents(tmp_path / "a.parquet", tmp_path / "b.parquet")
    for other in (
        table(step=[1, 2, 4]),
        table(share=[0.5, 0.0, float("nan")]),
        table(share=[0.5, None, 1.0]),
        table().cast({"step": pl.Int32}),
        table().rename({"name": "names"}),
        table()[:2],
        table().with_columns(extra=pl.lit(1)),
    ):
        files.write_parquet(tmp_path / "b.parquet", other)
        assert not files.same_contents(tmp_path / "a.parquet", tmp_path / "b.parquet")


def test_an_empty_table_can_be_written(tmp_path):
    files.write_parquet(tmp_path / "a.parquet", table()[:0])
    assert files.read_parquet(tmp_path / "a.parquet").schema == table().schema
