"""A clock that made the measurements is found again; what cannot be found is said."""

import json

import numpy as np
import polars as pl
import pytest
import yaml

from experiments import cli, files
from experiments import config as configs
from experiments.calibrate import fit, yaml_of
from experiments.cost_config import CostConfig, make_cost
from experiments.errors import UserError
from paxkv.cost_model import StepCost

TRUE = StepCost(step_ns=3_000_000, token_ns=20_000, kv_token_ns=150)


def measured(dispatches=40, per_dispatch=4, noise_ms=0.0, seed=0, clock=TRUE):
    """Steps of drawn work, timed by dispatch; in every third dispatch the last step did nothing and is missing."""
    rng = np.random.default_rng(seed)
    tables = []
    for dispatch in range(dispatches):
        steps = per_dispatch - (dispatch % 3 == 2)
        tokens, kv_tokens = rng.integers(1, 300, steps), rng.integers(1, 50_000, steps)
        ns = clock.step_ns * per_dispatch + clock.token_ns * tokens.sum() + clock.kv_token_ns * kv_tokens.sum()
        wall_ms = ns / 1e6 + noise_ms * rng.standard_normal()
        table = {"step": dispatch * per_dispatch + np.arange(steps), "new_tokens": tokens, "kv_tokens": kv_tokens}
        tables.append(pl.DataFrame(table).with_columns(wall_ms=pl.lit(wall_ms / per_dispatch)))
    return pl.concat(tables).with_columns(pl.col("step", "new_tokens", "kv_tokens").cast(pl.Int32))


def test_the_clock_that_made_the_steps_is_found_though_idle_steps_are_missing():
    found = fit(measured(), 4)
    assert found[:3] == (TRUE.step_ns, TRUE.token_ns, TRUE.kv_token_ns)
    assert found.r_squared == pytest.approx(1, abs=1e-9)
    assert found.mean_error_ms == pytest.approx(0, abs=1e-4)
    assert found.dispatches == 40


def test_noise_shows_in_what_is_left_over():
    found = fit(measured(400, noise_ms=2.0), 4)
    assert found.step_ns == pytest.approx(TRUE.step_ns, rel=0.05)
    assert found.token_ns == pytest.approx(TRUE.token_ns, rel=0.05)
    assert found.kv_token_ns == pytest.approx(TRUE.kv_token_ns, rel=0.05)
    assert found.mean_error_ms == pytest.approx(2 * np.sqrt(2 / np.pi), rel=0.15)
    assert 0.8 < found.r_squared < 1


def test_nothing_takes_less_than_no_time():
    steps = measured().with_columns(wall_ms=10 - 1e-5 * pl.col("kv_tokens").sum().over(pl.col("step") // 4))
    found = fit(steps, 4)
    assert min(found.token_ns, found.kv_token_ns) == 0
    assert found.step_ns >= 1


def test_steps_that_do_not_tell_the_figures_apart_are_refused():
    with pytest.raises(UserError, match="a fit needs at least 4 dispatches that differ in their tokens, got 3"):
        fit(measured(3), 4)
    for constant in ({"new_tokens": 5}, {"kv_tokens": 0}):
        steps = measured().filter(pl.col("step") // 4 % 3 != 2).with_columns(**constant)
        with pytest.raises(UserError, match="constant or in proportion"):
            fit(steps, 4)
    with pytest.raises(UserError, match="constant or in proportion"):
        fit(measured().with_columns(kv_tokens=3 * pl.col("new_tokens")), 4)


@pytest.fixture
def run(tmp_path):
    """A run of two memories, with only what the command reads."""
    folder = tmp_path / "runs" / "paged_vs_contiguous-01234567-0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("steps_per_dispatch: 4\n")
    other = StepCost(step_ns=1_000_000, token_ns=70_000, kv_token_ns=0)
    parts = {"paged": measured(), "reserved": measured(seed=1, clock=other)}
    steps = pl.concat(part.select(pl.lit(name).alias("memory"), pl.all()) for name, part in parts.items())
    files.write_parquet(folder / "steps.parquet", steps)
    return folder


def test_the_command_fits_every_memory_of_a_run_and_leaves_the_run_as_it_is(run, capsys):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert cli.main(["calibrate", str(run)]) == 0
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["results"]
    assert [found[name]["token_ns"] for name in ("paged", "reserved")] == [20_000, 70_000]
    written = files.read_json(run.with_name(f"{run.name}.calibration.json"))
    assert (written["fits"], written["steps_per_dispatch"]) == (found, 4)
    (pasted,) = (line for line in out.splitlines() if "step_ns: 1000000" in line)
    config = configs.decode(CostConfig, yaml.safe_load(pasted)["cost"])
    assert make_cost(config) == StepCost(step_ns=1_000_000, token_ns=70_000, kv_token_ns=0)
    assert pasted.strip() == yaml_of(fit(measured(seed=1, clock=make_cost(config)), 4))


def test_runs_without_measured_steps_and_files_inside_of_a_run_are_refused(run, capsys):
    def said(*argv):
        assert cli.main(["calibrate", str(run), *argv]) == 2
        return capsys.readouterr().err

    assert "which stays as it is" in said("--out", str(run / "calibration.json"))
    assert "there is no folder" in said("--out", str(run / "none" / "calibration.json"))
    steps = files.read_parquet(run / "steps.parquet")
    files.write_parquet(run / "steps.parquet", steps.with_columns(wall_ms=pl.lit(None, pl.Float64)))
    assert "has no measured steps: none has a wall_ms" in said()
    for column, said_of_it in (
        (pl.lit(7.0).alias("wall_ms"), "got 28 ms for all of them"),
        (pl.lit(np.nan).alias("wall_ms"), "expected finite times in wall_ms of steps.parquet, got nan in"),
        (pl.lit("a").alias("wall_ms"), "expected numbers in wall_ms of steps.parquet, got String"),
        (pl.lit(0.5).alias("kv_tokens"), "expected whole numbers in kv_tokens of steps.parquet, got Float64"),
    ):
        files.write_parquet(run / "steps.parquet", steps.with_columns(column))
        assert said_of_it in said()
    for steps_per_dispatch in ("0", "a", "2.5", "null"):
        (run / "config.yaml").write_text(f"steps_per_dispatch: {steps_per_dispatch}\n")
        assert "expected a whole number of at least 1, got" in said()
    (run / "config.yaml").write_text("steps_per_dispatch: 4\n")
    files.write_parquet(run / "steps.parquet", steps.drop("wall_ms", "kv_tokens"))
    assert "has no measured steps: steps.parquet lacks kv_tokens, wall_ms" in said()
    assert not run.with_name(f"{run.name}.calibration.json").exists()
