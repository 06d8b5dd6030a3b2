"""`report.html`: one self-contained page about a run, built from the files of the run alone."""

import html
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import config as configs
from experiments import files, manifest, plots, registry, results
from experiments.run_directory import CONFIG, MANIFEST

_STYLE = (pathlib.Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


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
        figures = [_figure(figure, f"f{index}") for index, figure in enumerate(experiment.figures(path))]
    tables = experiment.tables(summary["results"])
    everything = results.table(summary["results"], experiment.modelled)
    sections = (
        _header(experiment, summary, facts, configs.header(config_text)),
        _section("Checks that failed", _failures(experiment.failed_checks(summary["results"]))),
        _section("Results", "".join(map(_table, tables))),
        _section("Figures", "".join(figures)),
        _section("Every metric", _table(everything) if everything not in tables else ""),
        _section("What the numbers mean", _glossary(summary["results"], experiment)),
        _section("Config", f"<pre>{_text(config_text)}</pre>"),
        _section("How it was computed", _facts(facts)),
    )
    title = _text(f"{experiment.name}: {path.name}")
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(filter(None, sections)))


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(title: str, body: str) -> str:
    """A section, or nothing if there is nothing to say in it."""
    return f"<section>\n<h2>{_text(title)}</h2>\n{body}\n</section>" if body else ""


def _header(
    experiment: registry.Experiment, summary: Mapping[str, Any], facts: Mapping[str, Any], question: str
) -> str:
    status = summary["status"]
    devices = facts["devices"]
    return "\n".join(
        (
            "<header>",
            f"<h1>{_text(experiment.name)}</h1>",
            f'<p class="lead">{_text(experiment.description)}</p>',
            f'<div class="question">{_text(question)}</div>' if question else "",
            f"<pre>{_text(facts['command'])}</pre>",
            f'<div class="meta"><span class="status {status}">{_text(status)}</span>',
            f"<span>{_text(facts['run'])}</span>",
            f"<span>{_text(facts['finished'] or facts['started'])}</span>",
            f"<span>{devices['count']} x {_text(devices['kind'])}, JAX {_text(facts['versions']['jax'])}</span></div>",
            "</header>",
        )
    )


def _failures(failures: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(failure)}</li>" for failure in failures)
    return f'<ul class="bad">{items}</ul>' if failures else ""


def _table(table: results.Table) -> str:
    kinds = ["" if table.aligned_right(index) else ' class="text"' for index in range(len(table.headings))]
    head = "".join(f'<th scope="col"{k}>{_modelled(h)}</th>' for k, h in zip(kinds, table.headings, strict=True))
    body = "\n".join(
        f'<tr><th scope="row">{_modelled(row[0])}</th>'
        + "".join(f"<td{kind}>{_modelled(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    title = f"<h3>{_text(table.title)}</h3>\n" if table.title else ""
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'{title}<div class="scroll">{grid}</div>\n'


def _modelled(heading: str) -> str:
    """A text with its mark of a cost model set small."""
    return _text(heading).replace(" (modelled)", ' <span class="modelled">modelled</span>')


def _glossary(found: results.Results, experiment: registry.Experiment) -> str:
    """Explanations of the metrics that the results have; `ttft_ms` explains `ttft_ms_p50` and `ttft_ms_mean` too."""
    explained: dict[str, str] = {}
    for metric in dict.fromkeys(metric for values in found.values() for metric in values):
        for name in (metric, re.sub(r"_(p\d+|mean)$", "", metric)):
            if name in experiment.glossary:
                explained[name] = experiment.glossary[name]
                break
    items = "\n".join(f"<dt>{_text(name)}</dt><dd>{_text(words)}</dd>" for name, words in explained.items())
    return f"<dl>\n{items}\n</dl>" if explained else ""


def _figure(figure: plots.Figure, prefix: str) -> str:
    svg = plots.to_svg(figure.figure, prefix)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{_text(figure.title)}"', 1)
    return (
        f"<figure>\n<figcaption><h3>{_text(figure.title)}</h3>\n<p>{_text(figure.caption)}</p></figcaption>\n"
        f'<div class="scroll">{svg}</div>\n</figure>\n'
    )


def _facts(facts: Mapping[str, Any]) -> str:
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
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in rows.items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested values under dotted names."""
    rows: dict[str, Any] = {}
    for name, value in values.items():
        rows |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return rows
