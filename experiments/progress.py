"""One live line on the terminal's error stream, nothing where there is no terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import rich.console
import rich.progress

T = TypeVar("T")


class Advance(Protocol):
    """Tells how far a task is."""

    def __call__(self, amount: float = 1, note: str = "") -> None:
        """Moves the bar by `amount`, and shows `note` beside it."""
        ...


class Progress:
    """Progress bars of a run."""

    def __init__(
        self, console: rich.console.Console | None = None, on_advance: Callable[[], None] = lambda: None
    ) -> None:
        self._console = console or rich.console.Console(file=sys.stderr)
        self._on_advance = on_advance

    @contextlib.contextmanager
    def task(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """Shows a bar named `name` while the block runs; without a total it only pulses."""
        bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn() if total is not None else rich.progress.SpinnerColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with bar:
            task_id = bar.add_task(name, total=total, note="")

            def advance(amount: float = 1, note: str = "") -> None:
                bar.update(task_id, advance=amount, note=note)
                self._on_advance()

            yield advance

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Goes through `items`, one tick each."""
        with self.task(name, total=len(items)) as advance:
            for item in items:
                yield item
                advance()
