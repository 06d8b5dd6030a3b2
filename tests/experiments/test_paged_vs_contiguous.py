"""The whole experiment on a tiny untrained model: it serves, compares, can be repeated and taken up again."""

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil

import polars as pl
import pytest
from flax import nnx

from experiments import cli
from experiments import paged_vs_contiguous as experiment
from experiments.config import config_hash
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig
from models.checkpoint import save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder
from pallas_kernels import choices
from pallas_kernels.contiguous_attention import api as contiguous_attention
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.paged_attention import api as paged_attention
from paxkv.config import MemoryConfig
from paxkv.cost_model import StepCost
from paxkv.policy import Policy

pytestmark = pytest.mark.slow

MODEL = DecoderConfig(vocab=256, width=16, layers=1, q_heads=2, kv_heads=1, head_dim=8, ffn=16, max_len=64)
PAGED = MemoryConfig(kind="paged", block_size=4)
MEMORIES = {
    "paged": PAGED,
    "vattention": MemoryConfig(kind="vattention", page="256 B"),  # 8 tokens
    "reserved_max": MemoryConfig(kind="reserved_max"),
    "reserved_pow2": MemoryConfig(kind="reserved_pow2", min_block=2),
    "reserved_oracle": MemoryConfig(kind="reserved_oracle"),
}
CAPACITIES = {"paged": 120, "vattention": 120, "reserved_max": 122, "reserved_pow2": 122, "reserved_oracle": 122}
CONFIG = experiment.Config(
    seed=3,
    workload=WorkloadConfig(
        lengths="exponential",
        prompt_mean=12.0,
        output_mean=14.0,
        max_prompt=40,
        max_total=60,
        num_requests=14,
        rate=2000.0,
        too_long="truncate",
    ),
    kv_memory="7840 B",  # 122.5 tokens
    rows=8,
    max_model_len=48,
    token_budget=16,
    steps_per_dispatch=16,
    policy=Policy(victim="least_work"),
    cost=StepCost(step_ns=1_000_000),
    memories=MEMORIES,
)


