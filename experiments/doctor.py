"""`doctor`: what this machine can run, what is missing, and how to put it right."""

import fcntl
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.markup
import rich.table
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from experiments.manifest import ROOT

TRACE_DIR_VARIABLE = "PAXKV_TRACE_DIR"
CHECKPOINT = pathlib.Path("models/checkpoints/byte_llama/config.json")
GIB = 2**30


class Finding(NamedTuple):
    """One thing looked at."""

    what: str
    found: str
    problem: str = ""  # in words, with how to put it right; empty if all is well
    fatal: bool = False  # no run works before it is put right


def run(out_dir: pathlib.Path, console: rich.console.Console) -> int:
    """Prints what was found.

    Returns:
      The exit code: 0 if a run would work.
    """
    findings = list(examine(out_dir))
    table = rich.table.Table("", "found", "", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for finding in findings:
        mark = "problem" if finding.fatal else "note" if finding.problem else "ok"
        table.add_row(finding.what, rich.markup.escape(finding.found), mark)
    console.print(table)
    for finding in findings:
        if finding.problem:
            console.print(f"{'problem' if finding.fatal else 'note'}: {finding.what}: {finding.problem}", markup=False)
    fatal = any(finding.fatal for finding in findings)
    console.print("A run would not work yet." if fatal else "Ready: python -m experiments list")
    return 1 if fatal else 0


def examine(out_dir: pathlib.Path, root: pathlib.Path = ROOT) -> Iterator[Finding]:
    """Looks at everything that a run needs."""
    packages = list(_packages(root))
    yield from packages
    yield _machine()
    if any(finding.fatal for finding in packages):
        return  # what follows would fail on the import
    device = _devices()
    yield device
    if not device.fatal:
        yield from _kernels()
    yield _out_dir(out_dir)
    yield _checkpoint(root)
    yield _traces(os.environ.get(TRACE_DIR_VARIABLE))


def _packages(root: pathlib.Path) -> Iterator[Finding]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted, found = project["project"]["requires-python"], platform.python_version()
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    yield Finding("python", found, "" if fits else f"{wanted} is needed; `uv run` fetches one", not fits)
    for line in (*project["project"]["dependencies"], *project["dependency-groups"]["experiments"]):
        yield _package(Requirement(line))
    yield _package(Requirement("jaxlib"))


def _package(requirement: Requirement) -> Finding:
    fix = f"{requirement} is needed; run through `uv run`, or pip install '{requirement}'"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, "not installed", fix, fatal=True)
    fits = requirement.specifier.contains(found, prereleases=True)
    return Finding(requirement.name, found, "" if fits else fix, fatal=not fits)


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Finding("machine", f"{platform.system()} {platform.machine()}, {cores} cores, {memory:.1f} GiB of memory")


def _devices() -> Finding:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Finding("devices", "none", f"JAX finds no device: {error}. Unset JAX_PLATFORMS, or set it to cpu", True)
    found = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    unseen = devices[0].platform == "cpu" and pathlib.Path("/dev/nvidia0").exists()
    hint = "there is an NVIDIA GPU that JAX does not use; install a CUDA build of jax to run on it"
    return Finding("devices", found, hint if unseen else "")


def _kernels() -> Iterator[Finding]:
    """Runs every backend of every operation once, on a case as small as can be."""
    for operation, (package, backends, call) in _SMALLEST.items():
        api = importlib.import_module(f"pallas_kernels.{package}.api")
        names = getattr(api, backends)
        refused: dict[str, str] = {}
        for backend in names:
            try:
                call(getattr(api, operation), backend)
            except (NotImplementedError, ValueError) as error:
                refused[backend] = str(error)
        works = ", ".join(name for name in names if name not in refused)
        problem = "; ".join(f"{name} does not run here: {reason}" for name, reason in refused.items())
        yield Finding(f"kernel {operation}", works or "none", problem, fatal=not works)


