"""The doctor names what would keep a run from working, and how to put it right."""

import hashlib
import pathlib
import pkgutil
import shutil

import pytest
import rich.console

import pallas_kernels
from experiments import doctor
from experiments.manifest import ROOT


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a model in it, in which everything is well."""
    root = tmp_path / "checkout"
    (root / doctor.CHECKPOINT).parent.mkdir(parents=True)
    (root / doctor.CHECKPOINT).write_text("{}")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def problems(out_dir, root):
    return {finding.what: finding for finding in doctor.examine(out_dir, root) if finding.problem}


def test_a_healthy_machine_has_no_fatal_problem(checkout, tmp_path, monkeypatch):
    monkeypatch.delenv(doctor.TRACE_DIR_VARIABLE, raising=False)
    findings = {finding.what: finding for finding in doctor.examine(tmp_path / "not" / "yet", checkout)}
    assert not any(finding.fatal for finding in findings.values())
    assert findings["devices"].found == "8 x cpu (cpu)"
    for kernel in (*(m.name for m in pkgutil.iter_modules(pallas_kernels.__path__) if m.ispkg), "fill_blocks"):
        assert "xla" in findings[f"kernel {kernel}"].found
    assert {"jax", "jaxlib", "flax", "polars"} <= set(findings)
    assert doctor.TRACE_DIR_VARIABLE in findings["traces"].problem
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"jax>=0.10.2,<0.13"', '"jax>=99"', "jax"),
        ('"draccus>=0.11.6"', '"a-package-that-is-not-there"', "a-package-that-is-not-there"),
        ('requires-python = ">=3.11"', 'requires-python = ">=99"', "python"),
    ],
)
def test_a_version_that_does_not_fit_is_fatal_and_says_what_is_needed(checkout, tmp_path, old, new, what):
    text = (checkout / "pyproject.toml").read_text()
    assert old in text
    (checkout / "pyproject.toml").write_text(text.replace(old, new))
    found = problems(tmp_path, checkout)
    assert found[what].fatal
    assert "is needed" in found[what].problem
    assert "uv run" in found[what].problem
    assert not any(finding.what == "devices" for finding in doctor.examine(tmp_path, checkout))  # nothing is imported


def test_a_missing_model_is_fatal_and_says_how_to_get_it(checkout, tmp_path):
    (checkout / doctor.CHECKPOINT).unlink()
    found = problems(tmp_path, checkout)["model"]
    assert found.fatal
    assert "python -m models train" in found.problem


def test_a_place_that_cannot_be_written_is_fatal(checkout):
    if not pathlib.Path("/proc/self").exists():
        pytest.skip("needs a read-only file system")
    found = problems(pathlib.Path("/proc/runs"), checkout)["out_dir"]
    assert found.fatal
    assert "choose another --out_dir" in found.problem


def test_a_kernel_that_does_not_run_here_is_told_with_its_reason(checkout, tmp_path, monkeypatch):
    def refuses(*args, **kwargs):
        raise NotImplementedError("needs a GPU")

    monkeypatch.setattr("pallas_kernels.kv_write.api.BACKENDS", {"xla": refuses})
    found = problems(tmp_path, checkout)["kernel kv_write"]
    assert found.fatal
    assert "xla does not run here: needs a GPU" in found.problem


def test_traces_are_found_and_compared_with_their_published_hashes(checkout, tmp_path, monkeypatch):
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv(doctor.TRACE_DIR_VARIABLE, str(traces))
    assert "no .csv or .jsonl file" in problems(tmp_path, checkout)["traces"].found
    (traces / "a.csv").write_text("good")
    (traces / "b.jsonl.gz").write_text("good")
    digest = hashlib.sha256(b"good").hexdigest()
    (traces / "SHA256SUMS").write_text(f"{digest}  a.csv\n{digest}  b.jsonl.gz\n{digest}  not_here.csv\n")
    assert "traces" not in problems(tmp_path, checkout)
    (traces / "a.csv").write_text("bad")
    assert "a.csv" in problems(tmp_path, checkout)["traces"].problem
    assert "b.jsonl.gz" not in problems(tmp_path, checkout)["traces"].problem


def test_the_exit_code_says_whether_a_run_would_work(monkeypatch, tmp_path, capsys):
    console = rich.console.Console(width=120)
    note = doctor.Finding("traces", "none", "set a variable")
    monkeypatch.setattr(doctor, "examine", lambda out_dir: iter([note]))
    assert doctor.run(tmp_path, console) == 0
    assert "note: traces: set a variable" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda out_dir: iter([note, note._replace(fatal=True)]))
    assert doctor.run(tmp_path, console) == 1
    assert "problem: traces: set a variable" in capsys.readouterr().out
