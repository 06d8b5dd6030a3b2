"""The whole experiment on a tiny untrained model: it shares, swaps, compares, and says what does not hold."""

import contextlib
import dataclasses
import re
import shutil

import numpy as np
import polars as pl
import pytest
from flax import nnx

from experiments import metrics
from experiments import parallel_sampling as experiment
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig
from models.checkpoint import save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder
from paxkv.cost_model import StepCost
from paxkv.policy import Policy

MODEL = DecoderConfig(vocab=256, width=16, layers=1, q_heads=2, kv_heads=1, head_dim=8, ffn=16, max_len=64)
PARTS = ["sampling-2", "sampling-2-unshared", "beam-3"]
PROMPTS, CAPACITY = 9, 31 * 4
CONFIG = experiment.Config(
    seed=3,
    workload=WorkloadConfig(
        lengths="exponential",
        prompt_mean=14.0,
        output_mean=10.0,
        max_prompt=24,
        max_total=40,
        num_requests=PROMPTS,
        rate=float("inf"),
    ),
    samples=(2,),
    beams=(3,),
    kv_memory="8000 B",  # 31 blocks of 256 B
    block_size=4,
    swap_space="3 KiB",  # 12
    rows=8,
    max_model_len=40,
    token_budget=16,
    policy=Policy(preemption="swap"),
    cost=StepCost(step_ns=1_000_000, swap_block_ns=500_000),
)


