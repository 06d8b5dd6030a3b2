"""`report`: a run's table and page again, from its files alone; or what an unfinished run still lacks."""

import pathlib
from collections.abc import Mapping

import rich.console

from experiments import config as configs
from experiments import files, page, registry, results
from experiments.errors import UserError
from experiments.run_directory import CONFIG, REPORT, SUMMARY, SWEEP, experiment_of, finished_parts, is_running


def report(path: pathlib.Path, experiments: Mapping[str, str], console: rich.console.Console) -> int:
    """Prints the table of a run and rewrites its page.

    Returns:
      The exit code, as the run itself had it: 1 if a check failed, also 1 for a run that is not finished.

    Raises:
      UserError: `path` is no run directory, or one of its files is damaged.
    """
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}; `python -m experiments list` shows those there are")
    if (path / SWEEP).exists():
        from experiments import sweep_report

        return sweep_report.report(path, experiments, console)
    name = experiment_of(path)
    if name not in experiments:
        raise UserError(f"{path} is not a run directory: its name must be <experiment>-<config hash>-<seed>")
    if not (path / SUMMARY).exists():
        return _unfinished(path, name, experiments, console)
    summary = files.read_json(path / SUMMARY)
    experiment = registry.load(name, experiments)
    experiment.show(summary["results"], console)
    files.write_text(path / REPORT, page.build(path, experiment, summary))
    print(results.summary_line(summary))
    return 1 if summary["status"] == results.FAILED else 0


def _unfinished(path: pathlib.Path, name: str, experiments: Mapping[str, str], console: rich.console.Console) -> int:
    done = finished_parts(path)
    state = "running now" if is_running(path) else "unfinished: it was stopped, and running its config again resumes it"
    console.print(f"{path} is {state}")
    if (path / CONFIG).exists():
        experiment = registry.load(name, experiments)
        config = configs.decode(experiment.config_class, configs.read_yaml(path / CONFIG))
        missing = [part for part in experiment.parts(config) if part not in done]
        console.print(f"  finished parts: {', '.join(done) or 'none'}")
        console.print(f"  missing parts: {', '.join(missing) or 'none, only the summary'}")
    else:
        console.print("  it was stopped before it wrote its config")
    print(results.summary_line(results.summary(name, str(path), results.UNFINISHED, {})))
    return 1
