"""Kernels with a mistake in their source, for tests that must notice it."""

import inspect
import sys
import types
from collections.abc import Mapping, Sequence

import pytest


def with_mistake(
    patch: pytest.MonkeyPatch, modules: Sequence[types.ModuleType], mistake: Mapping[str, str]
) -> types.ModuleType:
    """Modules executed anew, each importing those before it; the first with other words in its source.

    Copies have functions of their own, so that no program compiled from the right ones answers in their place.

    Args:
      patch: puts the right modules back.
      modules: the one with the mistake, then those through which a caller reaches it.
      mistake: what the source says, and what it is made to say.

    Returns:
      The copy of the last module.
    """
    copy = modules[0]
    for module in modules:
        source = inspect.getsource(module)
        for right, wrong in mistake.items() if module is modules[0] else ():
            assert right in source, f"{module.__name__} does not say {right!r}"
            source = source.replace(right, wrong)
        copy = types.ModuleType(module.__name__)
        package, _, name = module.__name__.rpartition(".")
        patch.setitem(sys.modules, module.__name__, copy)
        patch.setattr(sys.modules[package], name, copy)
        exec(compile(source, f"<{name} with a mistake>", "exec"), vars(copy))
    return copy
