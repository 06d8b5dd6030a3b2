"""Do the well-known figures on KV cache memory follow from their inputs, and by which rounding?"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Literal

import polars as pl

from experiments.capacity_examples import QUANTITIES, Example, Row, worked_examples
from experiments.progress import Progress
from experiments.results import Table
from experiments.run_directory import RunDirectory

DESCRIPTION = "Bytes, blocks, concurrency and waste of published KV cache examples, checked exactly."
GLOSSARY: Mapping[str, str] = {
    name: f"{quantity.meaning} ({quantity.rounding})" for name, quantity in QUANTITIES.items()
}

Results = dict[str, dict[str, float | int | bool | str]]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to check.

    Attributes:
      experiment: `capacity`.
      seed: nothing here is random; part of every run's name.
      examples: the examples.
    """

    experiment: Literal["capacity"] = "capacity"
    seed: int = 0
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        if not self.examples:
            raise ValueError("examples must hold at least one example, got none; list some in the config")
        names = [example.name for example in self.examples]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"examples must have names of their own, got {twice} more than once; rename one of them")
        if "summary" in names:
            raise ValueError("name of an example must not be 'summary', which is the run's own; rename it")


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> Results:
    """Checks the examples and writes one row per quantity to `examples.parquet`.

    Args:
      config: the examples.
      run_dir: where the table goes.
      progress: unused; there is too little to do for a bar.

    Returns:
      One entry per example: its `input` in words, whether all of it is `ok`, and its quantities by name. A quantity
      that does not hold adds `<quantity>_expected`, one that sources print otherwise `<quantity>_printed`. The entry
      `summary` has the number of quantities `checked` and `failed`.
    """
    rows = worked_examples(config.examples)
    run_dir.write_parquet("examples.parquet", _frame(rows))
    results: Results = {
        name: _result(list(of_example)) for name, of_example in itertools.groupby(rows, lambda row: row.example)
    }
    results["summary"] = {"checked": len(rows), "failed": sum(not row.ok for row in rows)}
    return results


def failed_checks(results: Results) -> list[str]:
    """One sentence for each quantity that is not what its example expects."""
    return [
        f"{name} ({example['input']}): {quantity} is {_text(example[quantity])}, "
        f"expected {_text(example[f'{quantity}_expected'])}"
        for name, example in results.items()
        for quantity in QUANTITIES
        if f"{quantity}_expected" in example
    ]


def tables(results: Results) -> list[Table]:
    """One line per quantity, and how many of them do not hold."""
    headings = ("input", "quantity", "expected", "got", "rounding", "sources print", "holds")
    rows: list[list[str]] = []
    for name, example in results.items():
        if name == "summary":
            continue
        inputs = itertools.chain([str(example["input"])], itertools.repeat(""))
        for quantity in (key for key in example if key in QUANTITIES):
            got = example[quantity]
            rows.append(
                [
                    next(inputs),
                    quantity,
                    _text(example.get(f"{quantity}_expected", got)),
                    _text(got),
                    QUANTITIES[quantity].rounding,
                    str(example.get(f"{quantity}_printed", "")),
                    "NO" if f"{quantity}_expected" in example else "yes",
                ]
            )
    title = "Worked examples of KV cache capacity: {checked} checked, {failed} failed".format(**results["summary"])
    return [Table(headings, rows, title)]


def _result(rows: list[Row]) -> dict[str, float | int | bool | str]:
    result: dict[str, float | int | bool | str] = {"input": rows[0].input, "ok": all(row.ok for row in rows)}
    for row in rows:
        result[row.quantity] = _number(row.got)
        if not row.ok:
            result[f"{row.quantity}_expected"] = _number(row.expected)
        if row.printed:
            result[f"{row.quantity}_printed"] = row.printed
    return result


def _number(exact: Fraction) -> int | float:
    return exact.numerator if exact.denominator == 1 else float(exact)


def _text(number: float | int | bool | str) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"


def _frame(rows: Iterable[Row]) -> pl.DataFrame:
    """One line per row; `expected` and `got` are exact text, a whole number or a ratio."""
    return pl.DataFrame(
        [
            {
                "example": row.example,
                "input": row.input,
                "quantity": row.quantity,
                "expected": str(row.expected),
                "got": str(row.got),
                "rounding": row.rounding,
                "sources_print": row.printed,
                "ok": row.ok,
            }
            for row in rows
        ]
    )
