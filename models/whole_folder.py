"""Folders that appear whole or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuses a path that is taken.

    Raises:
      FileExistsError: Something is there and `overwrite` is false.
    """
    if pathlib.Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another path, or set overwrite to replace it")


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
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