class Watched(Progress):
    """Notes which parts are computed, and dies before a part that it is told."""

    def __init__(self, die_before=None):
        super().__init__()
        self.computed = []
        self.die_before = die_before

    @contextlib.contextmanager
    def task(self, name, total=None):
        if name == self.die_before:
            raise KeyboardInterrupt
        self.computed.append(name)
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
    """A run that died after its first part and was taken up: its results and its folder."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with begin(path) as run_dir, pytest.raises(KeyboardInterrupt):
        experiment.run(config, run_dir, Watched(die_before="vattention"))
    before = {p: p.stat().st_mtime_ns for p in (path / "parts" / "paged").iterdir()}
    assert len(before) == 4
    assert not (path / "steps.parquet").exists()
    with begin(path) as run_dir:
        progress = Watched()
        results = experiment.run(config, run_dir, progress)
    assert progress.computed == ["vattention", "reserved_max", "reserved_pow2", "reserved_oracle"]
    assert before == {p: p.stat().st_mtime_ns for p in (path / "parts" / "paged").iterdir()}
    return results, path


def test_the_parts_are_the_memories(config):
    assert experiment.parts(config) == list(MEMORIES)


def test_every_memory_gives_the_same_tokens_and_accounts_for_its_memory(finished):
    results, _ = finished
    assert list(results) == list(MEMORIES)
    assert experiment.failed_checks(results) == []
    for name, values in results.items():
        assert values["tokens_equal"] is True
        assert values["unexplained_differences"] == 0
        assert values["capacity_tokens"] == CAPACITIES[name]
        assert values["requests"] == values["served"] == values["compared_requests"] == values["tokens_compared"] == 14
        shares = ("pool_utilization", "reservation_waste", "internal_waste", "external_waste", "remainder_waste")
        assert sum(values[share] for share in shares) == pytest.approx(1, abs=1e-12)
        assert values["budget_tokens"] == 122.5
        assert values["remainder_waste"] == pytest.approx((122.5 - CAPACITIES[name]) / 122.5)
        assert 0 < values["pool_utilization"] <= values["allocated_utilization"] <= 1
        assert values["tokens_reference"] == "paged"
        assert all(math.isfinite(v) for v in values.values() if not isinstance(v, str))
        assert all(any(metric.startswith(word) for metric in values) for word in experiment.GLOSSARY)
    assert results["paged"]["peak_running"] > results["reserved_max"]["peak_running"] == 1  # 48 are rounded up to 64
    assert results["paged"]["preemptions"] > 0
    assert results["vattention"]["map_calls"] > 0 == results["paged"]["map_calls"]
    assert results["reserved_max"]["reservation_waste"] > results["paged"]["reservation_waste"]


def test_the_tables_have_the_documented_columns_and_agree_with_the_results(finished):
    results, path = finished
    steps, requests, pool = (pl.read_parquet(path / f"{table}.parquet") for table in ("steps", "requests", "pool"))
    assert set(steps.columns) >= {
        *("memory", "step", "clock_ms", "duration_ms", "running", "waiting", "new_tokens", "preempted"),
        *("tokens", "reserved", "internal", "external", "allocated", "map_calls", "mapping_ms", "sync_mapping_ms"),
        *("recompute_tokens", "wall_ms"),
    }
    assert requests.columns == [
        *("memory", "request", "arrival_ms", "prompt_len", "output_len", "generated", "reason", "admitted_ms"),
        *("first_token_ms", "ended_ms", "preemptions", "tokens", "token_ms", "margins"),
    ]
    assert pool.columns == ["memory", "step", "owners"]
    for frame in (steps, requests):
        for column in frame.select(pl.selectors.float()):
            assert not column.is_nan().any(), column.name
            assert not column.is_null().any(), column.name
    for name, values in results.items():
        own = steps.filter(pl.col("memory") == name)
        capacity = own.select(pl.sum_horizontal("tokens", "reserved", "internal", "external")).to_series()
        assert (capacity == CAPACITIES[name]).all()
        assert (own["clock_ms"].diff().drop_nulls() - own["duration_ms"][:-1]).abs().max() < 1e-9
        assert values["steps"] == len(own.filter(pl.col("new_tokens") > 0))
        assert values["peak_running"] == own["running"].max()
        rows = requests.filter(pl.col("memory") == name)
        assert values["preemptions"] == rows["preemptions"].sum() == own["preempted"].sum()
        assert own["sampled"].sum() == rows["generated"].sum() == rows["tokens"].list.len().sum()
        assert (rows["token_ms"].list.last() == rows["ended_ms"]).all()
        assert (rows["token_ms"].list.first() == rows["first_token_ms"]).all()
        assert (rows["admitted_ms"] - rows["arrival_ms"]).min() > -1e-7  # arrivals are rounded up to a tick
        owners = pool.filter(pl.col("memory") == name)["owners"]
        assert owners[-1].to_list().count(-1) == len(owners[-1]), "all memory is free at the end"
        assert {owner for picture in owners for owner in picture} <= set(range(-1, 14))


def test_running_a_config_again_gives_equal_tables_but_for_measured_times(config, finished, tmp_path):
    results, path = finished
    with begin(tmp_path / "again") as run_dir:
        assert experiment.run(config, run_dir, Progress()) == results
    for table in ("steps", "requests", "pool"):
        first, again = (pl.read_parquet(p / f"{table}.parquet") for p in (path, tmp_path / "again"))
        assert first.columns == again.columns
        assert first.select(pl.exclude("^wall_.*$")).equals(again.select(pl.exclude("^wall_.*$")))


def test_figures_are_drawn_from_the_files_of_the_run(finished):
    _, path = finished
    figures = experiment.figures(path)
    assert len(figures) == 3 + len(MEMORIES)


def test_figures_can_be_drawn_of_a_run_that_refused_everybody(finished, tmp_path):
    _, path = finished
    shutil.copytree(path, tmp_path / "nobody")
    for table, columns in (("requests", ["generated"]), ("steps", ["new_tokens"])):
        file = tmp_path / "nobody" / f"{table}.parquet"
        pl.read_parquet(file).with_columns(pl.lit(0).alias(column) for column in columns).write_parquet(file)
    assert len(experiment.figures(tmp_path / "nobody")) == 3 + len(MEMORIES)


def changed(config, **memory):
    return dataclasses.replace(config, memories=config.memories | {"paged": dataclasses.replace(PAGED, **memory)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memories": {}}, "memories: expected at least one"),
        ({"memories": {"reference_kernels": PAGED}}, "memories.reference_kernels: expected another name"),
        ({"kv_memory": "8 GG"}, "kv_memory must end in one of"),
        ({"kv_memory": "100 B"}, "memories.paged: .* expected at least 256, one block, got 100"),
        ({"max_model_len": 65}, "max_model_len: expected at most 64"),
        ({"steps_per_dispatch": 0}, "steps_per_dispatch must be at least 1"),
        ({"near_tie": float("nan")}, "near_tie: expected a finite difference"),
        ({"near_tie": float("inf")}, "near_tie: expected a finite difference"),
        ({"near_tie": -1e-4}, "near_tie: expected a finite difference"),
        ({"token_budget": 7}, "token_budget: expected at least rows = 8"),
        ({"temperature": -1.0}, "temperature: expected a finite number"),
        (
            {"workload": WorkloadConfig(num_requests=3)},
            "lengths: expected a distribution with kind: synthetic, got None",
        ),
        ({"model_sha256": "abc"}, "model_sha256: expected the model abc, got .*; restore the checkpoint, or leave"),
        ({"model": pathlib.Path("nowhere")}, "no checkpoint at nowhere"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_leaves_a_directory(config, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        experiment.resolve(dataclasses.replace(config, **change))


def test_a_knob_that_is_wrong_is_named_with_its_memory(config):
    with pytest.raises(ValueError, match=r"memories\.paged: min_block: expected its default"):
        experiment.resolve(changed(config, min_block=2))


def test_a_memory_may_be_smaller_than_the_common_budget_but_not_larger(config):
    experiment.resolve(changed(config, num_blocks=30))
    with pytest.raises(ValueError, match=r"memories\.paged: expected room for at most 122 tokens, .*, got 124; lower"):
        experiment.resolve(changed(config, num_blocks=31))


def test_other_weights_are_another_run(config, tmp_path):
    known = experiment.resolve(config)
    assert experiment.resolve(known) == known
    shutil.copytree(config.model, tmp_path / "moved")
    assert config_hash(experiment.resolve(dataclasses.replace(config, model=tmp_path / "moved"))) == config_hash(known)
    save_checkpoint(tmp_path / "other", Decoder(MODEL, rngs=nnx.Rngs(1)), {"training.json": "{}"})
    other = dataclasses.replace(config, model=tmp_path / "other")
    assert config_hash(experiment.resolve(other)) != config_hash(known)
    with pytest.raises(ValueError, match="model_sha256: expected"):
        experiment.resolve(dataclasses.replace(known, model=other.model))


@pytest.fixture(scope="module")
def refusing(config, tmp_path_factory):
    """A run whose first memory has room for 16 tokens, and so refuses most, and whose second one refuses nobody."""
    path = tmp_path_factory.mktemp("runs") / "refusing"
    config = dataclasses.replace(config, memories={"small": dataclasses.replace(PAGED, num_blocks=4), "large": PAGED})
    with begin(path) as run_dir:
        return config, experiment.run(config, run_dir, Progress()), path


def test_requests_that_a_memory_refuses_are_compared_with_none_and_said_so(refusing):
    config, results, path = refusing
    requests = pl.read_parquet(path / "requests.parquet")
    small, large = (requests.filter(pl.col("memory") == name) for name in config.memories)
    served = ~small["reason"].str.starts_with("refused")
    assert 0 < served.sum() < 14
    assert large["reason"].to_list() == ["length"] * 14
    for values in results.values():
        assert values["compared_requests"] == values["tokens_compared"] == served.sum()
        assert values["tokens_equal"] is True
    latency = (large["ended_ms"] - large["arrival_ms"]).filter(served)
    assert results["large"]["latency_ms_mean"] == pytest.approx(latency.mean())
    (table,) = experiment.tables(results)
    assert f"latencies are of the {served.sum()} of 14 that every memory served" in table.title


def test_where_nothing_is_compared_nothing_is_said_to_be_equal(refusing, tmp_path):
    config, _, path = refusing
    shutil.copytree(path, tmp_path / "nobody")
    file = tmp_path / "nobody" / "parts" / "small" / "requests.parquet"
    pl.read_parquet(file).with_columns(
        pl.col("tokens", "token_ms", "margins").list.head(0),
        reason=pl.lit("refused_never_fits"),
        generated=pl.lit(0, pl.Int32),
        first_token_ms=pl.lit(None, pl.Float64),
    ).write_parquet(file)
    with begin(tmp_path / "nobody") as run_dir:
        results = experiment.run(config, run_dir, Progress())
    assert [values["served"] for values in results.values()] == [0, 14]
    for values in results.values():
        assert (values["compared_requests"], values["tokens_compared"], values["tokens_equal"]) == (0, 0, None)
        assert "latency_ms_mean" not in values
    assert experiment.failed_checks(results) == []
    (table,) = experiment.tables(results)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert rows["same tokens"] == rows["TTFT p50, ms (modelled)"] == ["-", "-"]
    assert rows["requests with tokens compared"] == ["0", "0"]
    assert len(experiment.figures(tmp_path / "nobody")) == 3 + len(config.memories)


def test_drawn_tokens_are_compared_as_well(config, tmp_path):
    memories = {name: MEMORIES[name] for name in ("paged", "reserved_max")}
    config = dataclasses.replace(config, temperature=1.0, memories=memories)
    with begin(tmp_path / "run") as run_dir:
        results = experiment.run(config, run_dir, Progress())
    assert [(values["tokens_compared"], values["tokens_equal"]) for values in results.values()] == [(14, True)] * 2
    tokens = pl.read_parquet(tmp_path / "run" / "requests.parquet")["tokens"].explode()
    assert tokens.n_unique() > 100, "an untrained model is far from sure"


OPERATIONS = {
    "paged_attention": paged_attention.BACKENDS,
    "contiguous_attention": contiguous_attention.BACKENDS,
    "kv_write": kv_write.BACKENDS,
}


def serve_with(kernels, config, path):
    """Three requests under two memories with these kernels: the results, the tokens by memory and the backends."""
    config = dataclasses.replace(
        config,
        kernels=kernels,
        kv_memory="7680 B",  # 120 tokens: kernels for TPUs want a multiple of 8
        workload=dataclasses.replace(config.workload, num_requests=3),
        memories={"paged": dataclasses.replace(PAGED, block_size=8), "reserved_max": MEMORIES["reserved_max"]},
    )
    assert experiment.parts(config) == ["paged", "reserved_max", "reference_kernels"]
    with begin(path) as run_dir, choices.recording() as chosen:
        results = experiment.run(config, run_dir, Progress())
    requests = pl.read_parquet(path / "requests.parquet").partition_by("memory", as_dict=True, include_key=False)
    assert list(requests) == [("paged",), ("reserved_max",)]
    backends = {op: [choice["backend"] for choice in chosen[op]] for op in OPERATIONS}
    return results, [frame["tokens"].to_list() for frame in requests.values()], backends


@pytest.mark.parametrize(
    ("kernels", "backend"),
    [
        ("interpret", "triton_interpret"),
        pytest.param("mosaic_tpu_interpret", "mosaic_tpu_interpret", marks=pytest.mark.soak),
    ],
)
def test_named_kernels_are_held_against_the_reference(config, tmp_path, kernels, backend):
    results, tokens, backends = serve_with(kernels, config, tmp_path / "run")
    assert backends["contiguous_attention"] == [backend]
    assert backends["paged_attention"][0] == backends["kv_write"][0] == backend
    assert experiment.failed_checks(results) == []
    assert list(results) == ["paged", "reserved_max"]
    for values in results.values():
        assert (values["tokens_reference"], values["tokens_compared"]) == ("paged with kernels: xla", 3)
        assert values["tokens_equal"] is True
    assert min(len(answer) for answer in tokens[0]) > 0
    (table,) = experiment.tables(results)
    assert "tokens are compared with those of paged with kernels: xla" in table.title


def test_kernels_that_are_wrong_in_the_same_way_under_every_memory_are_caught(config, tmp_path, monkeypatch):
    def attends_to_nothing_but_itself(q, *_, **__):
        return q, None

    for operation in ("paged_attention", "contiguous_attention"):
        monkeypatch.setitem(OPERATIONS[operation], "mine", attends_to_nothing_but_itself)
    monkeypatch.setitem(OPERATIONS["kv_write"], "mine", OPERATIONS["kv_write"]["xla"])
    results, tokens, _ = serve_with("mine", config, tmp_path / "run")
    assert tokens[0] == tokens[1]
    assert [line.split(" requests ")[1] for line in experiment.failed_checks(results)] == [
        "got other tokens than from paged with kernels: xla"
    ] * 2


@pytest.mark.soak
def test_interpreted_kernels_serve_the_trained_model(tmp_path, capsys):
    command = "run configs/paged_vs_contiguous/quickstart.yaml --workload.num_requests 20 --kernels interpret"
    assert cli.main([*command.split(), "--out_dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert list(results) == list(MEMORIES)
    for values in results.values():
        assert (values["tokens_reference"], values["tokens_compared"]) == ("paged with kernels: xla", 20)
        assert values["tokens_equal"] is True


def test_only_memories_with_room_on_the_host_swap(config, tmp_path):
    host = dataclasses.replace(PAGED, swap_space="4 KiB")
    config = dataclasses.replace(
        config, memories={"paged": PAGED, "host": host}, policy=Policy(preemption="swap", victim="least_work")
    )
    with begin(tmp_path / "run") as run_dir:
        results = experiment.run(experiment.resolve(config), run_dir, Progress())
    assert experiment.failed_checks(results) == []
    paged, swapping = results["paged"], results["host"]
    assert paged["swapped_out_blocks"] == 0 < paged["recompute_tokens"]
    assert swapping["swapped_out_blocks"] > 0 == swapping["recompute_tokens"]
    assert swapping["hit_tokens"] > 0 == paged["hit_tokens"]
    assert swapping["swap_ms"] == 0, "no cost was given"
    (table,) = experiment.tables(results)
    assert {"blocks swapped out", "blocks swapped in", "tokens found stored"} < {row[0] for row in table.rows}
    (table,) = experiment.tables({"paged": paged})
    assert not any("swapped" in row[0] or "stored" in row[0] for row in table.rows)


def test_a_swap_that_nobody_could_make_and_room_that_nobody_would_use_are_refused(config):
    with pytest.raises(ValueError, match=r"policy.preemption: 'swap' needs a memory with `swap_space`"):
        experiment.resolve(dataclasses.replace(config, policy=Policy(preemption="swap")))
    with pytest.raises(ValueError, match=r"memories\.paged\.swap_space: expected '0 GiB', as policy.preemption is"):
        experiment.resolve(changed(config, swap_space="4 KiB"))


def test_averages_over_all_busy_time_are_marked(finished):
    results, _ = finished
    (table,) = experiment.tables(results)
    assert table.title == "The same requests and KV budget under each memory"
    (table,) = experiment.tables(results | {"paged": results["paged"] | {"queueing_share": 0.0}})
    assert table.title.endswith("; nobody ever queued under paged: averages there are over all busy time")
    assert [row[1] for row in table.rows if row[0] == "time with requests queueing"] == ["0.0%"]


def test_a_memory_whose_units_have_no_name_is_served_and_drawn_all_the_same(config, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "UNITS", {})
    config = dataclasses.replace(config, memories={"mine": PAGED})
    with begin(tmp_path / "mine") as run_dir:
        experiment.run(config, run_dir, Progress())
    assert experiment.figures(tmp_path / "mine")[-1].figure.axes[0].get_ylabel() == "unit"
