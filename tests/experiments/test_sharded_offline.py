"""Servers compiled for absent devices, from the command line; the compilers are played by a function."""

import dataclasses
import json

import pytest

from experiments import cli, sharded_figures, sharded_offline, sharded_serving
from experiments.collectives import Collective
from experiments.sharded_model import StepWork, sent_bytes
from experiments.sharded_offline import Offline
from pallas_kernels.offline import Outcome
from pallas_kernels.targets import TARGETS
from paxkv.config import MemoryConfig

WORK = StepWork(4e9, 1e5, 4e9, 0.0, 1e6)
COMPILED = {
    "devices": 8, "replicas": 1, "weight_bytes_per_device": 7, "usable_bytes": 99, "reserve_bytes": 20, "fits": True,
    "missing": "", "blocks": 64, "blocks_by_compiler": 65, "blocks_deviation": 1 / 65, "capacity_tokens": 8192,
    "kv_bytes_per_device": 50, "predicted_kv_bytes_per_device": 50, "compiled_kv_bytes_per_device": 50,
    "argument_bytes": 60, "output_bytes": 51, "alias_bytes": 50, "temp_bytes": 9, "total_bytes": 70,
    "unexpected_exchanges": "", "kernel": "paged_attention: triton", "work": dataclasses.asdict(WORK),
}  # fmt: skip
NAME = "h100x8/llama3_8b/d1m8k1"


@pytest.fixture
def compiler(monkeypatch):
    """What each case compiles to, if it is not `COMPILED`; and the cases that were asked for."""
    answers, asked = {}, []

    def answer(job, arguments, *, environment, time_limit_s):
        case = "/".join(arguments[name] for name in ("target", "model", "mesh"))
        asked.append(case)
        outcome = answers.get(case, COMPILED)
        return outcome if isinstance(outcome, Outcome) else Outcome("ok", outcome, "", 1.0)

    monkeypatch.setattr(sharded_offline.offline, "run_job", answer)
    monkeypatch.setattr(sharded_offline.jax_setup, "stay_on_cpu", lambda: None)
    return answers, asked


def run(tmp_path, *options):
    path = tmp_path / "config.yaml"
    path.write_text(
        "experiment: sharded_serving\nmeshes: [d1m8k1]\nrows: 64\nmax_model_len: 8192\n"
        "offline: {targets: [h100x8], models: [llama3_8b], context: 1000, jobs: 1}\n"
    )
    return cli.main(["run", str(path), "--out_dir", str(tmp_path / "runs"), *options])


def results_of(capsys):
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1])["results"], captured


def test_every_case_is_a_row_and_its_step_is_modelled(compiler, capsys, tmp_path):
    options = ("--meshes", "[d1m8k1, d1m2k4]", "--offline.targets", "[h100x8, v6e-8]")
    assert run(tmp_path, *options) == 0
    found, captured = results_of(capsys)
    assert set(found) == {f"{t}/llama3_8b/{m}" for t in ("h100x8", "v6e-8") for m in ("d1m8k1", "d1m2k4")}
    row = found[NAME]
    assert (row["tokens_equal"], row["fits"], row["blocks"], row["kv_bytes_per_device"]) == (None, True, 64, 50)
    # The pool holds eight sequences of 1000 tokens, though there are 64 rows.
    assert row["modelled_rows"] == 8
    h100 = TARGETS["h100"]
    seconds = (4e9 + 8 * 1000 * 1e5) / h100.memory_bytes_per_s + 8 * 1e6 / 450e9
    assert row["step_ms"] == pytest.approx(1000 * seconds)
    assert row["tokens_per_s"] == pytest.approx(8 / seconds)
    assert "work" not in row
    assert captured.out.count("Compiled for") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"compiled_kv_bytes_per_device": 100},
            "take 50 bytes by arithmetic, 50 as they are split, 100 in the compiled",
        ),
        ({"kv_bytes_per_device": 49}, "take 50 bytes by arithmetic, 49 as they are split"),
        ({"unexpected_exchanges": "all-gather of 9 bytes 1 times instead of 0"}, "all-gather of 9 bytes 1 times"),
        ({"alias_bytes": 49}, "gives its cache back in other memory"),
        ({"temp_bytes": 25}, "needs 25 bytes besides, more than the reserve"),
    ],
)
def test_a_step_that_is_not_as_it_should_be_fails_the_run(compiler, capsys, tmp_path, changes, words):
    compiler[0][NAME] = COMPILED | changes
    assert run(tmp_path) == 1
    assert words in results_of(capsys)[1].err


def test_what_does_not_fit_says_what_is_missing_and_fails_only_where_it_should_fit(compiler, capsys, tmp_path):
    compiler[0][NAME] = {"devices": 8, "replicas": 1, "fits": False, "missing": "weights of 17.64 GB exceed 15.48 GB"}
    assert run(tmp_path, f"--offline.at_most.{NAME}", "{fits: 0}") == 0
    assert "weights of 17.64 GB exceed 15.48 GB" in results_of(capsys)[1].out
    assert run(tmp_path, f"--offline.at_least.{NAME}", "{fits: 1}") == 1
    assert "fits must be at least 1, got False" in results_of(capsys)[1].err


