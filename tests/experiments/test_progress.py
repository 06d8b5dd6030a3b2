"""Progress shows on a terminal and is silent elsewhere."""

import io

import rich.console

from experiments.progress import Progress


def shown(terminal):
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=80)
    progress = Progress(console)
    seen = list(progress.track(["a", "b"], "parts"))
    with progress.task("paged", total=3) as advance:
        advance(2, note="120 tokens/s")
        advance()
    with progress.task("waiting") as advance:
        advance()
    assert seen == ["a", "b"]
    return console.file.getvalue()


def test_a_terminal_sees_tasks_and_notes():
    text = shown(terminal=True)
    for part in ("parts", "paged", "3/3", "waiting"):
        assert part in text


def test_a_file_gets_nothing():
    assert shown(terminal=False) == ""
