"""A simulated server by itself and as a point of a sweep."""

import contextlib
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from experiments import cli, config, simulated_server
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulated_server import Config, predict
from experiments.simulation import Server
from experiments.workloads import WorkloadConfig
from experiments.workloads.config import load_workload
from experiments.workloads.transcripts import SystemPrompts
from paxkv.config import MemoryConfig
from paxkv.policy import Policy

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs/simulated_server/quickstart.yaml"
# 4 MiB are 32 tokens of Llama-3-8B: two requests of 12 fit, four do not.
SMALL = Config(
    server=Server(kv_memory="4 MiB", rows=4, max_model_len=24, token_budget=24, max_stride=1),
    memory=MemoryConfig(block_size=4),
    workload=WorkloadConfig(lengths="uniform", prompt_mean=4, output_mean=8, rate=1000, num_requests=12),
    slos=("llama3_1_8b",),
)
TABLES = "steps.parquet", "requests.parquet"
NOBODY = "workload: expected a request that can be served, got none; are its prompts too long?"
SHORTEST = dataclasses.replace(SMALL.server, policy=Policy(order="shortest"))
POINTS = [
    SMALL,
    dataclasses.replace(SMALL, server=SHORTEST, prediction_error=2.0, seed=3),
    dataclasses.replace(SMALL, server=dataclasses.replace(SMALL.server, kv_memory="3 MiB")),
    dataclasses.replace(SMALL, workload=dataclasses.replace(SMALL.workload, rate=10.0)),
]


def simulated(configs, path):
    """The results of configs that are simulated together, and the bytes of all their tables."""
    with contextlib.ExitStack() as stack:
        run_dirs = [stack.enter_context(RunDirectory.open(path / str(i))) for i in range(len(configs))]
        for run_dir in run_dirs:
            run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        together = simulated_server.run_together(list(map(simulated_server.resolve, configs)), run_dirs, Progress())
        found = [of_point() for of_point in together]
    tables = [[(path / str(i) / name).read_bytes() for name in TABLES] for i in range(len(configs))]
    return found, tables


def test_points_of_a_sweep_leave_the_bytes_of_each_alone(tmp_path):
    together = simulated(POINTS, tmp_path / "together")
    for i, each in enumerate(POINTS):
        found, files = simulated([each], tmp_path / f"alone-{i}")
        assert (found[0], files[0]) == (together[0][i], together[1][i])
    assert len({str(found) for found in together[0]}) == len(POINTS)
    loaded, relaxed = together[0][0]["server"], together[0][3]["server"]
    assert loaded["preemptions"] > 0
    assert relaxed["queueing_share"] < 0.1 < loaded["queueing_share"]
    assert loaded["served"] == relaxed["served"] == 12
    assert relaxed["llama3_1_8b_slo_share"] == 1.0


def test_what_it_measures_is_shown_and_drawn(tmp_path):
    (found,), _ = simulated([SMALL], tmp_path)
    (table,) = simulated_server.tables(found)
    assert ["preemptions", f"{found['server']['preemptions']:,}"] in table.rows
    over_time, latency = simulated_server.figures(tmp_path / "0")
    assert [len(axes.lines) for axes in (*over_time.figure.axes, *latency.figure.axes)] == [2, 2, 2, 1]


def test_a_cache_stores_what_prompts_begin_with_once(tmp_path):
    """Each after the other: the first reads 8 + 5 tokens, the others find the 8, and read 5 each."""
    calm = dataclasses.replace(
        SMALL,
        memory=MemoryConfig(block_size=4, prefix_caching=True),
        workload=WorkloadConfig(lengths="constant", prompt_mean=5, output_mean=3, rate=1, num_requests=4),
        system_prompts=SystemPrompts(count=1, tokens=8),
    )
    hurried = dataclasses.replace(calm, workload=dataclasses.replace(calm.workload, rate=2), server=SHORTEST)
    found, _ = simulated([calm, hurried], tmp_path)
    for values in (each["server"] for each in found):
        assert values["hit_tokens"] == 3 * 8
        assert values["stored_share"] == 3 * 8 / (3 * 8 + 13 + 3 * 5)
    assert found[0]["server"]["makespan_s"] > 1.5 * found[1]["server"]["makespan_s"]