def _paged(attention: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    q, kv = jnp.zeros((1, 2, 64)), jnp.zeros((1, 16, 1, 64))
    table, one, starts = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    attention(q, kv, kv, table, one, starts, max_q_len=1, backend=backend).block_until_ready()


def _contiguous(attention: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    q, kv = jnp.zeros((1, 2, 64)), jnp.zeros((16, 1, 64))
    start, one, starts = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    attention(q, kv, kv, start, one, starts, max_q_len=1, backend=backend).block_until_ready()


def _write(kv_write: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    pool, new = jnp.zeros((16, 1, 64)), jnp.ones((1, 1, 64))
    kv_write(pool, pool, new, new, jnp.zeros(1, jnp.int32), backend=backend)[0].block_until_ready()


def _copy(block_copy: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    block = jnp.zeros(1, jnp.int32)
    block_copy(jnp.zeros((16, 1, 64)), block, block, block_size=16, backend=backend).block_until_ready()


def _copy_between(block_copy_between: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    pool, block = jnp.zeros((16, 1, 64)), jnp.zeros(1, jnp.int32)
    block_copy_between(pool, pool, block, block, block_size=16, backend=backend).block_until_ready()


def _fill(fill_blocks: Callable[..., Any], backend: str) -> None:
    import jax.numpy as jnp

    fill_blocks(jnp.zeros((16, 1, 64)), jnp.zeros(1, jnp.int32), 0, block_size=16, backend=backend).block_until_ready()


# By operation: its package, what its API calls its backends there, and a call.
_SMALLEST: dict[str, tuple[str, str, Callable[..., None]]] = {
    "paged_attention": ("paged_attention", "BACKENDS", _paged),
    "contiguous_attention": ("contiguous_attention", "BACKENDS", _contiguous),
    "kv_write": ("kv_write", "BACKENDS", _write),
    "block_copy": ("block_copy", "COPY_BACKENDS", _copy),
    "block_copy_between": ("block_copy", "COPY_BETWEEN_BACKENDS", _copy_between),
    "fill_blocks": ("block_copy", "FILL_BACKENDS", _fill),
}


def _out_dir(out_dir: pathlib.Path) -> Finding:
    """Tries to write and to lock where runs would go, without leaving anything there."""
    place = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    fix = f"runs cannot be written to {out_dir}: {{}}; choose another --out_dir"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding("out_dir", str(out_dir), fix.format(error.strerror), fatal=True)
    return Finding("out_dir", f"{out_dir}, {shutil.disk_usage(place).free / GIB:.0f} GiB free")


def _checkpoint(root: pathlib.Path) -> Finding:
    if (root / CHECKPOINT).is_file():
        return Finding("model", str(CHECKPOINT.parent))
    fix = "restore it from git, or train it: uv run python -m models train configs/train/byte_llama.yaml"
    return Finding("model", f"{CHECKPOINT.parent} is missing", fix, fatal=True)


def _traces(folder: str | None) -> Finding:
    how = f"configs that replay a public trace need {TRACE_DIR_VARIABLE} to name the folder of trace files"
    if not folder:
        return Finding("traces", f"{TRACE_DIR_VARIABLE} is not set", how)
    path = pathlib.Path(folder)
    names = sorted(p.name for p in path.glob("*") if p.name.endswith((".csv", ".jsonl", ".jsonl.gz")))
    if not names:
        return Finding("traces", f"no .csv or .jsonl file in {path}", how)
    changed = _changed(path)
    problem = f"not the published bytes: {', '.join(changed)}; download them again" if changed else ""
    return Finding("traces", f"{path}: {', '.join(names)}", problem)


def _changed(folder: pathlib.Path) -> list[str]:
    """Files that are not what the folder's `SHA256SUMS` says, if it has one."""
    sums = folder / "SHA256SUMS"
    if not sums.exists():
        return []
    expected = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip())
    return [
        name
        for digest, name in ((digest, name.strip().lstrip("*")) for digest, name in expected)
        if (folder / name).exists() and hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]
