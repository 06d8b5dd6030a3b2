"""Physical lines of a trace file as records, each with its 1-based line number."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]


class TraceError(ValueError):
    """A trace file that cannot be taken as it is.

    Attributes:
        file: Name of the file.
        line: 1-based physical line; None where the trouble is not in one line.
    """

    def __init__(self, file: str, line: int | None, problem: str) -> None:
        super().__init__(f"{file}{'' if line is None else f', line {line}'}: {problem}")
        self.file = file
        self.line = line


def csv_records(file: str, data: bytes, columns: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    """Rows of a CSV file whose header is exactly `columns`, as (line, column -> text).

    A record is one physical line, so a quoted field cannot hold a line end.

    Raises:
        TraceError: On another header, another number of fields, an empty line, broken quotes or text not in UTF-8.
    """
    lines = _lines(file, data)
    line, header = next(lines, (1, ""))
    if tuple(_fields(file, line, header)) != columns:
        raise TraceError(file, line, f"expected the header {','.join(columns)!r}, got {header!r}")
    for line, text in lines:
        fields = _fields(file, line, text)
        if len(fields) != len(columns):
            raise TraceError(file, line, f"expected {len(columns)} fields, got {len(fields)}: {text!r}")
        yield line, dict(zip(columns, fields, strict=True))


def json_records(file: str, data: bytes, keys: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    """Lines of a JSON Lines file, each an object with exactly `keys`, as (line, key -> value).

    Raises:
        TraceError: On a line that is not such an object, is empty, or is not in UTF-8.
    """
    for line, text in _lines(file, data):
        try:
            pairs = json.loads(text, object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as e:
            raise TraceError(file, line, f"expected a JSON object, got {text[:80]!r} ({e})") from e
        if not isinstance(pairs, _Pairs) or sorted(key for key, _ in pairs) != sorted(keys):
            raise TraceError(file, line, f"expected an object with the keys {', '.join(keys)}, got {text[:80]!r}")
        yield line, dict(pairs)


def decompressed(file: str, data: bytes) -> bytes:
    """The contents of a gzip file.

    Raises:
        TraceError: If the bytes are not a whole gzip file.
    """
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as e:
        raise TraceError(file, None, f"expected a whole gzip file: {e}") from e


class _Pairs(list[tuple[str, Any]]):
    """An object's pairs as they stand, so that a key given twice is seen; a plain list is a JSON array."""


def _lines(file: str, data: bytes) -> Iterator[tuple[int, str]]:
    raw = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if raw[-1] == b"":  # the file ends with a line end, or is empty
        raw.pop()
    for line, content in enumerate(raw, start=1):
        try:
            yield line, content.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as e:
            raise TraceError(file, line, f"expected UTF-8 text: {e}") from e


def _fields(file: str, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as e:
        raise TraceError(file, line, f"expected comma-separated fields: {e}") from e
