"""Readers of public serving traces. A row is read right or refused with its file and line; nothing is repaired."""

import dataclasses
import datetime
import hashlib
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from experiments.workloads.records import Record, TraceError, csv_records, decompressed, json_records
from experiments.workloads.workload import Provenance, Workload

TraceKind = Literal["azure", "sharegpt_stats", "mooncake", "burstgpt"]
ZeroOutput = Literal["drop", "keep", "refuse"]

_EPOCH = datetime.datetime(1970, 1, 1)
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d+))?(?:\+00:00)?", re.ASCII)
_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d+))?", re.ASCII)
_MAX_MS = 1e15  # beyond this a float64 no longer tells microseconds apart


class _Row(NamedTuple):
    arrival_ns: int | None  # an integer, so that a time of day loses no digit before it is made relative
    prompt_len: int
    output_len: int
    hash_ids: list[int]


def read_trace(
    kind: TraceKind,
    path: pathlib.Path,
    *,
    num_requests: int | None = None,
    zero_output: ZeroOutput = "refuse",
    sha256: str | None = None,
    file: str | None = None,
) -> Workload:
    """Reads a trace as it is: no length or time is changed.

    Understood are UTF-8 with or without a byte order mark, line ends LF or CRLF, a last line with or without one,
    and gzip where the name ends in `.gz`. Times are kept to the nanosecond; those of `azure` count from its first
    row, `mooncake` and `burstgpt` keep their own zero, and `sharegpt_stats` has none: every request arrives at 0.

    Args:
        kind: The format.
        path: The file.
        num_requests: Take the first so many requests and read no further; None takes all.
        zero_output: What to do with rows that ask for no output token: leave them out (`drop`), take them as requests
            of `output_len` 0 (`keep`), or raise (`refuse`). The provenance counts them either way.
        sha256: Expected hash of the file's bytes; None accepts any.
        file: Name for messages and the provenance; None takes the path's last part.

    Raises:
        TraceError: If the file is missing, is not the expected one, holds fewer than `num_requests`, or has a row that
            is not exactly what the format says.
    """
    file = path.name if file is None else file
    data, digest = read_file(path, sha256, file)
    if path.suffix == ".gz":
        data = decompressed(file, data)
    rows: list[_Row] = []
    rows_read = zero_rows = 0
    for line, row in _rows(kind, file, data):
        rows_read += 1
        if row.output_len == 0:
            zero_rows += 1
            if zero_output == "drop":
                continue
            if zero_output != "keep":
                raise TraceError(file, line, "expected at least 1 output token, got 0; set zero_output to drop or keep")
        if row.prompt_len == 0:
            raise TraceError(file, line, "expected at least 1 prompt token, got 0")
        rows.append(row)
        if len(rows) == num_requests:
            break
    if len(rows) < (num_requests or 1):
        raise TraceError(file, None, f"expected at least {num_requests or 1} requests, got {len(rows)}")

    timed = rows[0].arrival_ns is not None
    block_size = _FORMATS[kind].hash_block_size
    return Workload(
        arrival_ms=np.array([(row.arrival_ns or 0) / 1e6 for row in rows]),
        prompt_len=np.array([row.prompt_len for row in rows], np.int32),
        output_len=np.array([row.output_len for row in rows], np.int32),
        hash_ids=tuple(np.array(row.hash_ids, np.int64) for row in rows) if block_size else None,
        hash_block_size=block_size,
        provenance=Provenance(
            source=kind,
            file=file,
            sha256=digest,
            rows_read=rows_read,
            lengths="as in the trace",
            arrivals="as in the trace" if timed else "all at 0: the trace has no times",
            zero_output=zero_rows,
            zero_output_dropped=zero_rows if zero_output == "drop" else 0,
        ),
    )


