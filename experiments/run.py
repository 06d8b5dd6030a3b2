"""`run`: from a config to a finished run directory."""

import contextlib
import functools
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.markup
import rich.table

from experiments import config as configs
from experiments import files, jax_setup, manifest, page, registry, results
from experiments.errors import UserError
from experiments.lifeline import joined
from experiments.processes import ALONE, Group
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


class Prepared(NamedTuple):
    """A run that is to be made: everything it depends on is known."""

    experiment: registry.Experiment
    config: Any  # resolved
    comment: str
    digest: str  # of the config

    @property
    def name(self) -> str:
        """The run's id, which is the name of its directory."""
        return f"{self.experiment.name}-{self.digest[:8]}-{self.config.seed}"


def load(path: pathlib.Path, overrides: Mapping[str, str], experiments: Mapping[str, str]) -> Loaded:
    """Reads a config and the experiment that its `experiment:` key names.

    Raises:
      UserError: the file, a key, a value or the name is wrong.
    """
    text = configs.read_text(path)
    raw = configs.override(configs.parse_yaml(text, path), overrides)
    return from_raw(raw, configs.header(text), path, experiments)


def from_raw(raw: Mapping[str, Any], comment: str, path: pathlib.Path, experiments: Mapping[str, str]) -> Loaded:
    """The config that a mapping describes, and its experiment; `path` names it in errors.

    Raises:
      UserError: a key, a value or the experiment's name is wrong.
    """
    name = raw.get("experiment")
    if not isinstance(name, str):
        raise UserError(f"{path} must name its experiment, as in `experiment: {next(iter(experiments))}`")
    experiment = registry.load(name, experiments)
    config = configs.decode(experiment.config_class, raw)
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed must be from 0 to {2**32 - 1}, got {config.seed}")
    return Loaded(experiment, config, comment)


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
    runs = functools.partial(manifest.decisive, configs.identity(loaded.config))
    with joined(group, getattr(loaded.config, TIME_LIMIT, 0.0), runs) as lifeline:
        progress = Progress(rich.console.Console(quiet=True) if group.index else None, lifeline.beat)
        prepared = prepare(loaded)
        # Once more, as it names model and trace by their hashes now.
        lifeline.compare({"config": configs.identity(prepared.config)})
        if group.index == 0:
            return _run(prepared, out_dir, argv, console, progress)
        with tempfile.TemporaryDirectory() as scratch, RunDirectory.open(pathlib.Path(scratch)) as run_dir:
            _begin(run_dir, prepared, argv)
            prepared.experiment.run(prepared.config, run_dir, progress)
            return 0


def _run(
    prepared: Prepared, out_dir: pathlib.Path, argv: Sequence[str], console: rich.console.Console, progress: Progress
) -> int:
    summary = run_one(prepared, out_dir, argv, progress)
    # Printed last: nothing that goes wrong with a terminal or a pipe can cost a run.
    prepared.experiment.show(summary["results"], console)
    for failure in prepared.experiment.failed_checks(summary["results"]):
        print(f"check failed: {failure}", file=sys.stderr)
    print(f"report: {out_dir / prepared.name / REPORT}", file=sys.stderr)
    print(results.summary_line(summary))
    return 1 if summary["status"] == results.FAILED else 0


def prepare(loaded: Loaded) -> Prepared:
    """Fills in what a run depends on and its config leaves open.

    Raises:
      UserError: what the experiment refuses before a run has a directory.
    """
    try:
        config = loaded.experiment.resolve(loaded.config)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return Prepared(loaded.experiment, config, loaded.comment, configs.config_hash(config))


@contextlib.contextmanager
def begun(prepared: Prepared, out_dir: pathlib.Path, argv: Sequence[str]) -> Iterator[RunDirectory]:
    """The run's directory, new or taken up, with config and manifest in it; held while the block runs.

    Raises:
      UserError: the run is finished or in use, or its directory is that of another.
    """
    path = out_dir / prepared.name
    warn_of_other_code(path)
    with RunDirectory.open(path) as run_dir:
        _begin(run_dir, prepared, argv)
        yield run_dir


def run_one(prepared: Prepared, out_dir: pathlib.Path, argv: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Makes a run, or takes it up, and prints nothing.

    Returns:
      The summary.

    Raises:
      UserError: the run is finished, in use, or its inputs are wrong.
    """
    with begun(prepared, out_dir, argv) as run_dir:
        with choices.recording() as kernels:
            found = _compute(prepared, run_dir, progress)
        return finish(prepared, run_dir, found, kernels)


def finish(prepared: Prepared, run_dir: RunDirectory, found: Any, kernels: Mapping[str, Any]) -> dict[str, Any]:
    """Writes what a run ends with: its report, and last its summary.

    Args:
      prepared: the run.
      run_dir: its directory, begun.
      found: the results.
      kernels: backends and sizes that were chosen.

    Returns:
      The summary.
    """
    experiment, found = prepared.experiment, results.plain(found)
    status = results.FAILED if experiment.failed_checks(found) else results.FINISHED
    summary = results.summary(experiment.name, str(run_dir.path), status, found)
    ended = {"finished": manifest.now(), "kernels": kernels}
    run_dir.write_json(MANIFEST, run_dir.read_json(MANIFEST) | ended)
    files.write_text(run_dir.path / REPORT, page.build(run_dir.path, experiment, summary))
    run_dir.write_json(SUMMARY, summary)
    return summary


def warn_of_other_code(path: pathlib.Path) -> None:
    """A finished run has the name of this one, which says nothing of the code that made it."""
    if (path / SUMMARY).exists():
        words = manifest.change("git", files.read_json(path / MANIFEST)["git"], manifest.git_state(manifest.ROOT))
        if words:
            print(f"warning: {path} was made by another revision of the code: {words}", file=sys.stderr)


def _begin(run_dir: RunDirectory, prepared: Prepared, argv: Sequence[str]) -> None:
    """Writes config and manifest, or checks that an unfinished run is this one."""
    present = manifest.begin(run_dir.path.name, prepared.digest, prepared.config.seed, argv)
    if (run_dir.path / MANIFEST).exists():
        earlier = run_dir.read_json(MANIFEST)
        if earlier["config_sha256"] != prepared.digest:
            raise UserError(
                f"{run_dir.path} belongs to another config with the same short hash; choose another --out_dir"
            )
        present = manifest.resume(present, earlier)
        print(f"resuming {run_dir.path}", file=sys.stderr)
        for words in manifest.differences(present):
            print(f"warning: since the run began changed {words}; its finished parts are kept", file=sys.stderr)
    files.write_text(run_dir.path / CONFIG, configs.dump(prepared.config, prepared.comment))
    run_dir.write_json(MANIFEST, present)


def _compute(prepared: Prepared, run_dir: RunDirectory, progress: Progress) -> Any:
    with refusals_told(run_dir.path):
        return prepared.experiment.run(prepared.config, run_dir, progress)


@contextlib.contextmanager
def refusals_told(path: pathlib.Path) -> Iterator[None]:
    """Shows what an experiment raises about its inputs as a sentence; the traceback is kept in a file in `path`."""
    trace = path / ERROR
    trace.unlink(missing_ok=True)
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        files.write_text(trace, traceback.format_exc())
        raise UserError(f"{error} (traceback: {trace})") from error
