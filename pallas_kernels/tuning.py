"""The sizes with which kernels are made: tuned ones where there are any for the device and the shapes, else defaults.

`tuned/` has one JSON file for each kind of device:

    {"device_kind": "TPU v6 lite",
     "entries": {"paged_decode/d128_kv8_g4_b16_bf16": {
         "sizes": {"logits": 524288}, "how": "modelled", "metric": "cycles_per_seq", "value": 1.0, "default": 1.1,
         "versions": {"jax": "0.10.2", "libtpu": "0.0.52"}}}}

An entry names the fields that differ from the default, whether it was measured on the device or modelled from the
compiler's schedule, and what it and the default came to. `python -m experiments tune CONFIG.yaml --install` writes
such entries; without them every kernel has its default.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choices

TABLES = pathlib.Path(__file__).parent / "tuned"
DEFAULT, CANDIDATE = "default", "candidate"
SHORT: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8",
}

Entries = Mapping[str, Mapping[str, Any]]


class SizesError(RuntimeError):
    """Sizes that no kernel can be made with, or a damaged table of them.

    Not a ValueError: `dispatch` takes that for a call that a kernel cannot do, and would go on to a slower backend
    without a word.
    """


_candidate: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("candidate", default=None)


def entry_name(
    kernel: str,
    *,
    head_dim: int,
    kv_heads: int,
    group: int,
    block_size: int | None,
    q_dtype: jax.typing.DTypeLike,
    kv_dtype: jax.typing.DTypeLike,
) -> str:
    """The name of an entry: what a kernel's best sizes depend on.

    Args:
      kernel: paged_decode, paged_prefill, contiguous_decode or contiguous_prefill.
      head_dim: elements per head.
      kv_heads: key and value heads, of this device.
      group: query heads for each of them.
      block_size: slots in a block; None for a range.
      q_dtype: dtype of queries.
      kv_dtype: dtype of stored keys and values; left out of the name if it is that of queries.
    """
    dtypes = dict.fromkeys(SHORT[jnp.dtype(dtype).name] for dtype in (q_dtype, kv_dtype))
    blocks = [] if block_size is None else [f"b{block_size}"]
    return "_".join([f"{kernel}/d{head_dim}", f"kv{kv_heads}", f"g{group}", *blocks, *dtypes])


def check_power_of_two(argument: str, value: int, *, at_least: int = 1) -> None:
    """Raises a SizesError unless a size is a power of two, and no smaller than it may be."""
    if value < at_least or value & (value - 1):
        raise SizesError(f"{argument} must be a power of two of at least {at_least}, got {value}")


def choose(name: str, default: Any, device_kind: str | None) -> Any:
    """The sizes for a kernel, and a note of where they come from.

    Args:
      name: of the entry.
      default: a frozen dataclass of sizes.
      device_kind: as `jax.Device.device_kind` spells it; None where kernels run in an interpreter.

    Returns:
      `default` with what the table has for the name; it is left to the compiler to refuse what does not fit.

    Raises:
      SizesError: the table is damaged, or an entry has a field that `default` does not have or a value that it refuses.
    """
    known = {field.name: field for field in dataclasses.fields(default)}
    tried = _candidate.get()
    if tried is not None:
        changes, source = tried, CANDIDATE
    else:
        path = None if device_kind is None else table_path(device_kind)
        entries = {} if path is None else read_table(path)
        changes, source = (entries[name]["sizes"], path.name) if path and name in entries else ({}, DEFAULT)
    if unknown := sorted(set(changes) - set(known)):
        raise SizesError(f"sizes of {name} must be of {list(known)}, got {unknown} ({source})")
    for field, value in changes.items():
        counts = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not counts and not (value is None and known[field].default is None):
            raise SizesError(f"sizes of {name} ({source}): {field} must be a positive integer, got {value!r}")
    try:
        sizes = dataclasses.replace(default, **changes)
    except SizesError as error:
        raise SizesError(f"sizes of {name} ({source}): {error}") from error
    choices.note(name, sizes=dataclasses.asdict(sizes), source=source)
    return sizes


@contextlib.contextmanager
def candidate(changes: Mapping[str, Any] | None) -> Iterator[None]:
    """Within, every kernel is made with these fields in place of the default's, whatever the tables say.

    Meant for a process that tries one candidate: a program that was traced before keeps its sizes.
    """
    token = _candidate.set(changes)
    try:
        yield
    finally:
        _candidate.reset(token)


def table_path(device_kind: str) -> pathlib.Path:
    """Where the table of a kind of device is, or would be."""
    return TABLES / f"{re.sub(r'[^a-z0-9]+', '_', device_kind.lower()).strip('_')}.json"


@functools.cache
def read_table(path: pathlib.Path) -> Entries:
    """The entries of a table; none if there is no such file. A process reads each file once.

    Raises:
      SizesError: it is no table, or that of another device.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        device_kind, entries = table["device_kind"], table["entries"]
        damaged = [name for name, entry in entries.items() if not isinstance(entry["sizes"], dict)]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise SizesError(f"{path} must be a table of sizes: {type(error).__name__}: {error}") from error
    if damaged:
        raise SizesError(f"{path} must have the sizes of an entry by field, got something else for {damaged}")
    if not isinstance(device_kind, str) or table_path(device_kind) != path:
        raise SizesError(f"{path} must be the table of the device in its name, got {device_kind!r}")
    return entries
