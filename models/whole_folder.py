"""Folders that appear whole or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

MODEL = "config.json"  # what every folder with a model has


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuses a path that is taken: by anything, or with `overwrite` by anything but a model or an empty folder.

    Raises:
      FileExistsError: Something is there that must stay.
      ValueError: The path is empty.
    """
    if not os.fspath(path):
        raise ValueError("expected a path to write to, got an empty one")
    place = pathlib.Path(path)
    if place.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another path, or set overwrite to replace it")
    if place.exists() and not (place / MODEL).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise FileExistsError(
            f"{path} exists and is no folder with a {MODEL}, and nothing else is replaced; give another path"
        )


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A folder to fill. It gets its final name at the end of the context, and vanishes if that ends in an error.

    Raises:
      FileExistsError: `path` is taken and `overwrite` is false.
    """
    final = pathlib.Path(path).resolve()
    check_free(final, overwrite)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():  # moved aside first, so that not even a kill leaves half of it under its name
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
