"""Files that are either whole or not there: written beside their name, synced, then renamed over it."""

import io
import json
import os
import pathlib
from typing import Any

import polars as pl

from experiments.errors import UserError

WALL = "wall_"
"""Prefix of columns that hold measured times: all else in a table repeats bit for bit."""


def write_bytes(path: pathlib.Path, data: bytes) -> None:
    """Writes a file so that no crash, at any moment, leaves a part of it under its name.

    Raises:
      UserError: the file system refuses; names the file and the reason.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def require_writable(path: pathlib.Path) -> None:
    """Refuses a file that could not be written, before work whose results would go into it.

    Raises:
      UserError: its folder is not there or may not be written, or the path is a folder.
    """
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: its folder may not be written")


def sync_folder(path: pathlib.Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes UTF-8 text, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes JSON, whole or not at all; NaN and infinities are not JSON and raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def write_parquet(path: pathlib.Path, frame: pl.DataFrame) -> None:
    """Writes a table, whole or not at all; equal tables give equal bytes."""
    buffer = io.BytesIO()
    # One row group: how a table was put together from pieces must not show in its bytes.
    frame.write_parquet(buffer, compression="zstd", row_group_size=max(1, len(frame)))
    write_bytes(path, buffer.getvalue())


def read_parquet(path: pathlib.Path) -> pl.DataFrame:
    """Reads a table.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        return pl.read_parquet(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def same_contents(path: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two tables agree in names, types and every value, measured times (`wall_*`) left out."""
    frames = [read_parquet(p).select(pl.exclude(f"^{WALL}.*$")) for p in (path, other)]
    return frames[0].schema == frames[1].schema and frames[0].equals(frames[1], null_equal=True)
