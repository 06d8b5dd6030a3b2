"""The directory of one run: made once, locked while in use, resumed if it was killed, never overwritten.

`runs/<experiment>-<hash>-<seed>/` holds

    config.yaml      the resolved config
    manifest.json    what it was computed with
    parts/<name>/    the finished parts of a run that can be resumed
    *.parquet        its tables, for most experiments `steps` and `requests`
    report.html      everything for a reader
    error.txt        the traceback, while what stopped the run is not put right
    summary.json     the results; written last, so a run is finished exactly if it is there

Every file and every part appears whole or not at all, whenever the process is killed.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any, Self

import polars as pl

from experiments import files, manifest
from experiments.errors import UserError
from pallas_kernels import choices

SUMMARY, REPORT, CONFIG, MANIFEST = "summary.json", "report.html", "config.yaml", "manifest.json"
ERROR = "error.txt"
SWEEP = "sweep.json"
"""What stands in the directory of a sweep, `runs/sweep-<experiment>-<hash>/`, instead of a config and a summary."""
_LOCK, _PARTS = ".lock", "parts"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Folder:
    """A folder whose files are whole or not there. The suffix of a name may be left out."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def write_parquet(self, name: str, frame: pl.DataFrame) -> None:
        """Writes a table; measured times belong in columns named `wall_*`."""
        files.write_parquet(_path(self.path, name, ".parquet"), frame)

    def read_parquet(self, name: str) -> pl.DataFrame:
        """Reads a table back."""
        return files.read_parquet(_path(self.path, name, ".parquet"))

    def write_json(self, name: str, value: Any) -> None:
        """Writes JSON."""
        files.write_json(_path(self.path, name, ".json"), value)

    def read_json(self, name: str) -> Any:
        """Reads JSON back."""
        return files.read_json(_path(self.path, name, ".json"))


class RunDirectory(Folder):
    """The directory of a run in progress, held under a lock from `open` to `close`."""

    def __init__(self, path: pathlib.Path, lock: int) -> None:
        super().__init__(path)
        self._lock = lock

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Makes the directory or takes up an unfinished one.

        Raises:
          UserError: it cannot be written, another process runs in it, or its run is finished.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another --out_dir") from error
        try:
            _take(lock, path)
            if (path / SUMMARY).exists():
                raise UserError(
                    f"{path} is finished and is not overwritten. To see it: python -m experiments report {path}. "
                    "To run again: another --seed or another --out_dir"
                )
            _clear_unfinished(path)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock)

    def close(self) -> None:
        """Releases the lock; the process' end does it too."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finished_part(self, name: str) -> Folder | None:
        """The files of a part that was finished, by this process or by one before it; None if it was not."""
        path = self.path / _PARTS / _checked(name)
        return Folder(path) if path.is_dir() else None

    def require_part(self, name: str) -> Folder:
        """The files of a part that must be there by now.

        Raises:
          RuntimeError: it is not.
        """
        part = self.finished_part(name)
        if part is None:
            raise RuntimeError(f"part {name!r} of {self.path} is missing")
        return part

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Folder]:
        """A folder to write one part into; the part exists once the block ends without an exception.

            if run_dir.finished_part(name) is None:
                with run_dir.part(name) as part:
                    part.write_parquet("steps.parquet", steps)

        Raises:
          ValueError: the part is finished already, or its name is no file name.
        """
        if self.finished_part(name) is not None:
            raise ValueError(f"part {name!r} of {self.path} is finished; ask finished_part() first")
        final = self.path / _PARTS / name
        temporary = final.with_name(f".{name}.tmp")
        temporary.mkdir(parents=True)
        try:
            yield Folder(temporary)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        # Before the part is there, as whoever takes up the run after a kill does not compute it again.
        if (self.path / MANIFEST).exists():
            self.write_json(MANIFEST, self.read_json(MANIFEST) | {"kernels": choices.so_far()})
        temporary.rename(final)
        files.sync_folder(final.parent)

    def add_manifest(self, **entries: Any) -> None:
        """Adds what the run was computed from (a trace's SHA-256, a model's) to its manifest.

        Raises:
          UserError: an unfinished run is taken up with another value, so that its parts would not belong together.
        """
        known = self.read_json(MANIFEST)
        inputs = known["inputs"]
        changes = [manifest.change(name, inputs.get(name, value), value) for name, value in entries.items()]
        if any(changes):
            since = manifest.differences(known)
            raise UserError(
                f"{self.path} was begun with other inputs: {', '.join(filter(None, changes))}; "
                + (f"since then changed {', '.join(since)}; " if since else "")
                + "restore what it was begun with, or choose another --out_dir"
            )
        self.write_json(MANIFEST, known | {"inputs": inputs | entries})


def experiment_of(path: pathlib.Path) -> str:
    """The experiment in the name of a run directory: a killed run may have no file to say it."""
    return path.resolve().name.rsplit("-", 2)[0]


def finished_parts(path: pathlib.Path) -> list[str]:
    """Names of the finished parts of a run."""
    return sorted(p.name for p in (path / _PARTS).glob("*") if not p.name.startswith("."))


def is_running(path: pathlib.Path) -> bool:
    """Whether a live process holds the directory."""
    try:
        lock = os.open(path / _LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _path(folder: pathlib.Path, name: str, suffix: str) -> pathlib.Path:
    return folder / (name if name.endswith(suffix) else name + suffix)


def _take(lock: int, path: pathlib.Path) -> None:
    """Locks, or says who holds the lock. The kernel drops it with its process: none is ever stale."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise UserError(
            f"{path} is in use by process {holder or '?'}; wait for it, or choose another --seed"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _clear_unfinished(path: pathlib.Path) -> None:
    """Removes what a killed process was about to write."""
    for leftover in (*path.glob(".*.tmp"), *(path / _PARTS).glob(".*.tmp")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name of a part must be letters, digits, '.', '_' and '-', got {name!r}")
    return name
