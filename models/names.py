"""Models that go by a name, and where they are."""

import difflib
import os
import pathlib

from models.fetch import FETCHED, cache_dir

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


def find_model(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
    """Where a model is: one of this repository's checkpoints, a fetched one, or else a path.

    Raises:
      FileNotFoundError: it was not fetched, or there is neither a model nor a file of this name.
    """
    name = os.fspath(name_or_path)
    own = {path.name: path for path in sorted(CHECKPOINTS.iterdir()) if path.is_dir()}
    if name in own:
        return own[name]
    if name in FETCHED:
        path = cache_dir() / FETCHED[name].file
        if not path.is_file():
            raise FileNotFoundError(f"{name} is not at {path}; get it with `python -m models fetch {name}`")
        return path
    if pathlib.Path(name).exists():
        return pathlib.Path(name)
    names = [*own, *FETCHED]
    close = difflib.get_close_matches(name, names, n=1)
    advice = f"; did you mean {close[0]!r}?" if close else ""
    raise FileNotFoundError(f"model: expected {', '.join(names)} or a path that exists, got {name!r}{advice}")
