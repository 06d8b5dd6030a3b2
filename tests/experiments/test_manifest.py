"""The manifest names the code and what changed between the sessions of a run."""

import subprocess

import pytest

from experiments import manifest


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init")
    (root / "a").write_text("1")
    git(root, "add", "a")
    git(root, "commit", "-m", "one")
    return root


def test_a_checkout_is_named_by_its_revision_and_whether_it_was_changed(checkout):
    clean = manifest.git_state(checkout)
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (checkout / "a").write_text("2")
    assert manifest.git_state(checkout) == clean | {"dirty": True}
    git(checkout, "commit", "-am", "two")
    assert manifest.git_state(checkout)["revision"] != clean["revision"]


def test_no_git_is_no_revision(checkout, tmp_path, monkeypatch):
    copy = checkout / "vendored"
    copy.mkdir()
    assert manifest.git_state(copy) is None  # inside a repository that is not its own
    assert manifest.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert manifest.git_state(checkout) is None


def test_a_resumed_run_keeps_its_inputs_and_tells_what_changed():
    first = manifest.begin("x-1-0", "hash", 0, ["run", "a b.yaml"])
    assert first["command"] == "python -m experiments run 'a b.yaml'"
    first["inputs"]["trace"] = "abc"
    first["kernels"] = {"kv_write": [{"backend": "xla"}]}
    second = manifest.resume(manifest.begin("x-1-0", "hash", 0, []), first)
    assert second["inputs"] == {"trace": "abc"}
    assert (second["kernels"], second["earlier_sessions"][0]["kernels"]) == ({}, first["kernels"])
    assert manifest.differences(second) == []
    other = first | {"versions": first["versions"] | {"jax": "0"}, "git": "other"}
    third = manifest.resume(other, second)
    assert len(third["earlier_sessions"]) == 2
    assert manifest.differences(third) == [
        f"git ({first['git']} -> other)",
        f"versions (jax {first['versions']['jax']} -> 0)",
    ]


def test_a_change_names_what_changed_and_nothing_else():
    assert manifest.change("git", {"revision": "a", "dirty": False}, {"revision": "a", "dirty": False}) == ""
    assert (
        manifest.change("v", {"jax": "1", "numpy": "2"}, {"jax": "1", "flax": "3"})
        == "v (numpy 2 -> None, flax None -> 3)"
    )
    assert manifest.change("sha256", "a", "b") == "sha256 (a -> b)"


def test_flags_that_change_what_is_compiled_are_recorded(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.setenv("SECRET", "x")
    found = manifest.environment()
    assert found["XLA_FLAGS"] == "--xla_a=1"
    assert found["JAX_ENABLE_X64"] == "0"
    assert "SECRET" not in found
