"""A sweep's points are runs of their own, compared once; it survives being killed, and says which points failed."""

import functools
import importlib
import json
import pathlib
import re

import polars as pl
import pytest

from experiments import cli, files, registry

HERE = pathlib.Path(__file__).parent
EXPERIMENTS = {"fake": "fake_experiment"}
YAML = "# Does counting <work>?\n# One second; expect a 4.\n\nexperiment: fake\nmemory: {block_size: 16}\n"
AXES = ("--axis", "memory.block_size=8,16,32", "--axis", "seed=0,1")


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fake_experiment.figures", lambda run_path: [])  # slow to draw, and of a run, not of a sweep
    (tmp_path / "fake.yaml").write_text(YAML)
    return "fake.yaml"


@pytest.fixture
def call(config, capsys):
    """Calls the command line; answers its exit code, standard output and standard error."""

    def call(*argv):
        code = cli.main(argv, EXPERIMENTS)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def the_sweep():
    (path,) = pathlib.Path("runs").glob("sweep-*")
    return path


def test_every_point_is_the_run_that_its_config_makes(call, config):
    code, out, err = call("sweep", config, *AXES, "--rows", "7")
    assert code == 0
    facts = files.read_json(the_sweep() / "sweep.json")
    assert re.fullmatch(r"sweep-fake-[0-9a-f]{8}", the_sweep().name)
    assert facts["axes"] == {"memory.block_size": ["8", "16", "32"], "seed": ["0", "1"]}
    assert facts["seeds"] == [0, 1]
    assert [point["values"] for point in facts["points"]] == [
        {"memory.block_size": b, "seed": s} for b in ("8", "16", "32") for s in ("0", "1")
    ]
    assert set(facts["versions"]) >= {"python", "jax", "paxkv"}
    assert err.splitlines()[0] == f"[1/6] memory.block_size=8, seed=0: {facts['points'][0]['run']}"
    assert json.loads(out.splitlines()[-1]) == {
        "experiment": "fake",
        "run_dir": str(the_sweep()),
        "status": "finished",
        "points": [{k: point[k] for k in ("values", "run", "status")} for point in facts["points"]],
    }
    # By itself the same config is the same run, and the command in its manifest says so.
    for point in facts["points"]:
        run = pathlib.Path("runs") / point["run"]
        assert files.read_json(run / "summary.json")["results"]["paged"]["peak_running"] == 7
        command = files.read_json(run / "manifest.json")["argv"]
        assert call(*command)[2].splitlines()[-1].startswith(f"error: {run} is finished and is not overwritten")


def test_one_table_holds_every_metric_of_every_point(call, config):
    _, out, _ = call("sweep", config, *AXES)
    frame = files.read_parquet(the_sweep() / "points.parquet")
    assert len(frame) == 12
    assert frame.columns[:5] == ["memory.block_size", "seed", "run", "status", "result"]
    # 24 over the block size, computed here once more.
    expected = [24 / size for size in (8, 16, 32) for _ in range(4)]
    assert frame["ttft_ms_p50"].to_list() == expected
    assert frame["undefined"].to_list() == [None] * 12
    assert frame["ok"].dtype == pl.Boolean
    assert (
        pl.read_csv(the_sweep() / "points.csv").select("run", "ttft_ms_p50").equals(frame.select("run", "ttft_ms_p50"))
    )
    header, line = (next(row for row in out.splitlines() if word in row) for word in ("result", " vattention "))
    assert header.split() == ["memory.block_size", "seed", "result", "ttft_ms_p50", "(modelled)", "peak_running", "ok"]
    assert line.split() == ["8", "0", "vattention", "3.000", "4", "yes"]
    assert "fake over memory.block_size, seed: 6 points" in out