class DiesAt(Progress):
    """A progress bar whose process is killed when it comes to a part."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    @contextlib.contextmanager
    def task(self, name, total=None):
        if name == self.part:
            raise KeyboardInterrupt
        ended = []
        yield lambda amount=1, note="": ended.append(amount)
        assert sum(ended) == total


def begin(path):
    run_dir = RunDirectory.open(path)
    if not (path / "manifest.json").exists():
        run_dir.write_json("manifest.json", {"inputs": {}})
    return run_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(path, Decoder(MODEL, rngs=nnx.Rngs(0)), {"training.json": '{"untrained": true}'})
    return dataclasses.replace(CONFIG, model=path)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run that was killed after its first part and taken up: its results and its folder."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with begin(path) as run_dir, pytest.raises(KeyboardInterrupt):
        experiment.run(config, run_dir, DiesAt("sampling-2-unshared"))
    first = path / "parts" / "sampling-2" / "steps.parquet"
    written = first.stat().st_mtime_ns
    with begin(path) as run_dir:
        results = experiment.run(config, run_dir, DiesAt(None))
    assert first.stat().st_mtime_ns == written
    return results, path


def test_every_number_of_samples_is_served_sharing_and_not_and_every_width_of_beams_sharing(config):
    assert experiment.parts(config) == PARTS


@pytest.mark.slow
def test_sharing_saves_blocks_and_changes_no_sample_and_no_score(finished):
    results, _ = finished
    assert list(results) == PARTS
    assert experiment.failed_checks(results) == []
    sharing, alone = results["sampling-2"], results["sampling-2-unshared"]
    assert sharing["tokens_equal"] is True
    assert 0 < sharing["blocks_saved_share"] < sharing["peak_blocks_saved_share"] <= 1 / 2
    assert alone["blocks_saved_share"] == alone["copied_blocks"] == 0 < sharing["copied_blocks"]
    assert sharing["peak_running"] > alone["peak_running"]
    assert sharing["makespan_s"] < alone["makespan_s"]
    beams = results["beam-3"]
    assert beams["scores_equal"] is True
    assert beams["best_score"] < 0
    assert beams["requests"] == beams["served"] == PROMPTS * 3
    assert beams["copied_blocks"] > sharing["copied_blocks"]
    assert alone["swapped_out_blocks"] > 0
    for values in results.values():
        assert values["swapped_bytes"] == 256 * (values["swapped_out_blocks"] + values["swapped_in_blocks"])
        assert values["swap_ms"] == pytest.approx(0.5 * values["swapped_bytes"] / 256)


@pytest.mark.slow
def test_shares_are_of_block_time_while_anything_is_computed(finished):
    results, path = finished
    steps = pl.read_parquet(path / "steps.parquet")
    assert steps["case"].unique(maintain_order=True).to_list() == PARTS
    for name, values in results.items():
        own = steps.filter(pl.col("case") == name, pl.col("new_tokens") > 0)
        kinds = own.select("tokens", "reserved", "internal", "external").to_numpy()
        assert (kinds.sum(axis=1) == CAPACITY).all()
        saved, held, lasted = (own[column].to_numpy() for column in ("saved", "allocated", "duration_ms"))
        assert values["blocks_saved_share"] == pytest.approx(saved @ lasted / ((saved + held) @ lasted))
        assert values["peak_blocks_saved_share"] == pytest.approx(np.max(saved / np.maximum(saved + held, 1)))
        assert values["copied_blocks"] == own["copied_blocks"].sum()


@pytest.mark.slow
def test_tables_and_figures_are_made_of_what_the_run_left(finished):
    results, path = finished
    tables = experiment.tables(results)
    swapping = [name for name in PARTS if results[name]["swapped_bytes"]]
    assert [[row[0] for row in table.rows] for table in tables] == [PARTS, PARTS, swapping]
    assert all(len(row) == len(table.headings) for table in tables for row in table.rows)
    quiet = {name: values | {"swapped_bytes": 0} for name, values in results.items()}
    assert len(experiment.tables(quiet)) == 2
    assert [figure.title for figure in experiment.figures(path)] == [
        "What sharing saves",
        "Running sequences: sampling",
        "Running sequences: beam",
    ]
    explained_here = experiment.GLOSSARY.keys() - metrics.GLOSSARY.keys()
    assert explained_here <= {metric for values in results.values() for metric in values}


def tampered(path, tmp_path, part, table, **columns):
    copy = tmp_path / "tampered"
    shutil.copytree(path, copy)
    file = copy / "parts" / part / f"{table}.parquet"
    pl.read_parquet(file).with_columns(**columns).write_parquet(file)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "table", "columns", "failure"),
    [
        ("sampling-2", "requests", {"tokens": pl.col("tokens").list.reverse()}, "samples are not those drawn without"),
        ("beam-3", "requests", {"score": pl.col("score") - 0.1}, "beam-3: scores are off by up to"),
        ("beam-3", "steps", {"reserved": pl.col("reserved") + 1}, "beam-3: the usage of .* steps does not add up"),
        ("sampling-2-unshared", "steps", {"saved": pl.col("saved") + 4}, "unshared: the usage of .* steps"),
        ("beam-3", "requests", {"generated": pl.lit(0)}, "beam-3: 27 sequences were not served"),
    ],
)
def test_what_does_not_hold_is_told(config, finished, tmp_path, part, table, columns, failure):
    with begin(tampered(finished[1], tmp_path, part, table, **columns)) as run_dir:
        results = experiment.run(config, run_dir, Progress())
    (told,) = experiment.failed_checks(results)
    assert re.search(failure, told)


def test_more_sharing_that_saves_less_is_told():
    found = {"refused_or_empty": 0, "miscounted_steps": 0}
    shares = {"sampling-2": 0.1, "sampling-6": 0.2, "sampling-10": 0.15, "beam-2": 0.05, "beam-10": 0.3}
    results = {name: found | {"blocks_saved_share": share} for name, share in shares.items()}
    assert experiment.failed_checks(results) == [
        "sampling-10: saves 15.00% of the blocks, less than the 20.00% of sampling-6",
        "beam-2: saves 5.00% of the blocks, less than the 10.00% of sampling-2",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": (), "beams": ()}, "samples, beams: expected at least one"),
        ({"samples": (1,)}, "samples must be at least 2, got 1"),
        ({"beams": (2, 2)}, "beams: expected no number twice"),
        ({"beams": (9,)}, "rows: expected at least 9, as all beams of a prompt run together, got 8"),
        ({"temperature": 0.0}, "temperature: expected a positive, finite number"),
        ({"near_tie": -1.0}, "near_tie: expected a finite difference"),
        ({"swap_space": "0 GiB"}, "swap_space: expected room for at least one block with policy.preemption: swap"),
        ({"policy": Policy()}, "swap_space: expected .* '0 GiB' otherwise, got '3 KiB'"),
        ({"kv_memory": "100 B"}, "expected at least 256, one block, got 100"),
        ({"max_model_len": 65}, "max_model_len: expected at most 64"),
        ({"model_sha256": "abc"}, "model_sha256: expected the model abc"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_leaves_a_directory(config, change, message):
    with pytest.raises(ValueError, match=message):
        experiment.resolve(dataclasses.replace(config, **change))


def test_a_resolved_config_names_its_model_and_stays_as_it_is(config):
    known = experiment.resolve(config)
    assert len(known.model_sha256) == 64
    assert experiment.resolve(known) == known
