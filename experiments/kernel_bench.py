"""What attention costs on this machine: paged against contiguous, against jax's own kernels, against a plain copy."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl

from experiments import results
from experiments.kernel_bench_cases import SHORT, Call, Kind, Tables, Work, calls, refusal
from experiments.progress import Progress
from experiments.run_directory import RunDirectory

DESCRIPTION = "Time and bandwidth of paged and contiguous attention on this device, beside a copy of the same bytes."
MODELLED: frozenset[str] = frozenset()
GLOSSARY = {
    "ms": "milliseconds of one call, median over the rounds",
    "gb_per_s": "bytes that the call must move at least (keys, values, queries, output, table) over its median time",
    "fraction_of_copy": "gb_per_s over the bandwidth of a copy that was measured in the same rounds",
    "paged_over_contiguous": "median over the rounds of its time over that of the contiguous call in the same round",
    "max_error": "largest difference from the contiguous output, over the largest output",
}
# Rounding of the output, and of the weights where they meet the values on matrix units.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
      experiment: `kernel_bench`.
      seed: of keys, values, queries and tables.
      seqs: sequences in the batch.
      context: tokens of each.
      kv_heads: key and value heads.
      group: query heads for each of them.
      head_dim: elements per head.
      q_dtype: dtype of queries and outputs.
      kv_dtypes: dtypes of stored keys and values.
      block_sizes: slots in a block.
      tables: whether blocks lie in order (`identity`) or anywhere (`permuted`).
      prefill_seqs: sequences of the batch that computes chunks of prompts; 0 for no prefill.
      chunk: tokens of each that are computed.
      backend: of the kernels; None for what this device prefers.
      repeats: rounds; in each every call is timed once.
      calls: how often a call is made in a round, one after another without a wait: what a launch costs overlaps.
    """

    experiment: str = "kernel_bench"
    seed: int = 0
    seqs: int = 16
    context: int = 2048
    kv_heads: int = 4
    group: int = 4
    head_dim: int = 64
    q_dtype: str = "float32"
    kv_dtypes: tuple[str, ...] = ("float32",)
    block_sizes: tuple[int, ...] = (16,)
    tables: tuple[Tables, ...] = ("identity", "permuted")
    prefill_seqs: int = 0
    chunk: int = 128
    backend: str | None = None
    repeats: int = 11
    calls: int = 1

    def __post_init__(self) -> None:
        """Refuses sizes and dtypes that cannot be timed."""
        for name in ("seqs", "context", "kv_heads", "group", "head_dim", "repeats", "calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.prefill_seqs < 0:
            raise ValueError(f"prefill_seqs: expected at least 0, got {self.prefill_seqs}")
        if not 2 <= self.chunk <= self.context:
            raise ValueError(f"chunk: expected 2 to context = {self.context}, got {self.chunk}")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ValueError(f"block_sizes: expected at least one, none below 1, got {self.block_sizes}")
        if self.q_dtype not in TOLERANCE:
            raise ValueError(f"q_dtype: expected one of {', '.join(TOLERANCE)}, got {self.q_dtype!r}")
        if not self.kv_dtypes or not set(self.kv_dtypes) <= set(SHORT):
            raise ValueError(f"kv_dtypes: expected some of {', '.join(SHORT)}, got {self.kv_dtypes}")

    def works(self) -> list[Work]:
        """The batches that are timed."""
        sizes = {name: getattr(self, name) for name in ("context", "kv_heads", "group", "head_dim", "q_dtype")}
        batches: tuple[tuple[Kind, int, int], ...] = (
            ("decode", self.seqs, 1),
            ("prefill", self.prefill_seqs, self.chunk),
        )
        return [
            Work(kind, seqs=seqs, chunk=chunk, kv_dtype=kv_dtype, **sizes)
            for kind, seqs, chunk in batches
            for kv_dtype in self.kv_dtypes
            if seqs > 0
        ]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Times every call of every work; those of one work take turns, so that a busy moment falls on all of them."""
    found: dict[str, dict[str, Any]] = {}
    frames = []
    for work in config.works():
        with progress.task(f"compiling {work.name}") as advance:
            timed = []
            for call in calls(work, config.seed, config.block_sizes, config.tables, config.backend):
                advance(note=call.name)
                # jax's kernels do not take all that ours do; ours are held to what they take.
                refused = refusal(call) if call.backend == "jax" else None
                if refused is None:
                    timed.append(call)
                else:
                    found[call.name] = {"ms": None, "refused": refused}
            errors = _errors(timed)
        with progress.task(f"timing {work.name}", total=config.repeats) as advance:
            frame = time_in_turns(timed, config.repeats, config.calls, advance)
        frames.append(frame)
        found |= summarise(timed, frame, errors)
    run_dir.write_parquet("timings.parquet", pl.concat(frames))
    return found


def time_in_turns(timed: list[Call], repeats: int, times: int, advance: Callable[[], None]) -> pl.DataFrame:
    """Milliseconds of every call and of a copy of as many bytes as the keys and values have, in every round.

    Each round has an order of its own, so that none always finds what the copy leaves behind.
    """
    k, v = timed[0].arguments[1:3]
    everything = [("copy", _copy, (k, v)), *((call.name, call.function, call.arguments) for call in timed)]
    rows, rng = [], np.random.default_rng(0)
    for _, function, arguments in everything:
        jax.block_until_ready(function(*arguments))
    for repeat in range(repeats):
        for turn in rng.permutation(len(everything)):
            name, function, arguments = everything[turn]
            begin = time.perf_counter()
            jax.block_until_ready([function(*arguments) for _ in range(times)])
            ms = 1e3 * (time.perf_counter() - begin) / times
            rows.append({"work": timed[0].work.name, "name": name, "repeat": repeat, "ms": ms})
        advance()
    return pl.DataFrame(rows)


def summarise(timed: list[Call], frame: pl.DataFrame, errors: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Median and quartiles of each call, and its median ratio to the contiguous call of the same round."""
    k, v = timed[0].arguments[1:3]
    work = timed[0].work
    ms = {name: np.array(group["ms"]) for (name,), group in frame.sort("repeat").group_by("name")}
    copy_bytes = 2 * (k.nbytes + v.nbytes)  # read and written
    copy_gb_per_s = copy_bytes / np.median(ms["copy"]) / 1e6
    found = {f"{work.name}_copy": spread(ms["copy"]) | {"gb_per_s": copy_gb_per_s, "fraction_of_copy": 1.0}}
    for call in timed:
        gb_per_s = work.bytes_moved(call.block_size) / np.median(ms[call.name]) / 1e6
        found[call.name] = spread(ms[call.name]) | {
            "gb_per_s": gb_per_s,
            "fraction_of_copy": gb_per_s / copy_gb_per_s,
            "paged_over_contiguous": float(np.median(ms[call.name] / ms[timed[0].name])),
            "max_error": errors[call.name],
            "tolerance": TOLERANCE[work.q_dtype],
            "backend": call.backend,
        }
    return found


def failed_checks(found: dict[str, dict[str, Any]]) -> list[str]:
    """Calls that do not compute what the contiguous one does."""
    return [
        f"{name}: its output differs from the contiguous one by {values['max_error']:.1e}, more than rounding explains"
        for name, values in found.items()
        if not values.get("max_error", 0.0) <= values.get("tolerance", np.inf)
    ]


def tables(found: dict[str, dict[str, Any]]) -> list[results.Table]:
    """One line a call."""
    columns = ("ms", "ms_lower_quartile", "ms_upper_quartile", *list(GLOSSARY)[1:])
    shown = {column: results.show([values.get(column) for values in found.values()]) for column in columns}
    headings = ("", "ms", "quartiles", *(column.replace("_", " ") for column in list(GLOSSARY)[1:]), "backend")
    rows = [
        (
            name,
            shown["ms"][i],
            f"{shown['ms_lower_quartile'][i]} to {shown['ms_upper_quartile'][i]}",
            *(shown[column][i] for column in list(GLOSSARY)[1:]),
            values.get("backend", values.get("refused", "")),
        )
        for i, (name, values) in enumerate(found.items())
    ]
    on_cpu = all(values.get("backend", "xla") == "xla" for values in found.values())
    title = "Attention through XLA's references; no kernel of ours runs here" if on_cpu else "Attention on this device"
    return [results.Table(headings, rows, title)]


def _errors(timed: list[Call]) -> dict[str, float]:
    """How far each call's output is from the first one's, over the largest of that."""
    outputs = {call.name: np.asarray(call.function(*call.arguments)).astype(np.float64) for call in timed}
    right = outputs[timed[0].name]
    return {name: float(np.max(np.abs(out - right)) / np.max(np.abs(right))) for name, out in outputs.items()}


def spread(ms: np.ndarray) -> dict[str, float]:
    """Median and quartiles of milliseconds."""
    lower, median, upper = np.quantile(ms, (0.25, 0.5, 0.75))
    return {"ms": float(median), "ms_lower_quartile": float(lower), "ms_upper_quartile": float(upper)}


@jax.jit
def _copy(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads and writes every byte. Flipping bits keeps the compiler from handing out the arrays themselves."""
    bits = jnp.dtype(f"uint{8 * k.dtype.itemsize}")
    k, v = (jax.lax.bitcast_convert_type(array, bits) for array in (k, v))
    return ~k, ~v
