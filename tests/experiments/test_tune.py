"""The tuner outlives its candidates, keeps what is worth keeping, and writes it where kernels look."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from experiments import cli, tune, tune_job
from experiments import config as configs
from experiments.tune import Device, Trial
from pallas_kernels import choices, offline, tuning
from pallas_kernels._triton_attention import Tiling
from pallas_kernels.offline_cases import KERNELS

REPOSITORY = pathlib.Path(__file__).parents[2]
CASE = "paged_decode/decode_d64_kv2_g4_b16_f32"
ENTRY = "paged_decode/d64_kv2_g4_b16_f32"
GPU = Device("gpu", "Some GPU 80GB", here=True)
DEFAULT = Tiling(16, 32, 4, 3)
SMALL = {case.name: case for case in KERNELS["paged_decode"].cases}["decode_d64_kv2_g4_b16_f32"]


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Tunes on a GPU that is played, and gives the exit code and what was printed last."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "tuned")
    monkeypatch.setattr(tune, "describe", lambda config: GPU)
    monkeypatch.setattr(tune, "MEASURE", "tests.experiments.tune_jobs:measure")
    (tmp_path / "tuned").mkdir()
    config = tmp_path / "config.yaml"

    def call(grid, *arguments):
        tuning.read_table.cache_clear()
        config.write_text(json.dumps({"cases": [CASE.replace("f32", "f3?")], "grids": {"decode": grid}}))
        return cli.main(["tune", str(config), *arguments])

    yield call
    tuning.read_table.cache_clear()


def results_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]


def test_candidates_that_crash_hang_or_are_wrong_cost_themselves_alone(tuned, capsys, tmp_path):
    out = tmp_path / "out.json"
    grid = {"num_stages": [1, 2, 3, 4, 5], "kv_tile": [16]}
    assert tuned(grid, "--time_limit_s", "3", "--out", str(out)) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out.splitlines()[-1])["results"].values()
    assert row == {
        "tried": 6,
        "failed": 4,
        "default": 40.0,
        "best": 16.0,
        "gain": 1.5,
        "sizes": json.dumps({"num_stages": 5, "kv_tile": 16}),
    }
    statuses = [trial["status"] for trial in json.loads(out.read_text())["trials"][CASE]]
    assert statuses == ["ok", "crashed", "timed_out", "refused", "failed", "ok"]


def test_what_is_installed_is_what_a_kernel_is_made_with(tuned, capsys):
    path = tuning.table_path(GPU.kind)
    assert tuned({"num_stages": [5], "kv_tile": [16, 64]}) == 0
    assert not path.exists()
    assert capsys.readouterr().err == f"1 of 1 cases have better sizes that --install would keep in {path}\n"
    assert tuned({"num_stages": [5], "kv_tile": [16, 64]}, "--install") == 0
    assert capsys.readouterr().err == f"1 of 1 cases have better sizes installed in {path}\n"
    entry = json.loads(path.read_text())["entries"][ENTRY]
    assert (path.name, entry["how"], entry["metric"], entry["value"]) == ("some_gpu_80gb.json", "measured", "ms", 16.0)
    with choices.recording() as found:
        tuning.choose(ENTRY, DEFAULT, GPU.kind)
        tuning.choose(ENTRY, DEFAULT, "Another GPU")
    assert [(choice["sizes"]["kv_tile"], choice["source"]) for choice in found[ENTRY]] == [
        (16, "some_gpu_80gb.json"),
        (32, "default"),
    ]


def test_an_entry_leaves_the_table_when_the_default_has_become_best(tuned, capsys):
    tuned({"num_stages": [5], "kv_tile": [16]}, "--install")
    tuned({"num_stages": [5], "kv_tile": [64]}, "--install")
    assert json.loads(tuning.table_path(GPU.kind).read_text())["entries"] == {}


def refused(tuned, capsys, monkeypatch, *arguments):
    """What is said of a call that must be refused before anything is tried."""

    def tries(*_):
        raise AssertionError("a candidate was tried")

    monkeypatch.setattr(tune, "attempt", tries)
    assert tuned({"kv_tile": [16]}, *arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("out", ["none/out.json", "tuned"])
def test_results_that_could_not_be_written_are_not_computed(tuned, capsys, monkeypatch, tmp_path, out):
    assert f"cannot write {tmp_path / out}" in refused(tuned, capsys, monkeypatch, "--out", str(tmp_path / out))


def test_entries_that_could_not_be_installed_are_not_looked_for(tuned, capsys, monkeypatch, tmp_path):
    path = tuning.table_path(GPU.kind)
    path.write_text('{"device_kind": "Some GPU 80GB", "entr')
    assert f"{path} must be a table of sizes" in refused(tuned, capsys, monkeypatch, "--install")
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "none")
    assert f"cannot write {tuning.table_path(GPU.kind)}" in refused(tuned, capsys, monkeypatch, "--install")


def test_two_cases_may_not_write_one_entry(tuned, capsys, monkeypatch):
    cases = "[paged_decode/d128_kv8_g4_b16_fp8*]"
    assert re.search(
        r"one case for each entry, got paged_decode/d128_kv8_g4_b16_fp8 and paged_decode/d128_kv8_g4_b16_fp8_head_new",
        refused(tuned, capsys, monkeypatch, "--install", "--cases", cases),
    )


@pytest.mark.parametrize(("name", "kind"), [("gpu", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v6 lite")])
def test_what_the_configs_find_can_be_installed(name, kind):
    config = configs.decode(tune.Config, configs.read_yaml(REPOSITORY / f"configs/kernel_tune/{name}.yaml"))
    device = Device(name, kind, here=name == "gpu")
    tune.require_installable(config, device, tune.cases(config, device))


@pytest.mark.parametrize(
    ("trials", "least_gain", "sizes"),
    [
        ([({}, 10.0), ({"kv_tile": 1}, 9.9)], 0.03, {}),
        ([({}, 10.0), ({"kv_tile": 1}, 9.9)], 0.01, {"kv_tile": 1}),
        ([({}, None), ({"kv_tile": 1}, 99.0)], 0.03, {"kv_tile": 1}),
        ([({}, 1.0), ({"kv_tile": 1}, None)], 0.03, {}),
    ],
)
def test_a_candidate_is_kept_if_it_beats_the_default_by_enough(trials, least_gain, sizes):
    row = tune.judge([Trial(given, "ok", "", value) for given, value in trials], least_gain)
    assert json.loads(row["sizes"]) == sizes


def test_a_case_of_which_nothing_runs_fails_the_command(tuned, monkeypatch, capsys):
    refuse = offline.Outcome("refused", {}, "no", 0.0)
    monkeypatch.setattr(offline, "run_job", lambda *_, **__: refuse)
    assert tuned({"kv_tile": [16]}) == 1
    assert f"no candidate of {CASE} ran" in capsys.readouterr().err


def test_help_lists_the_keys_with_the_values_of_the_config(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("{target: v6e}")
    assert cli.main(["tune", str(tmp_path / "c.yaml"), "--repeats", "17", "--help"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--target", "str", "|", "None", "v6e"] in [row[:5] for row in rows]
    assert ["--repeats", "int", "17", "rounds"] in [row[:4] for row in rows]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: h100", "target must be a TPU or null, got h100"),
        ("target: v7e", "target must be one of v5e, v5p, v6e, tpu7x, got 'v7e'"),
        ("{target: v6e, cases: [paged_prefill/*]}", "cases must be of decode"),
        ("{target: v6e, cases: [paged_decode/d127*]}", "cases must match a kernel/case of TPU v6 lite, got"),
        ("{target: v6e, jobs: 0}", "jobs must be at least 1, got 0"),
        ("{target: v6e, calls: 0}", "calls must be at least 1, got 0"),
        ("{target: v6e, grids: {encode: {}}}", r"grids must be of decode and prefill, got \['encode'\]"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, capsys, text, words):
    (tmp_path / "c.yaml").write_text(text)
    assert cli.main(["tune", str(tmp_path / "c.yaml")]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_machine_without_an_accelerator_is_told_to_name_a_target(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "describe", lambda config: Device("cpu", "cpu", here=True))
    (tmp_path / "c.yaml").write_text("{}")
    assert cli.main(["tune", str(tmp_path / "c.yaml")]) == 2
    assert (
        "target must be one of v5e, v5p, v6e, tpu7x where there is no GPU or TPU, got null" in capsys.readouterr().err
    )


def test_cycles_of_a_sequence_are_those_of_its_bytes_and_those_around():
    # 24 blocks of 16 slots, 2 heads of 64 elements of 4 bytes, keys and values: 0.375 MiB.
    assert tune.cycles_per_seq(SMALL, {"cycles_per_mib": 1000.0, "outer_cycles": 7}) == 382.0


def test_a_candidate_is_timed_with_its_sizes_and_compared_with_the_reference(tmp_path, monkeypatch):
    call = {"kernel": "paged_decode", "case": SMALL.name, "backend": "triton_interpret", "seed": 0}
    call |= {"repeats": 2, "calls": 1, "dump_dir": tmp_path}
    with choices.recording() as found:
        report = tune_job.measure(**call, sizes={"kv_tile": 128})
    assert 0 < report["ms_lower_quartile"] <= report["ms"] <= report["ms_upper_quartile"]
    assert [(c["sizes"]["kv_tile"], c["source"]) for c in found[ENTRY]] == [(128, "candidate")]

    def twice(case, backend):
        program = KERNELS["paged_decode"].build(case, backend)
        wrong = 1.0 if backend == "xla" else 1.01
        return program._replace(function=lambda **arrays: wrong * program.function(**arrays))

    monkeypatch.setattr(tune_job, "KERNELS", {"paged_decode": KERNELS["paged_decode"]._replace(build=twice)})
    with pytest.raises(ValueError, match="must be the reference's but for rounding, got a difference of 1"):
        tune_job.measure(**call, sizes={})


def test_every_sequence_of_a_timed_case_is_full_and_no_block_is_shared():
    shapes = KERNELS["paged_decode"].build(SMALL, "xla").arguments
    arrays = tune_job.fill(SMALL, shapes, seed=1)
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        name: (a.shape, a.dtype) for name, a in shapes.items()
    }
    np.testing.assert_array_equal(arrays["kv_lens"], np.full(8, 24 * 16))
    assert sorted(np.asarray(arrays["block_tables"]).ravel()) == list(range(8 * 24))
    assert jax.numpy.all(arrays["cu_q_lens"] == jax.numpy.arange(9))
