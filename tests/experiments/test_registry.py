"""Every experiment that is registered keeps the contract, and a list costs no import of JAX."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from experiments import cli, registry, run
from experiments.errors import UserError

HERE = pathlib.Path(__file__).parent
CONFIGS = [path for path in sorted(pathlib.Path("configs").glob("**/*.yaml")) if "\nexperiment:" in path.read_text()]


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_a_registered_experiment_keeps_the_contract(name):
    experiment = registry.load(name, registry.EXPERIMENTS)
    module = importlib.import_module(registry.EXPERIMENTS[name])
    assert registry.description(registry.EXPERIMENTS[name]) == experiment.description == module.DESCRIPTION
    assert "\n" not in experiment.description
    assert {"experiment", "seed"} <= set(experiment.config_class.__dataclass_fields__)
    assert experiment.config_class.__dataclass_params__.frozen


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_is_one_of_its_experiment(path):
    loaded = run.load(path, {}, registry.EXPERIMENTS)
    assert loaded.experiment.parts(loaded.config) is not None
    assert loaded.comment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_steps": "1280"}, "short_steps: expected between 0 and long_steps = 1280, got 1280"),
        ({"num_blocks": "20735"}, "num_blocks: expected at least 20736, so that 256 rows can grow"),
        ({"repeats": "0"}, "rows, block_size, scale, repeats: expected at least 1, got 256, 16, 8 and 0"),
    ],
)
def test_a_measurement_of_nothing_is_refused_before_it_leaves_a_directory(change, message):
    with pytest.raises(UserError, match=message):
        run.load(pathlib.Path("configs/allocator_bench/default.yaml"), change, registry.EXPERIMENTS)


def test_a_list_imports_no_experiment_and_no_jax(tmp_path):
    code = (
        "import sys; from experiments.cli import main; code = main(['list', '--out_dir', sys.argv[1]]); "
        "loaded = {'jax', 'matplotlib'} & set(sys.modules); sys.exit(f'{code} {loaded}' if loaded or code else 0)"
    )
    listed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "")
    for name in registry.EXPERIMENTS:
        assert name in listed.stdout
    for path in CONFIGS:
        assert str(path) in listed.stdout


def test_a_list_shows_configs_with_their_question_and_runs_with_their_status(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "fake").mkdir(parents=True)
    pathlib.Path("configs/fake/one.yaml").write_text("# Does [this] work?\n# More.\nexperiment: fake\n")
    pathlib.Path("configs/train.yaml").write_text("# Of another tool\nsteps: 3\n")
    pathlib.Path("configs/broken.yaml").write_text("a: [\n")
    for run_id, summary in (("a-0", '{"status": "finished"}'), ("b-1", None), ("c-0", "{"), ("d-0", None)):
        path = pathlib.Path(f"runs/fake-{run_id}")
        path.mkdir(parents=True)
        if summary:
            (path / "summary.json").write_text(summary)
    pathlib.Path("runs/fake-a-0/manifest.json").write_text('{"started": "2026-01-02", "earlier_sessions": []}')
    resumed = '{"started": "2026-01-04", "earlier_sessions": [{"started": "2026-01-03"}]}'
    pathlib.Path("runs/fake-b-1/manifest.json").write_text(resumed)
    pathlib.Path("runs/fake-d-0/error.txt").write_text("Traceback")
    pathlib.Path("runs/other").mkdir()
    assert cli.main(["list"], {"fake": "fake_experiment"}) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "fake A tiny experiment that <counts>." in lines
    assert "configs/fake/one.yaml Does [this] work?" in lines
    assert "More." not in out
    assert "train.yaml" not in out
    assert "other" not in out
    assert {
        "fake-a-0 2026-01-02 finished",
        "fake-b-1 2026-01-03 unfinished",
        "fake-c-0 summary.json is damaged",
        "fake-d-0 unfinished, error.txt says why",
    } <= set(lines)
    assert "configs/broken.yaml is not valid YAML" in err


def test_a_description_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nameless_experiment.py").write_text("VALUE = 1\n")
    assert "has no DESCRIPTION" in registry.description("nameless_experiment")
    assert "cannot be found" in registry.description("missing_experiment")