def read_file(path: pathlib.Path, sha256: str | None, file: str) -> tuple[bytes, str]:
    """The bytes of a trace file as they lie on disk, and their hash.

    Args:
        path: The file.
        sha256: Expected hash; None accepts any.
        file: Name for messages.

    Raises:
        TraceError: If the file cannot be read or its hash is another.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TraceError(file, None, f"cannot be read: {e.strerror}") from e
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise TraceError(file, None, f"expected the file whose sha256 is {sha256}, got {digest}")
    return data, digest


def _rows(kind: TraceKind, file: str, data: bytes) -> Iterator[tuple[int, _Row]]:
    """Rows with their lines, each checked by itself and against those before it."""
    form = _FORMATS[kind]
    records = json_records if form.json_lines else csv_records
    zero_ns = previous_ns = None
    parents: dict[int, int | None] = {}
    for line, record in records(file, data, form.columns):
        try:
            row = form.parse(record)
            if row.arrival_ns is not None:
                if zero_ns is None or previous_ns is None:
                    zero_ns, previous_ns = (row.arrival_ns if form.wall_clock else 0), row.arrival_ns
                if row.arrival_ns < previous_ns:
                    late_ms = (previous_ns - row.arrival_ns) / 1e6
                    raise ValueError(f"expected times in order, got one {late_ms} ms before the row above")
                previous_ns = row.arrival_ns
                row = row._replace(arrival_ns=row.arrival_ns - zero_ns)
            for parent, hash_id in zip([None, *row.hash_ids], row.hash_ids, strict=False):
                if parents.setdefault(hash_id, parent) != parent:
                    raise ValueError(
                        f"expected hash id {hash_id} to follow {parents[hash_id]} as it did above, it follows {parent}"
                    )
        except ValueError as e:
            raise TraceError(file, line, str(e)) from e
        yield line, row


def _azure(record: Record) -> _Row:
    match = _CLOCK.fullmatch(record["TIMESTAMP"])
    if match is None:
        raise ValueError(f"expected TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff, got {record['TIMESTAMP']!r}")
    try:
        since = datetime.datetime.fromisoformat(match[1]) - _EPOCH
    except ValueError as e:
        raise ValueError(f"expected TIMESTAMP as a time that exists, got {record['TIMESTAMP']!r}: {e}") from e
    return _Row(
        _nanoseconds(since.days * 86400 + since.seconds, match[2]),
        _digits(record, "ContextTokens"),
        _digits(record, "GeneratedTokens"),
        [],
    )


def _sharegpt_stats(record: Record) -> _Row:
    prompt_len, output_len = _digits(record, "num_prefill_tokens"), _digits(record, "num_decode_tokens")
    _check_total(record, "num_total_tokens", prompt_len + output_len)
    # Derived from the two counts, so it can only say that the row was damaged.
    expected = prompt_len / output_len if output_len else math.inf
    if not math.isclose(_float(record["pd_ratio"]), expected, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(f"expected pd_ratio = {expected}, got {record['pd_ratio']!r}")
    return _Row(None, prompt_len, output_len, [])


def _burstgpt(record: Record) -> _Row:
    match = _SECONDS.fullmatch(record["Timestamp"])
    if match is None:
        raise ValueError(f"expected Timestamp as seconds >= 0, got {record['Timestamp']!r}")
    prompt_len, output_len = _digits(record, "Request tokens"), _digits(record, "Response tokens")
    _check_total(record, "Total tokens", prompt_len + output_len)
    return _Row(_nanoseconds(int(match[1]), match[2]), prompt_len, output_len, [])


def _mooncake(record: Record) -> _Row:
    timestamp, hash_ids = record["timestamp"], record["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp < _MAX_MS:
        raise ValueError(f"expected timestamp as milliseconds >= 0, got {timestamp!r}")
    prompt_len, output_len = (_whole(name, record[name]) for name in ("input_length", "output_length"))
    if not isinstance(hash_ids, list) or any(type(i) is not int or not 0 <= i < 2**63 for i in hash_ids):
        raise ValueError(f"expected hash_ids as a list of whole numbers from 0 to 2^63 - 1, got {hash_ids!r:.80}")
    blocks = -(-prompt_len // _FORMATS["mooncake"].hash_block_size)
    if len(hash_ids) != blocks:
        raise ValueError(f"expected {blocks} hash ids for {prompt_len} prompt tokens, got {len(hash_ids)}")
    return _Row(round(timestamp * 1_000_000), prompt_len, output_len, hash_ids)


def _digits(record: Record, column: str) -> int:
    # int() alone would also take ' 7', '+7', '1_000' and the digits of other scripts.
    text = record[column]
    return _whole(column, int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text)


def _whole(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"expected {name} as a whole number from 0 to 2^31 - 1, got {value!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # equal to nothing, so refused where it is compared


def _check_total(record: Record, column: str, total: int) -> None:
    if _digits(record, column) != total:
        raise ValueError(f"expected {column} = {total}, the sum of the two others, got {record[column]}")


def _nanoseconds(seconds: int, fraction: str | None) -> int:
    return seconds * 1_000_000_000 + int((fraction or "")[:9].ljust(9, "0"))


@dataclasses.dataclass(frozen=True)
class _Format:
    columns: tuple[str, ...]
    parse: Callable[[Record], _Row]  # raises ValueError that says what was expected and what came
    json_lines: bool = False
    wall_clock: bool = False  # times are of a day, so they count from the first row
    hash_block_size: int = 0


# Where each format is published: Azure/AzurePublicDataset (data/AzureLLMInferenceTrace_*.csv), microsoft/sarathi-serve
# (data/processed_traces) and microsoft/vattention (scripts/artifact_asplos25/traces), kvcache-ai/Mooncake
# (FAST25-release/traces, whose ids name 512 tokens each), HPMLL/BurstGPT (data).
_FORMATS: dict[TraceKind, _Format] = {
    "azure": _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, wall_clock=True),
    "sharegpt_stats": _Format(
        ("num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio"), _sharegpt_stats
    ),
    "mooncake": _Format(
        ("timestamp", "input_length", "output_length", "hash_ids"),
        _mooncake,
        json_lines=True,
        hash_block_size=512,
    ),
    "burstgpt": _Format(
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"), _burstgpt
    ),
}
