"""Processes that run together end together: at once if one dies, in time if one hangs."""

import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import polars as pl
import pytest

from experiments import manifest
from experiments.errors import UserError
from experiments.lifeline import LOST
from experiments.processes import ALONE, Group, group_of, told_apart

ROOT = pathlib.Path(__file__).parents[2]
PEER = """
import sys, time
from experiments.errors import UserError
from experiments.lifeline import Lifeline
from experiments.processes import Group
count, index, port, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
try:
    line = Lifeline(Group(count, index, f"localhost:{port}"), limit)
except UserError as error:
    sys.exit(f"error: {error}")
print("together", flush=True)
for command in sys.stdin:
    if command == "beat\\n":
        line.beat()
    elif command.startswith("run "):
        try:
            line.compare({"config": {"seed": int(command.split()[1])}})
        except UserError as error:
            line.fail(error)  # does nothing: all know
            sys.exit(f"error: {error}")
        print("alike", flush=True)
    elif command.startswith("fail "):
        line.fail({"UserError": UserError, "ValueError": ValueError}[command.split()[1]]("no such model\\nat all"))
    elif command == "bye\\n":
        line.close()
        print("bye", flush=True)
        time.sleep(0.5)
        sys.exit(0)
"""


def free_port():
    """Of two neighbours that are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except OSError:
                continue
            return port


def peers(count, limit_s=20.0, started=None):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(count), str(index), str(port), str(limit_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for index in (range(count) if started is None else started)
    ]  # fmt: skip


def end_of(process, timeout=20):
    """Its last words. Its standard input stays open until then, as it is what it waits for."""
    process.wait(timeout=timeout)
    words = process.stderr.read()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    return words


def await_all(processes, word="together"):
    for process in processes:
        assert process.stdout.readline() == f"{word}\n"


def tell(process, command):
    process.stdin.write(f"{command}\n")
    process.stdin.flush()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_ends_the_others_at_once_and_by_name(victim):
    processes = peers(3)
    await_all(processes)
    processes[victim].kill()
    begin = time.monotonic()
    others = [process for process in processes if process is not processes[victim]]
    errors = [end_of(process) for process in others]
    end_of(processes[victim])
    assert time.monotonic() - begin < 15
    assert [process.returncode for process in others] == [LOST, LOST]
    # Process 0 hears of every other, and tells the rest.
    named = f"error: process {victim} of 3 ended before the run was over; finished parts are kept, and the same command"
    assert all(named in error for error in errors)


@pytest.mark.parametrize(("failing", "kind", "words"), [
    (0, "UserError", "error: no such model"),
    (1, "ValueError", "ValueError: no such model"),
])  # fmt: skip
def test_an_error_of_one_ends_the_others_by_name(failing, kind, words):
    processes = peers(3)
    await_all(processes)
    tell(processes[failing], f"fail {kind}")
    errors = [end_of(process) for process in processes]
    codes = [process.returncode for process in processes]
    assert words in errors.pop(failing)
    assert codes.pop(failing) == {"UserError": 2, "ValueError": 1}[kind]
    assert codes == [LOST, LOST]
    told = "no such model" if kind == "UserError" else "ValueError: no such model"
    assert [error.partition(";")[0] for error in errors] == [f"error: process {failing} of 3 failed: {told}"] * 2


def test_what_all_refuse_each_tells_itself():
    processes = peers(2)
    await_all(processes)
    for process in processes:
        tell(process, "fail UserError")
    assert all("error: no such model" in end_of(process) for process in processes)
    assert [process.returncode for process in processes] == [2, 2]


def test_processes_that_run_something_else_all_end_at_once():
    processes = peers(3)
    await_all(processes)
    for process in processes:
        tell(process, "run 7")
    await_all(processes, "alike")
    for process, seed in zip(processes, (7, 7, 8), strict=True):
        tell(process, f"run {seed}")
    named = "error: process 2 of 3 runs something else than process 0: config.seed 8 instead of 7; start all of them"
    assert all(named in end_of(process) for process in processes)
    assert [process.returncode for process in processes] == [1, 1, 1]


def test_what_differs_between_processes_is_named():
    run = {"config": {"seed": 0, "meshes": ["d1m2k1"], "workload": {"rate": math.inf}}, "git": None, "versions": {}}
    assert told_apart([run]) == ""
    assert told_apart([run, json.loads(json.dumps(run)), run]) == ""  # as it comes over the line
    newer = run | {"versions": {"jax": "2"}, "git": {"revision": "ab", "dirty": False}}
    other = run | {"config": {"seed": False, "meshes": ["d1m1k2"], "workload": {"rate": 1.5}}}
    assert told_apart([run, newer, run, other]) == (
        'process 1 of 4 runs something else than process 0: git nothing instead of null, git.revision "ab" instead of '
        'nothing, git.dirty false instead of nothing, versions.jax "2" instead of nothing; '
        "process 3 of 4 runs something else than process 0: config.seed false instead of 0, "
        'config.meshes ["d1m1k2"] instead of ["d1m2k1"], config.workload.rate 1.5 instead of Infinity'
    )
    many = told_apart([{"config": dict.fromkeys("abcdef", value)} for value in (0, 1)])
    assert many.count("1 instead of 0") == 4
    assert many.endswith(", 2 more")


def test_what_must_be_alike_is_code_versions_and_all_that_compilers_read(monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PROCESS_ID"):
        monkeypatch.setenv(name, "3")
    found = manifest.decisive({"seed": 1})
    assert found["config"] == {"seed": 1}
    assert found["versions"]["jax"] == jax.__version__
    assert found["git"] == manifest.git_state(manifest.ROOT)
    assert found["environment"]["XLA_FLAGS"] == "3"
    assert "JAX_PROCESS_ID" not in found["environment"]


def test_who_does_not_get_on_ends_all_in_time():
    processes = peers(2, limit_s=2.0)
    await_all(processes)
    ends = time.monotonic() + 4
    while time.monotonic() < ends and processes[0].poll() is None:
        tell(processes[0], "beat")
        time.sleep(0.2)
    hung, _ = end_of(processes[1]), end_of(processes[0])
    assert processes[1].returncode == LOST
    assert "process 1 of 2 did not get on for 2 s, the config's process_time_limit_s" in hung
    assert processes[0].returncode == LOST


def test_who_says_goodbye_is_not_missed():
    processes = peers(2)
    await_all(processes)
    for process in reversed(processes):  # the first goes last, and is not ended by the other's end
        tell(process, "bye")
        assert process.stdout.readline() == "bye\n"
        end_of(process)
        assert process.returncode == 0


@pytest.mark.parametrize("started", [[0], [1]])
def test_a_process_that_never_comes_is_named(started):
    (process,) = peers(2, limit_s=1.0, started=started)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "start all of them with the same command" in errors
    assert ("process 1 of 2 did not come" if started == [0] else "process 0 of 2 could not be reached") in errors


def test_where_processes_meet_comes_from_flags_or_the_environment():
    flags = {"processes": "2", "process": "1", "coordinator": "host:1234", "seed": "3"}
    assert group_of(flags, {}) == Group(2, 1, "host:1234")
    assert flags == {"seed": "3"}
    named = {"PAXKV_PROCESSES": "4", "PAXKV_PROCESS": "2", "PAXKV_COORDINATOR": "10.0.0.1:80"}
    assert group_of({"process": "3"}, named) == Group(4, 3, "10.0.0.1:80")
    assert group_of({}, {}) == ALONE
    assert Group(2, 1, "host:1234").address == ("host", 1235)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"processes": "2"}, "got no process, coordinator"),
        ({"processes": "2", "process": "2", "coordinator": "h:1"}, "process: expected a number from 0 to 1, got '2'"),
        ({"processes": "0", "process": "0", "coordinator": "h:1"}, "processes: expected a number, at least 1"),
        ({"processes": "2", "process": "0", "coordinator": "host"}, "coordinator: expected host:port"),
        ({"processes": "²", "process": "0", "coordinator": "h:1"}, "processes: expected a number, at least 1"),
        ({"processes": "2", "process": "0", "coordinator": "host:99999"}, "coordinator: expected host:port"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        group_of(flags, {})


def start_runs(out_dir, processes, *flags, seeds=(0, 0)):
    port = free_port()
    command = [sys.executable, "-m", "experiments", "run", "configs/sharded_serving/two_process.yaml"]
    command += ["--workload.num_requests", "4", "--out_dir", str(out_dir), *flags]
    together = ["--processes", str(processes), "--coordinator", f"localhost:{port}"]
    return [
        subprocess.Popen(
            [*command, "--seed", str(seeds[index])] + ([*together, "--process", str(index)] if processes > 1 else []),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for index in range(processes)
    ]  # fmt: skip


@pytest.mark.soak
def test_two_runs_with_different_seeds_end_before_they_begin(tmp_path):
    for process in start_runs(tmp_path, 2, seeds=(0, 1)):
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 2
        assert errors == (
            "error: process 1 of 2 runs something else than process 0: config.seed 1 instead of 0; start all of them "
            "with the same command, code and packages\n"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_two_processes_serve_as_one_does_and_die_together(tmp_path):
    several = ("--meshes", "[d1m2k2, d2m2k1]")
    killed = start_runs(tmp_path / "two", 2, *several)
    deadline = time.monotonic() + 500
    while not list((tmp_path / "two").glob("*/parts/d1m2k2")):  # one mesh is done
        assert time.monotonic() < deadline
        assert killed[0].poll() is None, killed[0].communicate()[1]
        time.sleep(0.5)
    os.kill(killed[1].pid, signal.SIGKILL)
    killed[1].communicate(timeout=60)
    _, errors = killed[0].communicate(timeout=60)
    assert killed[0].returncode == LOST
    assert "process 1 of 2 ended before the run was over" in errors
    for process in start_runs(tmp_path / "two", 2, *several):  # goes on
        process.communicate(timeout=900)
        assert process.returncode == 0
    (one,) = start_runs(tmp_path / "one", 1, *several, "--cpu_devices", "4")
    one.communicate(timeout=900)
    tokens = [
        pl.read_parquet(next((tmp_path / name).glob("*/requests.parquet"))).select("mesh", "request", "tokens")
        for name in ("one", "two")
    ]
    assert tokens[0].equals(tokens[1])
    results = json.loads(next((tmp_path / "two").glob("*/summary.json")).read_text())["results"]
    assert all(values["tokens_equal"] for values in results.values())
