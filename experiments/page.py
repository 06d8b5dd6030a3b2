"""`report.html`: one self-contained page about a run, built from the files of the run alone."""

import pathlib
from collections.abc import Mapping
from typing import Any

from experiments import config as configs
from experiments import files, manifest, page_parts, plots, registry, results
from experiments.page_parts import section, text
from experiments.run_directory import CONFIG, MANIFEST


def build(path: pathlib.Path, experiment: registry.Experiment, summary: Mapping[str, Any]) -> str:
    """The page of a run: equal files give an equal page.

    Args:
      path: the run directory.
      experiment: that the run is of.
      summary: as in `summary.json`.

    Raises:
      UserError: a file is missing or damaged.
    """
    config_text = configs.read_text(path / CONFIG)
    configs.parse_yaml(config_text, path / CONFIG)  # a damaged file is told, not shown
    facts = files.read_json(path / MANIFEST)
    with plots.style():
        figures = [page_parts.figure(figure, f"f{index}") for index, figure in enumerate(experiment.figures(path))]
    tables = experiment.tables(summary["results"])
    everything = results.table(summary["results"], experiment.modelled)
    metrics = dict.fromkeys(metric for values in summary["results"].values() for metric in values)
    sections = (
        header(experiment, summary["status"], facts, configs.header(config_text)),
        section("Checks that failed", page_parts.failures(experiment.failed_checks(summary["results"]))),
        section("Results", "".join(map(page_parts.table, tables))),
        section("Figures", "".join(figures)),
        section("Every metric", page_parts.table(everything) if everything not in tables else ""),
        section("What the numbers mean", page_parts.glossary(metrics, experiment.glossary)),
        section("Config", f"<pre>{text(config_text)}</pre>"),
        section("How it was computed", computed_with(facts)),
    )
    return page_parts.document(f"{experiment.name}: {path.name}", sections)


def header(experiment: registry.Experiment, status: str, facts: Mapping[str, Any], question: str) -> str:
    """What a page opens with: the experiment, the question, the command, and how it ended.

    Args:
      experiment: that the page is about.
      status: of the run or sweep.
      facts: its manifest.
      question: the comment that opens its config.
    """
    devices = facts["devices"]
    return "\n".join(
        (
            "<header>",
            f"<h1>{text(experiment.name)}</h1>",
            f'<p class="lead">{text(experiment.description)}</p>',
            f'<div class="question">{text(question)}</div>' if question else "",
            f"<pre>{text(facts['command'])}</pre>",
            f'<div class="meta"><span class="status {status}">{text(status)}</span>',
            f"<span>{text(facts['run'])}</span>",
            f"<span>{text(facts['finished'] or facts['started'])}</span>",
            f"<span>{devices['count']} x {text(devices['kind'])}, JAX {text(facts['versions']['jax'])}</span></div>",
            "</header>",
        )
    )


def computed_with(facts: Mapping[str, Any]) -> str:
    """How something was computed, by its manifest."""
    git = facts["git"]
    code = "not in a git checkout" if git is None else git["revision"] + (", with changes" if git["dirty"] else "")
    rows = {
        "code": code,
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "devices": "{count} x {kind} ({platform})".format(**facts["devices"]),
        "environment": ", ".join(f"{k}={v}" for k, v in facts["environment"].items()) or "nothing set",
        "config SHA-256": facts["config_sha256"],
        "seeds": ", ".join(map(str, facts["seeds"])),
        "started": facts["started"],
        "finished": facts["finished"] or "not yet",
    } | _flat(facts["inputs"], "")
    if facts["earlier_sessions"]:
        changed = manifest.differences(dict(facts))
        rows["resumed"] = f"{len(facts['earlier_sessions'])} times" + (
            f"; changed in between: {', '.join(changed)}" if changed else ", nothing changed in between"
        )
    return page_parts.pairs(rows)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested values under dotted names."""
    rows: dict[str, Any] = {}
    for name, value in values.items():
        rows |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return rows