def test_a_predictor_is_off_by_a_factor_of_so_many_bits():
    load = WorkloadConfig(lengths="constant", prompt_mean=4, output_mean=4096, rate=1, num_requests=4000)
    workload = load_workload(load, 8192, 0)
    bits = np.log2(predict(workload, 1.5, 7) / 4096)
    assert abs(bits.mean()) < 0.08  # three standard errors
    assert bits.std() == pytest.approx(1.5, rel=0.04)
    assert (predict(workload, 1.5, 7) == predict(workload, 1.5, 7)).all()
    assert (predict(workload, 1.5, 7) != predict(workload, 1.5, 8)).any()
    # The same errors, scaled: a sweep over the error changes nothing else.
    assert np.log2(predict(workload, 0.75, 7) / 4096) == pytest.approx(bits / 2, abs=5e-3)
    one = dataclasses.replace(workload, output_len=np.ones(4000, np.int32))
    assert predict(one, 3.0, 7).min() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": dataclasses.replace(SMALL.server, policy=Policy(order="priority"))}, "server.policy: expected no"),
        ({"server": dataclasses.replace(SMALL.server, policy=Policy(victim="priority"))}, "server.policy: expected no"),
        ({"server": dataclasses.replace(SMALL.server, policy=Policy(max_adapters=2))}, "max_adapters: expected null"),
        ({"memory": MemoryConfig(block_size=4, num_blocks=9)}, "num_blocks: expected no more tokens than the 32 that"),
        ({"memory": MemoryConfig(forks=True)}, "memory.forks, memory.free_windows: expected false and true, as"),
        ({"memory": MemoryConfig(free_windows=False)}, "memory.forks, memory.free_windows: expected false and true"),
        ({"memory": MemoryConfig(prefix_caching=True)}, "memory.prefix_caching: expected false where no prompts share"),
        ({"system_prompts": SystemPrompts(0, 4)}, "system_prompts.count must be"),
        ({"prediction_error": 0.5}, "prediction_error: expected 0 with a policy that asks for no prediction, got 0.5"),
        ({"prediction_error": float("nan")}, "prediction_error: expected a number from 0 to below 8, got nan"),
        ({"slos": ("gpt4",)}, "slo: expected one of"),
        ({"cpu_devices": 0}, "cpu_devices must be"),
        ({"workload": dataclasses.replace(SMALL.workload, rate=-1.0)}, "rate must be > 0 requests per second, got -1"),
        ({"workload": dataclasses.replace(SMALL.workload, rate=1e-7)}, "arrival_ms: expected ascending times from 0"),
        ({"system_prompts": SystemPrompts(1, 20)}, "system_prompts.tokens: expected room for it"),
        ({"server": dataclasses.replace(SMALL.server, kv_memory="1 KiB")}, "budget_bytes: expected at least"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        simulated_server.resolve(dataclasses.replace(SMALL, **changes))


def test_prompts_that_nobody_can_serve_are_told(tmp_path):
    none = dataclasses.replace(
        SMALL,
        workload=dataclasses.replace(SMALL.workload, prompt_mean=20, output_mean=4, lengths="constant"),
        server=dataclasses.replace(SMALL.server, kv_memory="1 MiB"),
    )
    with pytest.raises(ValueError, match=re.escape(NOBODY)):
        simulated([none], tmp_path)


def test_a_point_that_cannot_be_served_does_not_stop_the_others(tmp_path, capsys):
    """With 1 MiB, 8 tokens, no prompt of 20 fits; the others need no more than 3 MiB."""
    small = ["--workload.lengths", "constant", "--workload.prompt_mean", "20", "--workload.output_mean", "4"]
    small += ["--workload.num_requests", "3", "--server.rows", "4", "--server.max_stride", "1", "--cpu_devices", "1"]
    axes = ["--memory.block_size", "4", "--axis", "server.kv_memory=3 MiB,1 MiB,4 MiB"]
    assert cli.main(["sweep", str(QUICKSTART), *small, *axes, "--out_dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    points = json.loads(out.splitlines()[-1])["points"]
    assert [point["status"] for point in points] == ["finished", "unfinished", "finished"]
    assert f"check failed: server.kv_memory=1 MiB: {NOBODY} (traceback: {tmp_path / points[1]['run']}" in err


def test_the_command_line_sweeps_it_together(tmp_path, capsys):
    small = ["--workload.num_requests", "20", "--server.rows", "4", "--server.max_stride", "1", "--cpu_devices", "1"]
    axes = ["--axis", "workload.rate=12,24", "--axis", "server.policy.order=first_come,shortest"]
    assert cli.main(["sweep", str(QUICKSTART), *small, *axes, "--out_dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "computing 4 of 4 points together" in err
    assert out.count("shortest") > 2
    assert len(list(tmp_path.glob("simulated_server-*/summary.json"))) == 4
    assert config.read_yaml(QUICKSTART)["experiment"] == "simulated_server"
