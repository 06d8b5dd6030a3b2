"""Pieces of HTML that the pages of runs and of sweeps are put together from."""

import html
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from experiments import plots, results

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


def document(title: str, sections: Iterable[str]) -> str:
    """A whole page, which needs nothing from elsewhere; empty sections are left out."""
    return _PAGE.format(title=text(title), style=_STYLE, body="\n".join(filter(None, sections)))


def text(value: object) -> str:
    """A value as text of a page."""
    return html.escape(str(value))


def section(title: str, body: str) -> str:
    """A section, or nothing if there is nothing to say in it."""
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def failures(sentences: Sequence[str]) -> str:
    """A list of what went wrong."""
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f'<ul class="bad">{items}</ul>' if sentences else ""


def table(table: results.Table) -> str:
    """A table under its title."""
    kinds = ["" if table.aligned_right(index) else ' class="text"' for index in range(len(table.headings))]
    head = "".join(f'<th scope="col"{k}>{_modelled(h)}</th>' for k, h in zip(kinds, table.headings, strict=True))
    body = "\n".join(
        f'<tr><th scope="row">{_modelled(row[0])}</th>'
        + "".join(f"<td{kind}>{_modelled(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    title = f"<h3>{text(table.title)}</h3>\n" if table.title else ""
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'{title}<div class="scroll">{grid}</div>\n'


def figure(figure: plots.Figure, prefix: str) -> str:
    """A figure under its title; `prefix` sets its ids apart from those of other figures."""
    svg = plots.to_svg(figure.figure, prefix)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{text(figure.title)}"', 1)
    return (
        f"<figure>\n<figcaption><h3>{text(figure.title)}</h3>\n<p>{text(figure.caption)}</p></figcaption>\n"
        f'<div class="scroll">{svg}</div>\n</figure>\n'
    )


def glossary(metrics: Iterable[str], meanings: Mapping[str, str]) -> str:
    """Explanations of metrics; `ttft_ms` explains `ttft_ms_p50` and `ttft_ms_mean` too."""
    explained: dict[str, str] = {}
    for metric in metrics:
        for name in (metric, re.sub(r"_(p\d+|mean)$", "", metric)):
            if name in meanings:
                explained[name] = meanings[name]
                break
    items = "\n".join(f"<dt>{text(name)}</dt><dd>{text(words)}</dd>" for name, words in explained.items())
    return f"<dl>\n{items}\n</dl>" if explained else ""


def pairs(rows: Mapping[str, object]) -> str:
    """A table of names and values."""
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows.items())
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'


def _modelled(heading: str) -> str:
    """A text with its mark of a cost model set small."""
    return text(heading).replace(" (modelled)", ' <span class="modelled">modelled</span>')
