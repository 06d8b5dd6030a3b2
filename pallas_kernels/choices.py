"""What was chosen while programs were traced: which backend ran an operation, and with what sizes a kernel was made.

Choices are made once per trace, from shapes and the kind of device alone, so that a run can write them down.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

Choices = dict[str, list[dict[str, Any]]]

_open: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("open", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Choices]:
    """Collects the choices of what is traced within: under each name every different one, in the order of their coming.

    A program that was traced before is not traced again, and so not seen.
    """
    found: Choices = {}
    token = _open.set(found)
    try:
        yield found
    finally:
        _open.reset(token)


def so_far() -> Choices:
    """What has been chosen since the recording began; nothing outside of one."""
    return _open.get() or {}


def note(name: str, **choice: Any) -> None:
    """Records a choice, of what JSON can hold, if anybody collects them."""
    found = _open.get()
    if found is not None and choice not in found.setdefault(name, []):
        found[name].append(choice)
