"""Files that hold one JSON object, and errors that name them."""

import json
import os
import pathlib
from typing import Any


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: The file is missing or holds something else.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON file, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
