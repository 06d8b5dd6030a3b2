"""Servers compiled for devices that are not there: what fits, what is exchanged, and how long a step takes by model.

One decode step of each model on each mesh of each target, without weights, in a process of its own.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments import jax_setup, sharded_job
from experiments.compile import broken_limits
from experiments.progress import Progress
from experiments.results import Results, Table, Value, show
from experiments.run_directory import RunDirectory
from experiments.sharded_model import StepWork
from experiments.sharded_setup import Serving, device_shape, parse_mesh, replica_memory
from models.config import DecoderConfig
from models.split import device_config
from pallas_kernels import offline
from pallas_kernels.targets import TOPOLOGIES
from paxkv.capacity import parse_fraction, parse_size
from paxkv.kv_format import scheme
from paxkv.sharding import AXES, MeshShape, Rules, head_parts
from paxkv.sizes import require_int

MODELLED = frozenset({"step_ms", "tokens_per_s"})
GLOSSARY: Mapping[str, str] = {
    "missing": "what does not fit, and how much",
    "blocks_by_compiler": "the most blocks with which, by the compiler's account, the step would fit",
    "blocks_deviation": "how far `blocks`, by arithmetic, is from that",
    "compiled_kv_bytes_per_device": "the step's arguments as the compiler counts them, without weights and batch",
    "temp_bytes": "memory of a device that the compiled step needs besides arguments and results",
    "step_ms": "of a decode step: weights and stored tokens read at the memory's bandwidth, or products at the peak "
    "rate, whichever takes longer, and then exchanges at the links' bandwidth",
    "tokens_per_s": "of all replicas",
    "modelled_rows": "requests of a replica in the modelled step, each with `context` stored tokens",
    "kernel": "what the compiled step attends and writes with",
    "unexpected_exchanges": "exchanges of the compiled step that are not the decoder's sums, the logits or the merge",
}


@dataclasses.dataclass(frozen=True)
class Offline:
    """What is compiled, for what.

    Attributes:
      targets: groups of devices, such as h100x8 and v6e-8; a mesh has the first of them.
      models: published ones, such as llama3_8b, in bfloat16.
      memory_fraction: share of a device's memory that the server may use, as decimal text.
      reserve: of that, what is kept free for what a step computes.
      laid_out_anew: targets whose compiler lays the layers' largest weights out anew in every step, so that there are
        two of each.
      context: tokens that each request of the modelled step has stored.
      jobs: processes that compile at once.
      time_limit_s: of each of them.
      at_most: largest values by pattern of target/model/mesh and metric; `fits` is 0 or 1.
      at_least: smallest values likewise.
    """

    targets: tuple[str, ...] = ("h100x8",)
    models: tuple[str, ...] = ("llama3_8b",)
    memory_fraction: str = "0.9"
    reserve: str = "256 MiB"
    laid_out_anew: tuple[str, ...] = ()
    context: int = 2048
    jobs: int = 2
    time_limit_s: float = 300.0
    at_most: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    at_least: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


class Case(NamedTuple):
    """One compilation."""

    target: str
    model: str
    mesh: str

    @property
    def name(self) -> str:
        """Of its result."""
        return "/".join(self)

    @property
    def part(self) -> str:
        """Of its part of the run."""
        return "-".join(self)


def cases(config: Any) -> list[Case]:
    """All that a config of `sharded_serving` asks for."""
    asked: Offline = config.offline
    return [Case(t, model, mesh) for t in asked.targets for model in asked.models for mesh in config.meshes]


def check(config: Any) -> None:
    """Refuses what cannot be compiled. This process looks for no device, as the compilers would take it for theirs.

    Raises:
      ValueError: a name is unknown, a mesh does not suit a model or has more devices than a target, or a number is out
        of range.
    """
    jax_setup.stay_on_cpu()
    asked: Offline = config.offline
    require_int("offline.context", asked.context)
    require_int("offline.jobs", asked.jobs)
    parse_fraction(asked.memory_fraction, "offline.memory_fraction")
    parse_size(asked.reserve, "offline.reserve")
    require_int("max_model_len", config.max_model_len)
    if not 0 < asked.time_limit_s < math.inf:
        raise ValueError(f"offline.time_limit_s: expected a finite number above 0, got {asked.time_limit_s}")
    if config.pairs:
        raise ValueError(f"pairs: expected none with offline, which compiles single meshes, got {list(config.pairs)}")
    for name in ("targets", "models"):
        named = getattr(asked, name)
        if not named or len(set(named)) < len(named):
            raise ValueError(f"offline.{name}: expected at least one, and none twice, got {list(named)}")
    for name, target in [(n, t) for n in ("targets", "laid_out_anew") for t in getattr(asked, n)]:
        if target not in TOPOLOGIES:
            raise ValueError(f"offline.{name}: expected some of {', '.join(TOPOLOGIES)}, got {target!r}")
    for case in cases(config):
        shape, model = parse_mesh(case.mesh), sharded_job.published(case.model)
        if shape.size > TOPOLOGIES[case.target].num_devices:
            raise ValueError(f"{case.name}: expected at most the devices of {case.target}, got {shape.size}")
        try:
            _check_split(config, case, shape, model)
        except ValueError as error:
            raise ValueError(f"{case.name}: {error}") from error


def _check_split(config: Any, case: Case, shape: MeshShape, model: DecoderConfig) -> None:
    heads = head_parts(shape.model, model.q_heads, model.kv_heads, config.replicate_kv_heads)
    rules, fmt = Rules(config.ffn, config.vocab), scheme(config.kv_format)
    device_config(model, dict(zip(AXES, (shape.data, *heads, shape.kv), strict=True)), rules)
    # Weights are not looked at here: whether they leave room for it is what is to be found out.
    memory_bytes = TOPOLOGIES[case.target].target.memory_bytes
    serving = Serving(memory_bytes, config.memory, config.rows, config.max_model_len, config.rows, fmt)
    replica_memory(shape, serving, device_shape(model, shape, fmt, config.replicate_kv_heads))


def run(config: Any, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Compiles every case that no earlier process has compiled.

    Raises:
      ValueError: a compiler is not installed.
    """
    left = [case for case in cases(config) if run_dir.finished_part(case.part) is None]
    pool = concurrent.futures.ThreadPoolExecutor(config.offline.jobs)
    with pool, progress.task("compile", len(left)) as advance:
        jobs = {pool.submit(_compile, config, case): case for case in left}
        for job in concurrent.futures.as_completed(jobs):
            case, outcome = jobs[job], job.result()
            if outcome.status == "missing":
                pool.shutdown(wait=False, cancel_futures=True)
                raise ValueError(outcome.message)
            with run_dir.part(case.part) as part:
                part.write_json("outcome.json", dataclasses.asdict(outcome))
            advance(note=case.name)
    found = {
        case.name: _row(config, case, run_dir.require_part(case.part).read_json("outcome.json"))
        for case in cases(config)
    }
    run_dir.write_json("compiled.json", found)
    return {
        name: {metric: value for metric, value in row.items() if metric != "work"}
        | broken_limits(name, row, config.offline)
        for name, row in found.items()
    }


