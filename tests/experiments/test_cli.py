"""The command line: exit codes, the last line, and runs that survive being killed at any moment."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from experiments import cli, files, manifest, run_directory
from experiments.run_directory import finished_parts

HERE = pathlib.Path(__file__).parent
EXPERIMENTS = {"fake": "fake_experiment"}
YAML = "# Does counting <work>?\n# One second; expect a 4.\n\nexperiment: fake\nmemory: {block_size: 16}\n"


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fake.yaml"
    path.write_text(YAML)
    return str(path)


@pytest.fixture
def call(config, capsys):
    """Calls the command line; answers its exit code, standard output and standard error."""

    def call(*argv):
        code = cli.main(argv, EXPERIMENTS)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def start(config, **environment):
    """The same in a process of its own."""
    code = f"import sys; from experiments import cli; sys.exit(cli.main({['run', config]}, {EXPERIMENTS}))"
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def only_run():
    (path,) = pathlib.Path("runs").iterdir()
    return path


def test_a_run_ends_in_one_line_of_json_that_is_its_summary(call, config):
    code, out, err = call("run", config)
    last = json.loads(out.splitlines()[-1])
    run = only_run()
    assert code == 0
    assert re.fullmatch(r"fake-[0-9a-f]{8}-0", run.name)
    assert last == files.read_json(run / "summary.json")
    assert list(last) == ["experiment", "run_dir", "status", "results"]
    assert (last["experiment"], last["run_dir"], last["status"]) == ("fake", f"runs/{run.name}", "finished")
    assert last["results"]["paged"] == {"peak_running": 4, "ttft_ms_p50": 1.5, "ok": True, "undefined": None}
    assert "ttft_ms_p50 (modelled)" in out
    assert err.splitlines() == [f"report: runs/{run.name}/report.html"]
    assert {p.name for p in run.iterdir()} == {
        ".lock", "config.yaml", "manifest.json", "parts", "steps.parquet", "report.html", "summary.json",
    }  # fmt: skip


def test_the_manifest_says_what_the_run_was_computed_with(call, config):
    call("run", config, "--seed", "3")
    facts = files.read_json(only_run() / "manifest.json")
    assert facts["schema_version"] == 1
    assert facts["seeds"] == [3]
    assert facts["command"] == f"python -m experiments run {config} --seed 3"
    assert facts["inputs"] == {"trace_sha256": "abc"}
    assert facts["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8}
    assert set(facts["versions"]) >= {"python", "jax", "jaxlib", "numpy", "flax", "paxkv"}
    assert facts["started"] <= facts["finished"]
    assert facts["config_sha256"].startswith(only_run().name.split("-")[1])


def test_the_same_run_is_refused_and_left_alone(call, config):
    call("run", config)
    before = {p: p.read_bytes() for p in only_run().rglob("*") if p.is_file()}
    code, out, err = call("run", config)
    assert (code, out) == (2, "")
    assert "is finished and is not overwritten" in err
    assert {p: p.read_bytes() for p in only_run().rglob("*") if p.is_file()} == before


def test_a_run_repeats_bit_for_bit_but_for_measured_times(call, config):
    for out_dir in ("a", "b"):
        assert call("run", config, "--out_dir", out_dir)[0] == 0
    (a,), (b,) = pathlib.Path("a").iterdir(), pathlib.Path("b").iterdir()
    assert a.name == b.name
    assert files.same_contents(a / "steps.parquet", b / "steps.parquet")
    assert (a / "config.yaml").read_bytes() == (b / "config.yaml").read_bytes()


def test_the_resolved_config_of_a_run_is_the_same_run(call, config):
    call("run", config, "--rows", "5", "--memory.policy=fifo")
    code, _, err = call("run", str(only_run() / "config.yaml"))
    assert (code, "is finished" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sead", "3"], "unknown key sead (did you mean 'seed'?)"),
        (["--memory.blok_size", "3"], "unknown key memory.blok_size (did you mean 'block_size'?)"),
        (["--rows", "four"], "rows must be a whole number, got the text 'four'"),
        (["--rows"], "--rows needs a value"),
        (["--rows", "--seed", "3"], "--rows needs a value"),
        (["--rows", "3", "--rows", "4"], "--rows is given twice"),
        (["--seed", "-1"], "seed must be from 0 to 4294967295, got -1"),
        (["--seed", "9223372036854775808"], "seed must be from 0 to 4294967295"),
        (["--experiment", "fakes"], "no experiment is called 'fakes' (did you mean 'fake'?)"),
        (["other.yaml"], "run needs one config, got 2"),
    ],
)
def test_a_mistake_is_named_without_a_traceback_and_leaves_nothing(call, config, argv, message):
    code, out, err = call("run", config, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert not pathlib.Path("runs").exists()


def test_a_config_without_an_experiment_is_refused(call, tmp_path):
    (tmp_path / "bare.yaml").write_text("seed: 1\n")
    code, _, err = call("run", "bare.yaml")
    assert (code, "must name its experiment, as in `experiment: fake`" in err) == (2, True)


def test_options_stand_before_or_behind_the_config(call, config):
    assert call("run", "--rows", "7", config, "--out_dir", "a")[0] == 0
    assert call("run", "--out_dir", "b", config, "--rows=7")[0] == 0
    assert os.listdir("a") == os.listdir("b")


def test_help_lists_every_key_of_a_config(call, config):
    code, out, _ = call("run", config, "--help")
    assert code == 0
    for key in ("--memory.block_size", "--memory.policy", "--seed", "--names", "--trace"):
        assert key in out
    assert re.search(r"--memory.block_size +int +16 +tokens in a block\. *\n", out)
    assert call("run", "--help")[1].startswith("usage:")


def test_a_failed_check_is_told_apart_from_a_mistake(call, config):
    code, out, err = call("run", config, "--bad", "true")
    assert code == 1
    assert json.loads(out.splitlines()[-1])["status"] == "failed"
    assert "check failed: paged is not ok" in err
    assert call("report", str(only_run()))[0] == 1
    assert "paged is not ok" in (only_run() / "report.html").read_text()


def test_what_an_experiment_refuses_is_a_sentence_and_its_traceback_a_file(call, config, monkeypatch):
    monkeypatch.setenv("FAKE_STUMBLE", "refuse")
    code, _, err = call("run", config)
    assert code == 2
    assert err.startswith("error: rows must fit the pool, got 4; raise pool (traceback: runs/fake-")
    assert "Traceback" in (only_run() / "error.txt").read_text()
    monkeypatch.delenv("FAKE_STUMBLE")
    assert call("run", config)[0] == 0
    assert not (only_run() / "error.txt").exists()


def test_what_is_refused_before_the_run_has_a_directory_leaves_none(call, config, monkeypatch):
    monkeypatch.setenv("FAKE_STUMBLE", "find nothing")
    assert call("run", config) == (2, "", "error: no checkpoint at models/none\n")
    assert not pathlib.Path("runs").exists()


def test_a_run_killed_in_a_part_resumes_behind_the_last_finished_one(call, config):
    killed = start(config, FAKE_STUMBLE="die in vattention")
    out, _ = killed.communicate()
    assert (killed.returncode, out) == (-signal.SIGKILL, "computing paged\ncomputing vattention\n")
    code, out, _ = call("report", str(only_run()))
    assert code == 1
    assert "unfinished" in out
    assert "finished parts: paged\n" in out
    assert "missing parts: vattention\n" in out
    assert json.loads(out.splitlines()[-1])["status"] == "unfinished"

    first = files.read_parquet(only_run() / "parts" / "paged" / "steps.parquet")
    code, out, err = call("run", config)
    assert code == 0
    assert out.splitlines()[0] == "computing vattention"
    assert "resuming" in err
    assert files.read_parquet(only_run() / "steps.parquet")[:3].equals(first)
    # The killed process saw one device, this one sees eight: the parts were not computed alike.
    assert "warning: since the run began changed devices (count 1 -> 8)" in err
    assert "changed in between: devices (count 1 -&gt; 8)" in (only_run() / "report.html").read_text()
    sessions = files.read_json(only_run() / "manifest.json")["earlier_sessions"]
    assert [session["devices"]["count"] for session in sessions] == [1]


def test_a_run_that_is_going_on_is_not_started_again(call, config):
    with start(config, FAKE_STUMBLE="wait in paged") as going:
        assert going.stdout is not None
        assert going.stdout.readline() == "computing paged\n"
        code, _, err = call("run", config)
        assert (code, f"in use by process {going.pid}" in err) == (2, True)
        assert "is running now" in call("report", str(only_run()))[1]
        going.kill()


def test_a_run_is_not_resumed_with_other_inputs(call, config, monkeypatch):
    monkeypatch.setenv("FAKE_STUMBLE", "refuse")
    call("run", config)
    monkeypatch.setenv("FAKE_TRACE", "another file")
    code, _, err = call("run", config)
    assert (code, "was begun with other inputs: trace_sha256 (abc -> another file); restore" in err) == (2, True)
    monkeypatch.setattr(manifest, "versions", lambda: {"python": "4.0"})
    assert "; since then changed versions (python " in call("run", config)[2]


def test_a_finished_run_that_other_code_made_says_so(call, config, monkeypatch):
    here = {"revision": "a" * 40, "dirty": False}
    monkeypatch.setattr(manifest, "git_state", lambda root: here)
    call("run", config)
    assert "warning" not in call("run", config)[2]
    monkeypatch.setattr(manifest, "git_state", lambda root: here | {"revision": "b" * 40})
    code, _, err = call("run", config)
    warning, error = err.splitlines()
    assert code == 2
    assert f"was made by another revision of the code: git (revision {'a' * 40} -> {'b' * 40})" in warning
    assert "is finished and is not overwritten" in error


def test_a_run_killed_at_any_write_is_unfinished_and_resumes_without_loss(call, config, monkeypatch):
    """Ends the process, as far as its files can tell, at the nth sync to disk, for every n there is."""
    monkeypatch.setattr("fake_experiment.figures", lambda run_path: [])  # slow to draw, and not what is tested
    monkeypatch.setattr(manifest, "git_state", lambda root: None)
    sync, ended_at = os.fsync, 0
    while True:
        out_dir = f"runs{ended_at}"
        syncs = 0

        def dies(descriptor, at=ended_at):
            nonlocal syncs
            if syncs == at:
                raise KilledError
            syncs += 1
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", dies)
            patch.setattr(run_directory.shutil, "rmtree", lambda path: None)  # a killed process tidies nothing
            try:
                assert call("run", config, "--out_dir", out_dir)[0] == 0
                break
            except KilledError:
                pass
        (run,) = pathlib.Path(out_dir).iterdir()
        done = finished_parts(run)
        if not (run / "summary.json").exists():  # the very last sync comes after it
            code, out, _ = call("report", str(run))
            assert (code, json.loads(out.splitlines()[-1])["status"]) == (1, "unfinished")
            code, out, _ = call("run", config, "--out_dir", out_dir)
            assert code == 0
            computed = [line.removeprefix("computing ") for line in out.splitlines() if line.startswith("computing")]
            assert computed == [name for name in ("paged", "vattention") if name not in done]
        assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]
        assert call("report", str(run))[0] == 0
        ended_at += 1
    assert ended_at > 15


def test_a_pipe_that_is_closed_early_costs_nothing(call, config, monkeypatch):
    def closed(*_):
        raise SystemExit(1)  # what rich makes of a broken pipe

    monkeypatch.setattr("experiments.results.render", closed)
    with pytest.raises(SystemExit):
        call("run", config)
    assert files.read_json(only_run() / "summary.json")["status"] == "finished"


def test_an_interrupt_says_how_to_go_on(call, config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fake_experiment._steps", interrupted)
    code, _, err = call("run", config)
    assert code == 130
    assert "the same command resumes" in err
    assert finished_parts(only_run()) == []


def test_unknown_words_are_refused(call):
    for argv in ([], ["rum"], ["report"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv, EXPERIMENTS)
        assert ended.value.code == 2
    assert call("list", "--verbose")[0] == 2
