"""Two servers in a row: when prompts arrive, what the second one is asked, and that it computes no prompt again."""

import dataclasses
import pathlib

import numpy as np
import polars as pl
import pytest

from experiments import config, disaggregation
from experiments.cost_config import CostConfig
from experiments.disaggregation import Link, Split
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.workloads import WorkloadConfig
from experiments.workloads.workload import Provenance, Workload

CONFIG = pathlib.Path(__file__).parents[2] / "configs/disaggregation/azure.yaml"
HALF = Server(
    model="Llama-3-8B",
    kv_memory="1 GiB",
    rows=4,
    max_model_len=256,
    token_budget=128,
    cost=CostConfig("roofline", model="Llama-3-8B", hardware="h100"),
    max_stride=1,
)
SMALL = disaggregation.Config(
    workload=WorkloadConfig(lengths="constant", prompt_mean=100, output_mean=5, num_requests=3, rate=float("inf")),
    split={"apart": Split(HALF, HALF)},
    slos=("llama3_1_8b",),
)


def run(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return disaggregation.run(disaggregation.resolve(asked), run_dir, Progress())


@pytest.mark.soak
def test_the_second_server_answers_what_the_first_has_read(tmp_path):
    found = run(SMALL, tmp_path / "run")["apart"]
    with RunDirectory.open(tmp_path / "run") as run_dir:
        read, answered = (
            run_dir.require_part(f"apart-{role}").read_parquet("requests.parquet") for role in ("prefill", "decode")
        )
        steps = run_dir.require_part("apart-decode").read_parquet("steps.parquet")
        requests = run_dir.read_parquet("requests.parquet")
    assert read["generated"].to_list() == [1, 1, 1]
    assert (found["devices"], found["served"], found["unfinished"], found["preemptions"]) == (2, 3, 0, 0)
    # Four more tokens for each, of which the first computes what the first server sampled, and nothing else.
    assert int(steps["new_tokens"].sum()) == 3 * 4
    assert (found["prompt_tokens_again"], int(steps["prefill_tokens"].sum())) == (0, 0)
    # 100 tokens are 7 blocks of 16 tokens of 131,072 bytes; a device sends 0.75 of 450 GB/s.
    assert (found["moved_blocks"], found["moved_gb"]) == (21, pytest.approx(21 * 16 * 131_072 / 1e9))
    link_ms = 7 * 16 * 131_072 / (0.75 * 450e9) * 1000 + 0.01
    assert (answered["arrival_ms"] - read["first_token_ms"]).to_list() == pytest.approx([link_ms] * 3)
    assert requests["first_token_ms"].to_list() == read["first_token_ms"].to_list()
    assert requests["ended_ms"].to_list() == answered["ended_ms"].to_list()
    assert requests["generated"].to_list() == [5, 5, 5]
    assert disaggregation.failed_checks({"apart": found}) == []


def test_prompts_move_one_after_another_in_order_of_their_first_tokens():
    # Request 1 is refused, 3 wants no second token, and 4 was read before 2.
    workload = Workload(
        Provenance(source="synthetic", rows_read=5, lengths="own", arrivals="all at 0"),
        arrival_ms=np.zeros(5),
        prompt_len=np.array([16, 17, 33, 8, 16], np.int32),
        output_len=np.array([3, 9, 2, 1, 4], np.int32),
    )
    read = pl.DataFrame(
        {
            "request": np.arange(5, dtype=np.int32),
            "generated": [1, 0, 1, 1, 1],
            "first_token_ms": [10.0, None, 12.5, 11.0, 11.0],
            "ended_ms": [10.0, 1.0, 12.5, 11.0, 11.0],
            "reason": ["length", "refused_too_long", "length", "length", "length"],
            "preemptions": [0, 0, 1, 0, 0],
        }
    )
    moved = disaggregation.move(read, workload, 16, 1000, Link(bytes_per_s=500_000, latency_us=500))
    assert moved["request"].to_list() == [0, 4, 2]
    assert moved["blocks"].to_list() == [1, 1, 3]
    assert moved["bytes"].to_list() == [1000, 1000, 3000]
    # 2 ms a block and half a one for each transfer: from 10 to 12.5, the next waits for it, and so does the last.
    assert moved["there_ms"].to_list() == [12.5, 15.0, 21.5]
    answers, delivered = disaggregation.to_answer(workload, moved)
    assert delivered.tolist() == [16, 16, 33]
    assert answers.prompt_len.tolist() == [17, 17, 34]
    assert answers.output_len.tolist() == [2, 3, 1]
    assert answers.arrival_ms.tolist() == [12.5, 15.0, 21.5]
    answered = pl.DataFrame(
        {"generated": [2, 3, 1], "ended_ms": [30.0, 40.0, 50.0], "reason": ["length"] * 3, "preemptions": [0, 2, 1]}
    )
    whole = disaggregation.joined(read, moved, answered, workload)
    assert whole["generated"].to_list() == [3, 0, 2, 1, 4]
    assert whole["ended_ms"].to_list() == [30.0, 1.0, 50.0, 11.0, 40.0]
    assert whole["preemptions"].to_list() == [0, 0, 2, 0, 2]


def test_a_link_waits_for_nobody_who_is_not_ready():
    done = disaggregation.one_after_another(np.array([0.0, 1, 9, 9]), np.array([2.0, 2, 1, 1]))
    assert done.tolist() == [2, 4, 10, 11]


def test_what_did_not_get_its_tokens_or_was_computed_twice_fails_the_run():
    found = {"apart": {"unfinished": 2, "prompt_tokens_again": 7, "preemptions": 0}}
    assert disaggregation.failed_checks(found) == [
        "apart: 2 requests did not get all their tokens",
        "apart: 7 tokens of prompts that had come were computed",
    ]
    assert disaggregation.failed_checks({"apart": found["apart"] | {"unfinished": 0, "preemptions": 1}}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split": {}}, "colocated, split: expected at least one arrangement"),
        ({"colocated": {"apart": HALF}}, "split: expected other names than those of colocated, got apart"),
        ({"slos": ("llama2",)}, "slo: expected one of"),
        (
            {"split": {"apart": Split(HALF, dataclasses.replace(HALF, max_model_len=128))}},
            "max_model_len: expected the",
        ),
        ({"split": {"apart": Split(HALF, Server())}}, "split.apart: expected costs of kind 'roofline'"),
    ],
)
def test_arrangements_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        disaggregation.resolve(dataclasses.replace(SMALL, **changes))


@pytest.mark.soak
def test_answers_are_more_even_where_no_prompt_comes_in_between(trace_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(trace_dir))
    found = run(config.decode(disaggregation.Config, config.read_yaml(CONFIG)), tmp_path / "run")
    together, apart = found["together"], found["apart"]
    assert disaggregation.failed_checks(found) == []
    assert together["served"] == apart["served"] == 4000
    assert apart["tpot_ms_p99"] < 0.6 * together["tpot_ms_p99"]
    assert apart["ttft_ms_p50"] > together["ttft_ms_p50"]
    assert apart["moved_gb"] == pytest.approx(apart["moved_blocks"] * 5_242_880 / 1e9)