def _compile(config: Any, case: Case) -> offline.Outcome:
    asked: Offline = config.offline
    memory_bytes = TOPOLOGIES[case.target].target.memory_bytes
    return offline.run_job(
        "experiments.sharded_job:compile_published",
        {
            **case._asdict(),
            "usable_bytes": int(memory_bytes * parse_fraction(asked.memory_fraction, "offline.memory_fraction")),
            "reserve_bytes": parse_size(asked.reserve, "offline.reserve"),
            "laid_out_anew": case.target in asked.laid_out_anew,
            "memory": dataclasses.asdict(config.memory),
            **{
                name: getattr(config, name)
                for name in ("kv_format", "rows", "max_model_len", "ffn", "vocab", "replicate_kv_heads")
            },
        },
        environment=sharded_job.environment(case.target),
        time_limit_s=asked.time_limit_s,
    )


def _row(config: Any, case: Case, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a case."""
    named = {**case._asdict(), "tokens_equal": None}  # nothing was computed
    if outcome["status"] != "ok":
        return named | {"fits": None, "status": outcome["status"], "missing": outcome["message"]}
    row = named | outcome["report"] | {"wall_compile_s": outcome["seconds"]}
    if "work" not in row:
        return row
    context, work = config.offline.context, StepWork(**row["work"])
    rows = max(1, min(config.rows, row["capacity_tokens"] // row["replicas"] // context))
    seconds = work.seconds(TOPOLOGIES[case.target].target, rows, context)
    modelled = {"modelled_rows": rows, "step_ms": 1000 * seconds, "tokens_per_s": row["replicas"] * rows / seconds}
    return row | modelled


def failed_checks(found: Results) -> list[str]:
    """What every compiled step must show."""
    failures = []
    for name, row in found.items():
        if "status" in row:
            failures.append(f"{name} was {row['status']}: {row['missing']}")
        if "broken" in row:
            failures.append(f"{name}: {row['broken']}")
        if "blocks" not in row:
            continue
        predicted, held = row["predicted_kv_bytes_per_device"], row["kv_bytes_per_device"]
        if not predicted == held == row["compiled_kv_bytes_per_device"]:
            failures.append(
                f"{name}: keys and values of a device take {predicted} bytes by arithmetic, {held} as they are split, "
                f"{row['compiled_kv_bytes_per_device']} in the compiled step"
            )
        if row["unexpected_exchanges"]:
            failures.append(f"{name}: {row['unexpected_exchanges']}")
        if _number(row["alias_bytes"]) < _number(held):
            failures.append(f"{name}: the step gives its cache back in other memory than it was given it in")
        besides = _number(row["temp_bytes"])
        if besides > _number(row["reserve_bytes"]):
            failures.append(f"{name}: the step needs {besides:,} bytes besides, more than the reserve")
    return failures


def _number(value: Any) -> int:
    return int(value)


def _in(value: Value, unit: float | None) -> Value:
    return value / unit if unit is not None and isinstance(value, int | float) else value


# Headings, and what a figure is divided by to be short; `summary.json` has every byte.
_COLUMNS: Mapping[str, tuple[str, float | None]] = {
    "fits": ("fits", None),
    "blocks": ("blocks", None),
    "blocks_by_compiler": ("by compiler", None),
    "kv_bytes_per_device": ("KV GB", 1e9),
    "weight_bytes_per_device": ("weights GB", 1e9),
    "temp_bytes": ("besides MB", 1e6),
    "collective_bytes_per_step": ("exchanged MB", 1e6),
    "merge_bytes_per_step": ("to merge MB", 1e6),
    "step_ms": ("modelled ms", None),
    "tokens_per_s": ("modelled tokens/s", None),
}


def tables(found: Results) -> list[Table]:
    """What fits and what it costs, a table for each target; what is missing; and what the steps compute with."""
    shown = []
    for target in dict.fromkeys(row["target"] for row in found.values()):
        rows = {f"{row['model']}/{row['mesh']}": row for row in found.values() if row["target"] == target}
        columns = [show([_in(row.get(name), unit) for row in rows.values()]) for name, (_, unit) in _COLUMNS.items()]
        body = [[name, *cells] for name, cells in zip(rows, zip(*columns, strict=True), strict=True)]
        headings = ["", *(heading for heading, _ in _COLUMNS.values())]
        shown.append(Table(headings, body, f"Compiled for {target}: blocks of a replica, bytes of a device and a step"))
    missing = [[name, str(row["missing"])] for name, row in found.items() if row.get("missing")]
    if missing:
        shown.append(Table(["does not fit", "what is missing"], missing))
    used: dict[str, list[str]] = {}
    for row in found.values():
        if "kernel" in row:
            used.setdefault(f"{row['target']}: {row['kernel']}", []).append(f"{row['model']}/{row['mesh']}")
    if used:
        shown.append(Table(["kernels in the compiled step", "of"], [[k, ", ".join(v)] for k, v in used.items()]))
    return shown