def test_a_run_that_was_killed_compiles_what_is_left(compiler, capsys, tmp_path):
    answers, asked = compiler
    answers["h100x8/llama3_8b/d1m2k4"] = Outcome("missing", {}, "jax_plugins cannot be imported", 1.0)
    options = ("--meshes", "[d1m8k1, d1m2k4]")
    assert run(tmp_path, *options) == 2
    assert "jax_plugins cannot be imported" in capsys.readouterr().err
    del answers["h100x8/llama3_8b/d1m2k4"]
    assert run(tmp_path, *options) == 0
    assert asked == [NAME, "h100x8/llama3_8b/d1m2k4", "h100x8/llama3_8b/d1m2k4"]


def test_a_case_that_crashes_does_not_hide_the_others(compiler, capsys, tmp_path):
    compiler[0][NAME] = Outcome("crashed", {}, "Check failed", 1.0)
    assert run(tmp_path, "--meshes", "[d1m8k1, d1m1k8]") == 1
    found, captured = results_of(capsys)
    assert f"{NAME} was crashed: Check failed" in captured.err
    assert found["h100x8/llama3_8b/d1m1k8"]["fits"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offline": Offline(targets=("h100x9",))}, r"offline.targets: expected some of h100, .*, got 'h100x9'"),
        ({"offline": Offline(models=("llama9",))}, "models: expected names of published models"),
        ({"offline": Offline(models=("of_dict",))}, "models: expected names of published models"),
        ({"offline": Offline(models=("mro",))}, "offline.models: expected names of published models"),
        ({"offline": Offline(targets=())}, "offline.targets: expected at least one, and none twice"),
        ({"offline": Offline(models=("llama3_8b",) * 2)}, "offline.models: expected at least one, and none twice"),
        ({"offline": Offline(laid_out_anew=("x",))}, "offline.laid_out_anew: expected some of"),
        ({"offline": Offline(time_limit_s=0.0)}, "offline.time_limit_s: expected a finite number above 0"),
        ({"pairs": ("d1m1k1+d1m1k1",)}, "pairs: expected none with offline"),
        ({"rows": 0}, "h100x8/llama3_8b/d1m8k1: rows must be at least 1"),
        ({"kv_format": "nope"}, "got 'nope'"),
        ({"meshes": ("d1m1k3",)}, "d1m1k3: ffn: expected a multiple of the 3 parts"),
        ({"memory": MemoryConfig(kind="vattention")}, "memory.kind: expected 'paged'"),
        ({"meshes": ("d1m16k1",)}, "expected at most the devices of h100x8, got 16"),
        ({"meshes": ("d1m3k1",)}, "d1m3k1: mesh.model: expected a divisor of the 8 KV heads"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_once(compiler, changes, message):
    config = dataclasses.replace(sharded_serving.Config(meshes=("d1m8k1",), offline=Offline()), **changes)
    with pytest.raises(ValueError, match=message):
        sharded_serving.resolve(config)


def test_scaling_is_drawn_where_numbers_of_devices_differ(compiler, capsys, tmp_path):
    answers, _ = compiler
    for mesh, devices in (("d1m1k1", 1), ("d1m2k1", 2), ("d1m1k2", 2)):
        answers[f"h100x8/llama3_8b/{mesh}"] = COMPILED | {"devices": devices}
    assert run(tmp_path, "--meshes", "[d1m1k1, d1m2k1, d1m1k2]") == 0
    (path,) = (tmp_path / "runs").iterdir()
    strong, weak = sharded_figures.scaling(path)
    lines = {line.get_label(): line.get_xydata() for line in strong.figure.axes[0].lines}
    assert set(lines) == {"h100x8, heads", "h100x8, blocks"}
    assert lines["h100x8, heads"][:, 0].tolist() == [1, 2]
    alone, twice = (figure.figure.axes[0].lines[0].get_ydata()[1] for figure in (strong, weak))
    assert alone == pytest.approx(1000 * WORK.seconds(TARGETS["h100"], 64, 1000))
    assert twice == pytest.approx(1000 * WORK.seconds(TARGETS["h100"], 128, 1000))
    assert run(tmp_path, "--seed", "1") == 0
    alike = next(p for p in (tmp_path / "runs").iterdir() if p.name.endswith("-1"))
    assert sharded_figures.scaling(alike) == []


def test_a_step_is_bound_by_memory_or_by_products_and_waits_for_its_exchanges():
    h100 = TARGETS["h100"]
    bound = StepWork(0.0, 0.0, 1e12, 1e9, 0.0)
    assert bound.seconds(h100, 10, 100) == pytest.approx(10 * (1e12 + 100e9) / 989.4e12)
    sums = Collective("all-reduce", 800, "", 4)
    assert sent_bytes(sums, 8) == 2 * 3 / 4 * 800
    assert sent_bytes(sums._replace(group=None), 8) == 2 * 7 / 8 * 800
    assert sent_bytes(sums._replace(kind="all-gather"), 8) == 3 * 800
