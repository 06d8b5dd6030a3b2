"""A run directory is held by one process, keeps what is finished, and never overwrites it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import polars as pl
import pytest

from experiments.errors import UserError
from experiments.run_directory import MANIFEST, SUMMARY, RunDirectory, finished_parts, is_running
from pallas_kernels import choices

FRAME = pl.DataFrame({"x": [1, 2]})


def test_a_part_is_there_only_once_it_is_whole(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        with run_dir.part("paged") as part:
            part.write_parquet("steps.parquet", FRAME)
            part.write_json("facts", {"a": 1})
            assert run_dir.finished_part("paged") is None
            assert finished_parts(run_dir.path) == []
        found = run_dir.finished_part("paged")
        assert found is not None
        assert found.read_parquet("steps").equals(FRAME)
        assert found.read_json("facts.json") == {"a": 1}
        assert finished_parts(run_dir.path) == ["paged"]


def test_a_part_that_raises_leaves_nothing(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        with contextlib.suppress(KeyError), run_dir.part("paged") as part:
            part.write_parquet("steps.parquet", FRAME)
            raise KeyError
        assert list((run_dir.path / "parts").iterdir()) == []
        with run_dir.part("paged") as part:
            part.write_parquet("steps.parquet", FRAME)
        assert finished_parts(run_dir.path) == ["paged"]


def test_the_kernels_of_a_finished_part_are_known_though_its_process_is_killed(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir, choices.recording():
        run_dir.write_json("manifest", {"inputs": {"trace": "abc"}, "kernels": {}})
        for part, backend in (("a", "triton"), ("b", "xla")):
            choices.note("kv_write", backend=backend)
            with run_dir.part(part):
                pass
        choices.note("kv_write", backend="of a part that is never finished")
        assert run_dir.read_json("manifest") == {
            "inputs": {"trace": "abc"},
            "kernels": {"kv_write": [{"backend": "triton"}, {"backend": "xla"}]},
        }


def test_a_finished_part_is_not_overwritten(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        with run_dir.part("paged") as part:
            part.write_json("a", 1)
        with pytest.raises(ValueError, match="finished"), run_dir.part("paged") as part:
            part.write_json("a", 2)
        assert run_dir.finished_part("paged").read_json("a") == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b"])
def test_a_part_needs_a_plain_name(tmp_path, name):
    with RunDirectory.open(tmp_path / "run") as run_dir, pytest.raises(ValueError, match="name of a part"):
        run_dir.finished_part(name)


def test_a_finished_run_is_refused_and_says_what_to_do(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        run_dir.write_json(SUMMARY, {})
    with pytest.raises(UserError, match=r"is finished .* experiments report .* --seed or another --out_dir"):
        RunDirectory.open(tmp_path / "run")


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    path = tmp_path / "run"
    (path / "parts" / ".paged.tmp").mkdir(parents=True)
    (path / "parts" / ".paged.tmp" / "steps.parquet").write_text("half")
    (path / ".steps.parquet.tmp").write_text("half")
    (path / "parts" / "vattention").mkdir()
    with RunDirectory.open(path):
        assert finished_parts(path) == ["vattention"]
        assert sorted(p.name for p in path.iterdir()) == [".lock", "parts"]


def test_two_processes_cannot_hold_one_run_and_a_killed_one_blocks_nobody(tmp_path):
    path = tmp_path / "run"
    code = "import sys, time; from experiments.run_directory import *; RunDirectory.open(pathlib.Path(sys.argv[1]))"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('held', flush=True); time.sleep(60)", str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert is_running(path)
            with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
                RunDirectory.open(path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert not is_running(path)
    with RunDirectory.open(path):
        assert (path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/run: Not a directory; choose another --out_dir"):
        RunDirectory.open(tmp_path / "file" / "run")


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="needs a read-only file system")
def test_a_read_only_place_is_named():
    with pytest.raises(UserError, match="cannot write /proc/runs/run"):
        RunDirectory.open(pathlib.Path("/proc/runs/run"))


def test_inputs_are_recorded_once_and_must_not_change(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        run_dir.write_json(MANIFEST, {"inputs": {}, "earlier_sessions": []})
        run_dir.add_manifest(trace_sha256="abc", requests=200)
        run_dir.add_manifest(trace_sha256="abc")
        assert run_dir.read_json(MANIFEST) == {
            "inputs": {"trace_sha256": "abc", "requests": 200},
            "earlier_sessions": [],
        }
        with pytest.raises(
            UserError, match=r"run was begun with other inputs: trace_sha256 \(abc -> xyz\); restore what"
        ):
            run_dir.add_manifest(trace_sha256="xyz")
