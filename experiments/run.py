"""`run`: from a config to a finished run directory."""

import pathlib
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.markup
import rich.table

from experiments import config as configs
from experiments import files, jax_setup, manifest, page, registry, results
from experiments.errors import UserError
from experiments.processes import ALONE, Group, joined
from experiments.progress import Progress
from experiments.run_directory import CONFIG, ERROR, MANIFEST, REPORT, SUMMARY, RunDirectory
from pallas_kernels import choices

TIME_LIMIT = "process_time_limit_s"
"""The key of a config that several processes can run: how long one waits for another."""


class Loaded(NamedTuple):
    """A config with the experiment it belongs to."""

    experiment: registry.Experiment
    config: Any
    comment: str  # that opens the config file


def load(path: pathlib.Path, overrides: Mapping[str, str], experiments: Mapping[str, str]) -> Loaded:
    """Reads a config and the experiment that its `experiment:` key names.

    Raises:
      UserError: the file, a key, a value or the name is wrong.
    """
    text = configs.read_text(path)
    raw = configs.override(configs.parse_yaml(text, path), overrides)
    name = raw.get("experiment")
    if not isinstance(name, str):
        raise UserError(f"{path} must name its experiment, as in `experiment: {next(iter(experiments))}`")
    experiment = registry.load(name, experiments)
    config = configs.decode(experiment.config_class, raw)
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed must be from 0 to {2**32 - 1}, got {config.seed}")
    return Loaded(experiment, config, configs.header(text))


def show_help(loaded: Loaded, console: rich.console.Console) -> int:
    """Lists every key of a config, its type, its value here and what it means."""
    table = rich.table.Table("key", "type", "value", "meaning", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for key, kind, value, meaning in configs.describe_fields(loaded.config):
        table.add_row(f"--{key}", *map(rich.markup.escape, (kind, str(value), meaning)))
    console.print(loaded.experiment.description)
    console.print(table)
    return 0


def run(
    loaded: Loaded, out_dir: pathlib.Path, argv: Sequence[str], console: rich.console.Console, group: Group = ALONE
) -> int:
    """Runs an experiment, or takes up its unfinished run; prints its table and its summary.

    Of several processes the first writes the run, and the others compute with it and leave nothing behind.

    Returns:
      The exit code: 1 if a check of the experiment failed.

    Raises:
      UserError: the run is finished, in use, or its inputs are wrong.
    """
    if group.count > 1 and not hasattr(loaded.config, TIME_LIMIT):
        raise UserError(f"{loaded.experiment.name} runs in one process, got --processes {group.count}")
    jax_setup.configure()
    with joined(group, getattr(loaded.config, TIME_LIMIT, 0.0)) as lifeline:
        progress = Progress(rich.console.Console(quiet=True) if group.index else None, lifeline.beat)
        if group.index == 0:
            return _run(loaded, out_dir, argv, console, progress)
        with tempfile.TemporaryDirectory() as scratch, RunDirectory.open(pathlib.Path(scratch)) as run_dir:
            config = _resolve(loaded)
            _begin(run_dir, configs.config_hash(config), config, loaded.comment, argv)
            _compute(loaded.experiment, config, run_dir, progress)
            return 0


def _run(
    loaded: Loaded, out_dir: pathlib.Path, argv: Sequence[str], console: rich.console.Console, progress: Progress
) -> int:
    experiment, _, comment = loaded
    config = _resolve(loaded)
    digest = configs.config_hash(config)
    path = out_dir / f"{experiment.name}-{digest[:8]}-{config.seed}"
    _warn_of_other_code(path)
    with RunDirectory.open(path) as run_dir:
        _begin(run_dir, digest, config, comment, argv)
        with choices.recording() as kernels:
            found = results.plain(_compute(experiment, config, run_dir, progress))
        failures = experiment.failed_checks(found)
        status = results.FAILED if failures else results.FINISHED
        summary = results.summary(experiment.name, str(path), status, found)
        ended = {"finished": manifest.now(), "kernels": kernels}
        run_dir.write_json(MANIFEST, run_dir.read_json(MANIFEST) | ended)
        files.write_text(path / REPORT, page.build(path, experiment, summary))
        run_dir.write_json(SUMMARY, summary)
    # Printed last: nothing that goes wrong with a terminal or a pipe can cost a run.
    experiment.show(found, console)
    for failure in failures:
        print(f"check failed: {failure}", file=sys.stderr)
    print(f"report: {path / REPORT}", file=sys.stderr)
    print(results.summary_line(summary))
    return 1 if failures else 0


def _resolve(loaded: Loaded) -> Any:
    try:
        return loaded.experiment.resolve(loaded.config)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _warn_of_other_code(path: pathlib.Path) -> None:
    """A finished run has the name of this one, which says nothing of the code that made it."""
    if (path / SUMMARY).exists():
        words = manifest.change("git", files.read_json(path / MANIFEST)["git"], manifest.git_state(manifest.ROOT))
        if words:
            print(f"warning: {path} was made by another revision of the code: {words}", file=sys.stderr)


def _begin(run_dir: RunDirectory, digest: str, config: Any, comment: str, argv: Sequence[str]) -> None:
    """Writes config and manifest, or checks that an unfinished run is this one."""
    present = manifest.begin(run_dir.path.name, digest, config.seed, argv)
    if (run_dir.path / MANIFEST).exists():
        earlier = run_dir.read_json(MANIFEST)
        if earlier["config_sha256"] != digest:
            raise UserError(
                f"{run_dir.path} belongs to another config with the same short hash; choose another --out_dir"
            )
        present = manifest.resume(present, earlier)
        print(f"resuming {run_dir.path}", file=sys.stderr)
        for words in manifest.differences(present):
            print(f"warning: since the run began changed {words}; its finished parts are kept", file=sys.stderr)
    files.write_text(run_dir.path / CONFIG, configs.dump(config, comment))
    run_dir.write_json(MANIFEST, present)


def _compute(experiment: registry.Experiment, config: Any, run_dir: RunDirectory, progress: Progress) -> Any:
    """Calls the experiment. What it raises about its inputs is shown as a sentence; the traceback is kept in a file."""
    trace = run_dir.path / ERROR
    trace.unlink(missing_ok=True)
    try:
        return experiment.run(config, run_dir, progress)
    except (ValueError, OSError, NotImplementedError) as error:
        files.write_text(trace, traceback.format_exc())
        raise UserError(f"{error} (traceback: {trace})") from error
