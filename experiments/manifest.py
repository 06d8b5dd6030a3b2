"""What a run was computed with: code, versions, devices, the command; enough to repeat it or to see why it differs."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

SCHEMA_VERSION = 1
ROOT = pathlib.Path(__file__).resolve().parent.parent
_OWN = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_COMPILATION_CACHE_DIR")
"""Variables that processes which run together need not have alike."""
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "polars", "paxkv")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def begin(run_id: str, config_hash: str, seed: int, argv: Sequence[str]) -> dict[str, Any]:
    """The manifest of a run that starts now. Imports JAX, to name its devices."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": run_id,
        "config_sha256": config_hash,
        "seeds": [seed],
        "command": command(argv),
        "argv": list(argv),
        "started": now(),
        "finished": None,
        "git": git_state(ROOT),
        "versions": versions(),
        "devices": devices(),
        "environment": environment(),
        "kernels": {},  # backends and sizes that this session chose
        "inputs": {},
        "earlier_sessions": [],
    }


def decisive(config: Any) -> dict[str, Any]:
    """What decides the programs that a process runs and can be told before JAX looks at any device."""
    alike = {name: value for name, value in environment().items() if name not in _OWN}
    return {"config": config, "git": git_state(ROOT), "versions": versions(), "environment": alike}


def resume(manifest: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a run that is taken up: its inputs stay, and who computed the finished parts is kept."""
    session = {name: earlier[name] for name in ("started", "git", "versions", "devices", "environment", "argv")}
    session["kernels"] = earlier.get("kernels", {})
    return manifest | {
        "inputs": earlier["inputs"],
        "earlier_sessions": [*earlier["earlier_sessions"], session],
    }


def differences(manifest: dict[str, Any]) -> list[str]:
    """What changed between the sessions of a run, in words: its parts were not all computed alike."""
    changed: dict[str, str] = {}
    for session in manifest["earlier_sessions"]:
        for name in ("git", "versions", "devices", "environment"):
            if words := change(name, session[name], manifest[name]):
                changed.setdefault(name, words)
    return list(changed.values())


def change(name: str, before: Any, now: Any) -> str:
    """What became of an entry, such as `versions (python 3.11.7 -> 3.12.1)`; empty if it stayed what it was."""
    if before == now:
        return ""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        return f"{name} ({', '.join(f'{key} {before.get(key)} -> {now.get(key)}' for key in keys)})"
    return f"{name} ({before} -> {now})"


def command(argv: Sequence[str]) -> str:
    """The shell command that starts the run again."""
    return shlex.join(["python", "-m", "experiments", *argv])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> dict[str, Any]:
    """Platform, kind and number of the devices that JAX uses."""
    import jax

    found = jax.devices()
    return {"platform": found[0].platform, "kind": found[0].device_kind, "count": len(found)}


def environment() -> dict[str, str]:
    """Variables that change what XLA and JAX compile."""
    return {name: value for name, value in sorted(os.environ.items()) if name == "XLA_FLAGS" or name.startswith("JAX_")}


def git_state(root: pathlib.Path) -> dict[str, Any] | None:
    """Revision of a checkout and whether it was changed since; None where `root` is not one."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy inside some other repository must not borrow that one's revision.
    if top is None or pathlib.Path(top).resolve() != root.resolve():
        return None
    revision = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    if revision is None or status is None:
        return None
    return {"revision": revision, "dirty": bool(status)}


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """What git answers; None if there is no git or it refuses."""
    try:
        answer = subprocess.run(
            # Reading must not take the locks of somebody who is committing.
            ["git", "--no-optional-locks", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