def test_a_narrow_terminal_has_fewer_metrics_but_whole_names(call, config, monkeypatch):
    monkeypatch.setattr("rich.console.Console.width", 70)
    _, out, _ = call("sweep", config, "--axis", "memory.block_size=8,16")
    header, line = (next(row for row in out.splitlines() if word in row) for word in ("result", " vattention "))
    assert header.split() == ["memory.block_size", "result", "ttft_ms_p50", "(modelled)"]
    assert line.split() == ["8", "vattention", "3.000"]
    assert "further metrics are in points.csv" in " ".join(out.split())


def test_one_page_needs_nothing_from_elsewhere_and_says_modelled(call, config):
    call("sweep", config, *AXES)
    page = (the_sweep() / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|<img", page)
    assert page.count("<svg") == 1
    assert 'ttft_ms_p50 <span class="modelled">modelled</span>' in page
    assert "ttft_ms_p50 (modelled) by memory.block_size" in page
    assert "Does counting &lt;work&gt;?" in page
    assert "python -m experiments sweep fake.yaml --axis memory.block_size=8,16,32 --axis seed=0,1" in page
    for point in files.read_json(the_sweep() / "sweep.json")["points"]:
        assert point["run"] in page


def test_the_figure_shows_the_metric_that_is_asked_for(call, config):
    call("sweep", config, *AXES, "--plot", "peak_running")
    assert "<h3>peak_running by memory.block_size</h3>" in (the_sweep() / "report.html").read_text()
    # The same points with another figure: nothing is computed again.
    code, out, err = call("sweep", config, *AXES, "--plot", "ttft_ms_p50")
    assert (code, "computing" in out, err.count(" is finished\n")) == (0, False, 6)
    assert "<h3>ttft_ms_p50 (modelled) by memory.block_size</h3>" in (the_sweep() / "report.html").read_text()


@pytest.mark.parametrize("axis", ["rows=9,3", "names=[paged],[vattention]", "memory.policy=lru,fifo", "seed=7,0"])
def test_an_axis_of_any_kind_can_be_drawn(call, config, axis):
    assert call("sweep", config, "--axis", axis)[0] == 0
    assert (the_sweep() / "report.html").read_text().count("<svg") == 1


def test_a_metric_that_is_none_is_told_after_the_first_point(call, config):
    code, out, err = call("sweep", config, *AXES, "--plot", "ttft_ms_p5")
    assert code == 2
    assert out.count("computing paged") == 1
    assert (
        "error: --plot ttft_ms_p5: expected a number out of peak_running, ttft_ms_p50, undefined (did you mean" in err
    )


def test_a_sweep_of_which_nothing_can_be_computed_says_why(call, config, monkeypatch):
    monkeypatch.setenv("FAKE_STUMBLE", "refuse")
    code, out, err = call("sweep", config, "--axis", "rows=3,5", "--plot", "peak_running")
    assert (code, json.loads(out.splitlines()[-1])["status"]) == (1, "unfinished")
    assert err.count("rows must fit the pool") == 4  # when it happens, and at the end
    assert (the_sweep() / "report.html").read_text().count("<svg") == 0
    assert call("sweep", config, "--axis", "rows=3,5", "--plot", "ok")[0] == 1
    monkeypatch.delenv("FAKE_STUMBLE")
    assert "--plot ok: expected a number" in call("sweep", config, "--axis", "rows=3,5", "--plot", "ok")[2]


def test_a_sweep_that_was_killed_computes_only_what_is_left(call, config, monkeypatch):
    steps = importlib.import_module("fake_experiment")._steps

    def dies(config, name):
        if (config.memory.block_size, config.seed, name) == (16, 0, "vattention"):
            raise KilledError
        return steps(config, name)

    with monkeypatch.context() as patch:
        patch.setattr("fake_experiment._steps", dies)
        with pytest.raises(KilledError):
            call("sweep", config, *AXES)
    assert "3 finished" not in call("list")[1]
    assert "6 unfinished" in call("list")[1]
    assert "has not come to its end" in call("report", str(the_sweep()))[2]
    code, out, err = call("sweep", config, *AXES)
    assert code == 0
    # Two points were finished, and of the third its first part.
    assert err.count(" is finished\n") == 2
    assert out.count("computing paged") == 3
    assert out.count("computing vattention") == 4
    assert "6 finished" in call("list")[1]
    assert len(files.read_json(the_sweep() / "sweep.json")["earlier_sessions"]) == 1


def test_a_point_that_fails_its_checks_does_not_stop_the_others(call, config):
    code, out, err = call("sweep", config, "--axis", "bad=true,false", "--axis", "seed=0,1")
    assert code == 1
    summary = json.loads(out.splitlines()[-1])
    assert [point["status"] for point in summary["points"]] == ["failed", "failed", "finished", "finished"]
    assert summary["status"] == "failed"
    assert "check failed: bad=true, seed=1: paged is not ok" in err
    assert "failed" in next(row for row in out.splitlines() if " vattention " in row)
    assert "bad=true, seed=0: vattention is not ok" in (the_sweep() / "report.html").read_text()
    # It has ended all the same.
    assert call("sweep", config, "--axis", "bad=true,false", "--axis", "seed=0,1")[2].count(" is finished\n") == 4


def test_a_point_that_cannot_be_computed_is_tried_again_by_the_same_command(call, config, monkeypatch):
    monkeypatch.setenv("FAKE_STUMBLE", "refuse seed 1")
    code, out, err = call("sweep", config, "--axis", "seed=0,1,2")
    assert code == 1
    summary = json.loads(out.splitlines()[-1])
    assert [point["status"] for point in summary["points"]] == ["finished", "unfinished", "finished"]
    assert summary["status"] == "unfinished"
    assert "check failed: seed=1: rows must fit the pool, got 4; raise pool (traceback: runs/fake-" in err
    assert "rows must fit the pool" in (the_sweep() / "report.html").read_text()
    monkeypatch.delenv("FAKE_STUMBLE")
    code, out, err = call("sweep", config, "--axis", "seed=0,1,2")
    assert (code, err.count(" is finished\n"), out.count("computing paged")) == (0, 2, 1)
    assert json.loads(out.splitlines()[-1])["status"] == "finished"


def test_points_that_share_a_program_are_computed_together(call, config, monkeypatch):
    fake = importlib.import_module("fake_experiment")
    together = []

    def run_together(configs, run_dirs, progress):
        together.append([config.memory.block_size for config in configs])
        for config, run_dir in zip(configs, run_dirs, strict=True):
            yield functools.partial(fake.run, config, run_dir, progress)

    assert call("sweep", config, "--axis", "memory.block_size=16,32")[0] == 0
    alone = {p.name: files.read_json(p / "summary.json")["results"] for p in pathlib.Path("runs").glob("fake-*")}
    monkeypatch.setattr(fake, "run_together", run_together, raising=False)
    assert registry.load("fake", EXPERIMENTS).run_together is run_together
    code, _, err = call("sweep", config, "--axis", "memory.block_size=8,16,64,32")
    assert (code, together) == (0, [[8, 64]])  # 16 and 32 are finished
    assert "computing 2 of 4 points together" in err
    runs = [p for p in pathlib.Path("runs").glob("fake-*") if p.name not in alone]
    assert len(runs) == 2
    for run in runs:
        assert {"config.yaml", "manifest.json", "summary.json", "report.html"} <= {p.name for p in run.iterdir()}
    # The same runs as by themselves.
    monkeypatch.delattr(fake, "run_together")
    for point in files.read_json(
        max(pathlib.Path("runs").glob("sweep-*"), key=lambda p: p.stat().st_mtime) / "sweep.json"
    )["points"]:
        assert call("run", config, "--memory.block_size", point["values"]["memory.block_size"])[0] == 2


def test_of_points_together_one_that_cannot_be_computed_is_tried_again(call, config, monkeypatch):
    fake = importlib.import_module("fake_experiment")
    together = []

    def run_together(configs, run_dirs, progress):
        together.append([config.seed for config in configs])
        return [functools.partial(fake.run, *each, progress) for each in zip(configs, run_dirs, strict=True)]

    monkeypatch.setattr(fake, "run_together", run_together, raising=False)
    monkeypatch.setattr("experiments.sweep._MOST_TOGETHER", 2)
    monkeypatch.setenv("FAKE_STUMBLE", "refuse seed 1")
    code, out, err = call("sweep", config, "--axis", "seed=0,1,2,3,4")
    assert (code, together) == (1, [[0, 1], [2, 3], [4]])
    points = json.loads(out.splitlines()[-1])["points"]
    assert [point["status"] for point in points] == ["finished", "unfinished", *["finished"] * 3]
    assert f"check failed: seed=1: rows must fit the pool, got 4; raise pool (traceback: runs/{points[1]['run']}" in err
    monkeypatch.delenv("FAKE_STUMBLE")
    assert call("sweep", config, "--axis", "seed=0,1,2,3,4", "--plot", "peak")[0] == 2  # said of the first point
    assert call("sweep", config, "--axis", "seed=0,1,2,3,4")[0] == 0
    assert together[3:] == [[1]]


def test_what_the_experiment_refuses_for_all_points_together_is_a_sentence(call, config, monkeypatch):
    def run_together(configs, run_dirs, progress):
        raise ValueError("rows must be alike")
        yield

    monkeypatch.setattr("fake_experiment.run_together", run_together, raising=False)
    code, _, err = call("sweep", config, "--axis", "rows=3,5")
    assert code == 2
    assert re.search(r"error: rows must be alike \(traceback: runs/sweep-fake-\w+/error\.txt\)", err)
    assert "rows must be alike" in (the_sweep() / "error.txt").read_text()


def test_a_sweep_is_shown_again_from_its_files_alone(call, config):
    _, out, _ = call("sweep", config, *AXES)
    page = (the_sweep() / "report.html").read_bytes()
    for run in pathlib.Path("runs").glob("fake-*"):
        (run / "summary.json").unlink()
    pathlib.Path("fake.yaml").unlink()
    (the_sweep() / "report.html").unlink()
    code, again, _ = call("report", str(the_sweep()))
    assert code == 0
    assert again == out[out.index("fake over ") :]
    assert (the_sweep() / "report.html").read_bytes() == page


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "sweep needs an axis"),
        (["--axis", "memory.blok_size=8,16"], "unknown key memory.blok_size (did you mean 'block_size'?)"),
        (["--axis", "rows=3,3"], "--axis rows: expected every value once, got 3 again"),
        (["--axis", "rows=3,4", "--rows", "5"], "--axis rows: --rows would change nothing"),
        (["--axis", "trace=a,b"], "trace must change what is computed"),
        (["--axis", "rows=3,4", "--when", "rows=5", "bad=true"], "--when rows=5 holds at no point"),
        (["--axis", "rows=3,4", "--sead", "5"], "unknown key sead (did you mean 'seed'?)"),
        (["--axis", "rows=3,4", "other.yaml"], "sweep needs one config, got 2"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(call, config, argv, message):
    code, out, err = call("sweep", config, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not pathlib.Path("runs").exists()


def test_a_condition_changes_its_points_alone(call, config):
    code, _, _ = call("sweep", config, "--axis", "rows=3,4", "--when", "rows=4", "memory.policy=fifo")
    assert code == 0
    facts = files.read_json(the_sweep() / "sweep.json")
    assert facts["conditions"] == [{"where": {"rows": "4"}, "then": {"memory.policy": "fifo"}}]
    texts = [(pathlib.Path("runs") / point["run"] / "config.yaml").read_text() for point in facts["points"]]
    assert ["policy: fifo" in text for text in texts] == [False, True]


def test_help_says_how_a_sweep_is_called(call):
    code, out, _ = call("sweep", "--help")
    assert (code, out.startswith("usage: python -m experiments sweep CONFIG.yaml --axis KEY=VALUE")) == (0, True)
