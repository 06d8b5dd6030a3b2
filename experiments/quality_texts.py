"""What quality is measured on: two kinds of text that every CPython carries, and files of one's own.

`prose` is the part of the language reference that the repository's own model was not trained on; `code` is the source
of some modules of the standard library. Which words they hold differs between Python versions, so every text is named
by its hash. What static scales are calibrated on is other text of the same kind, never a part of what is evaluated.
"""

import dataclasses
import hashlib
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from models.text import load_corpus

EVALUATED = ("fractions", "heapq", "textwrap", "shlex", "statistics", "argparse")
CALIBRATED = ("calendar", "string", "difflib", "configparser", "csv", "datetime")
"""Modules of the standard library, written in Python and none of them a part of another."""
SHARE = 10  # one in so many bytes of a file is for calibration: its beginning

Tokens = Int32[np.ndarray, " tokens"]
Windows = Int32[np.ndarray, "windows width"]
Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """One text.

    Attributes:
      kind: `prose` or `code`, which CPython carries, or a `file` of one's own.
      path: of the file, in UTF-8; says where it lies, and stays out of the run's identity.
      sha256: expected hash of the text; empty accepts any, and the run fills it in.
    """

    kind: Literal["prose", "code", "file"] = "prose"
    path: pathlib.Path | None = None
    sha256: str = ""


class Text(NamedTuple):
    """A text, and other text of its kind."""

    evaluated: str
    calibration: str

    @property
    def sha256(self) -> str:
        """Hash of both."""
        digest = hashlib.sha256(self.evaluated.encode())
        digest.update(b"\0" + self.calibration.encode())
        return digest.hexdigest()


def load_text(name: str, config: TextConfig) -> Text:
    """Reads a text.

    Raises:
      ValueError: it is not the one that the config names, a path is missing or too many, or a file is not UTF-8.
      OSError: a file cannot be read.
    """
    if (config.path is not None) != (config.kind == "file"):
        raise ValueError(f"texts.{name}.path: expected a path with kind `file` and none otherwise, got {config.path}")
    text = _read(name, config)
    if config.sha256 not in ("", text.sha256):
        raise ValueError(
            f"texts.{name}.sha256: expected the text {config.sha256}, got {text.sha256}; another Python carries "
            "another text: use the one of then, or leave sha256 out"
        )
    return text


def _read(name: str, config: TextConfig) -> Text:
    if config.kind == "prose":
        corpus = load_corpus()
        return Text(corpus.heldout.tobytes().decode(), corpus.train.tobytes().decode())
    if config.kind == "code" or config.path is None:
        return Text(_source(EVALUATED), _source(CALIBRATED))
    try:
        text = config.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"texts.{name}.path: expected a file in UTF-8, got {config.path}: {error}") from error
    return Text(text[len(text) // SHARE :], text[: len(text) // SHARE])


def _source(modules: Sequence[str]) -> str:
    specs = {name: importlib.util.find_spec(name) for name in modules}
    origins = {name: spec.origin for name, spec in specs.items() if spec is not None and spec.origin is not None}
    if missing := specs.keys() - origins.keys():
        raise ValueError(f"kind: expected a Python whose standard library has source, got none of {sorted(missing)}")
    return "\n\n".join(pathlib.Path(origins[name]).read_text(encoding="utf-8") for name in modules)


def cut(tokens: Tokens, count: int, context: int, name: str) -> Windows:
    """Windows that are spread evenly over a text and share no token that is predicted.

    Args:
      tokens: of the text.
      count: windows.
      context: tokens that a window predicts; it has one more, its first.
      name: of the text, for the error.

    Raises:
      ValueError: the text is too short for so many windows.
    """
    if tokens.size < count * context + 1:
        raise ValueError(
            f"texts.{name}: expected at least {count * context + 1} tokens for {count} windows of context {context}, "
            f"got {tokens.size}; ask for fewer or shorter windows, or give a longer text"
        )
    starts = np.linspace(0, tokens.size - context - 1, count).astype(int)
    return np.stack([tokens[start : start + context + 1] for start in starts])


def encode_text(encode: Encode, text: str, limit: int | None = None) -> Tokens:
    """Tokens of a text, or of as much of its beginning as gives at least `limit` of them if it has so many."""
    size = len(text) if limit is None else 8 * limit
    tokens = np.asarray(encode(text[:size]), np.int32)
    return tokens if limit is None else tokens[:limit]


def token_sha256(tokens: Int32[np.ndarray, "..."]) -> str:
    """Hash of token ids."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()
