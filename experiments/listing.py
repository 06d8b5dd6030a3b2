"""`list`: the experiments, their configs and their runs, found without importing any of them."""

import pathlib
import sys
from collections.abc import Mapping

import rich.box
import rich.console
import rich.markup
import rich.table

from experiments import config as configs
from experiments import files, registry, results
from experiments.errors import UserError
from experiments.run_directory import ERROR, MANIFEST, SUMMARY, SWEEP, experiment_of, is_running


def show(
    config_dir: pathlib.Path, out_dir: pathlib.Path, experiments: Mapping[str, str], console: rich.console.Console
) -> int:
    """Prints what can be run and what was run."""
    questions = _questions(config_dir)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment, configs", no_wrap=True)
    table.add_column("question")
    for name, module in experiments.items():
        table.add_row(f"[bold]{name}[/bold]", rich.markup.escape(registry.description(module)))
        for path, question in questions.get(name, {}).items():
            table.add_row(f"  {path}", rich.markup.escape(question))
    console.print(table)
    _show_runs(out_dir, experiments, console)
    return 0


def _questions(config_dir: pathlib.Path) -> dict[str, dict[pathlib.Path, str]]:
    """First line of each config's comment, by experiment and path; YAML files of other tools are passed over."""
    found: dict[str, dict[pathlib.Path, str]] = {}
    for path in sorted(config_dir.glob("**/*.yaml")):
        try:
            text = configs.read_text(path)
            name = configs.parse_yaml(text, path).get("experiment")
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        if isinstance(name, str):
            question, _, _ = configs.header(text).partition("\n")
            found.setdefault(name, {})[path] = question
    return found


def _show_runs(out_dir: pathlib.Path, experiments: Mapping[str, str], console: rich.console.Console) -> None:
    paths = sorted(
        path
        for path in out_dir.glob("*")
        if path.is_dir() and (experiment_of(path) in experiments or (path / SWEEP).exists())
    )
    if not paths:
        console.print(f"No runs in {out_dir} yet.")
        return
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"runs in {out_dir}", no_wrap=True)
    table.add_column("started")
    table.add_column("status")
    for path in paths:
        table.add_row(path.name, _started(path), _status(path))
    console.print(table)


def _started(path: pathlib.Path) -> str:
    """When a run was begun, by the first of its sessions; empty if it was stopped before it could say so."""
    try:
        facts = files.read_json(path / (SWEEP if (path / SWEEP).exists() else MANIFEST))
        return [*facts["earlier_sessions"], facts][0]["started"]
    except (UserError, KeyError, TypeError):
        return ""


def _status(path: pathlib.Path) -> str:
    if (path / SWEEP).exists():
        return _status_of_sweep(path)
    if not (path / SUMMARY).exists():
        if is_running(path):
            return "running"
        return f"{results.UNFINISHED}, {ERROR} says why" if (path / ERROR).exists() else results.UNFINISHED
    try:
        return files.read_json(path / SUMMARY)["status"]
    except (UserError, KeyError, TypeError):
        return f"{SUMMARY} is damaged"


def _status_of_sweep(path: pathlib.Path) -> str:
    if is_running(path):
        return "running"
    try:
        points = [point["status"] for point in files.read_json(path / SWEEP)["points"]]
    except (UserError, KeyError, TypeError):
        return f"{SWEEP} is damaged"
    return ", ".join(f"{points.count(status)} {status}" for status in dict.fromkeys(points))
