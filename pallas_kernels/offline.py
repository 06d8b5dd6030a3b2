"""Compiling for a device that this machine lacks: jobs in processes of their own, as a compiler may abort or hang.

A job is a function that is named by its module. The packages that hold the compilers come with the dependency group
`offline`.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

HOW_TO_INSTALL = "install the dependency group of the offline compilers: uv sync --group offline"


class MissingPackageError(RuntimeError):
    """A compiler for an absent device is not installed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
      status: "ok"; "refused", where the function raised ValueError or NotImplementedError, as kernels do for what
        they cannot do; "missing", where a package is not installed; "failed" with any other exception; "crashed",
        where the process ended without an answer; "timed_out".
      report: what the function returned if the status is "ok".
      message: one line that says why if it is not.
      seconds: how long the process took.
    """

    status: str
    report: dict[str, Any]
    message: str
    seconds: float


def require_packages(*modules: str) -> None:
    """Raises MissingPackageError unless all these modules can be imported."""
    missing = [module for module in modules if not _can_import(module)]
    if missing:
        raise MissingPackageError(f"{', '.join(missing)} cannot be imported; {HOW_TO_INSTALL}")


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def run_job(
    job: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    time_limit_s: float = 300.0,
) -> Outcome:
    """Calls a function in a new process and waits for its answer.

    Args:
      job: "module:function". It is called with `arguments` and with `dump_dir`, the path of an empty directory that is
        deleted afterwards, and returns what JSON can hold.
      arguments: keyword arguments that JSON can hold.
      environment: variables of the new process beside those of this one; "{dump_dir}" in a value is replaced by
        the path of that directory.
      time_limit_s: after so long the process and all it started are killed.

    Returns:
      The outcome; a job that fails in whatever way raises nothing here.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paxkv_offline_") as scratch:
        dump_dir, answer_path = pathlib.Path(scratch, "dump"), pathlib.Path(scratch, "answer.json")
        dump_dir.mkdir()
        given = {name: value.replace("{dump_dir}", str(dump_dir)) for name, value in (environment or {}).items()}
        request = {"job": job, "arguments": dict(arguments), "dump_dir": str(dump_dir), "answer": str(answer_path)}
        with subprocess.Popen(
            # -P: what lies in the directory that the caller happens to be in is not imported.
            [sys.executable, "-P", "-c", "from pallas_kernels import offline; offline.answer_request()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # The paths of this process, so that the child finds the job's module wherever it was found here.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "JAX_PLATFORMS": "cpu",
                **given,
            },
            start_new_session=True,
        ) as process:
            try:
                _, errors = process.communicate(json.dumps(request), timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return Outcome("timed_out", {}, f"no answer within {time_limit_s:g} s", time.monotonic() - start)
        seconds = time.monotonic() - start
        if not answer_path.exists():
            return Outcome("crashed", {}, f"exit code {process.returncode}: {_last_words(errors)}", seconds)
        answer = json.loads(answer_path.read_text())
        return Outcome(answer["status"], answer["report"], answer["message"], seconds)


def _last_words(errors: str) -> str:
    """The line of a dead process that most likely says why it died."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") or "Check failed" in line or "rror" in line]
    return (fatal or lines or ["no word on standard error"])[-1][:500]


def attempt(function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """Calls a function in this process; `status`, `report` and `message` as an Outcome has them."""
    status, report, message = "ok", {}, ""
    try:
        report = function(**arguments)
    except MissingPackageError as error:
        status, message = "missing", str(error)
    except (ValueError, NotImplementedError) as error:
        status, message = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        status, message = "failed", f"{type(error).__name__}: {error}"
    return {"status": status, "report": report, "message": message}


def answer_request() -> None:
    """What the process of a job does: reads one request from standard input, leaves the answer in the file it names."""
    request = json.load(sys.stdin)

    def job(**arguments: Any) -> dict[str, Any]:
        module, _, function = request["job"].partition(":")
        return getattr(importlib.import_module(module), function)(**arguments)

    answer = json.dumps(attempt(job, **request["arguments"], dump_dir=pathlib.Path(request["dump_dir"])))
    # Whole or not at all: a process that dies while it writes must not look as if it had answered.
    path = pathlib.Path(request["answer"])
    path.with_suffix(".part").write_text(answer)
    path.with_suffix(".part").rename(path)
