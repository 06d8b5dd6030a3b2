"""Modules with a mistake in their source, for tests that must notice it."""

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


def mistake_in_place(patch: pytest.MonkeyPatch, module: types.ModuleType, right: str, wrong: str) -> None:
    """Gives the functions of a module the code that they have with other words in its source.

    Whoever has imported them runs that code, and classes stay what they are; programs that were compiled before do not
    change.

    Args:
      patch: puts the right code back.
      module: the module.
      right: what its source says, in one place.
      wrong: what it is made to say.
    """
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{module.__name__} says {source.count(right)} times {right!r}"
    before, after = (_code(compile(text, "<a mistake>", "exec")) for text in (source, source.replace(right, wrong)))
    changed = [name for name in after if "<" not in name and after[name] != before[name]]
    assert changed, f"{right!r} is in no function of {module.__name__}"
    for name in changed:
        found = module
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        function = inspect.unwrap(found.fget if isinstance(found, property) else found)
        if isinstance(function, types.FunctionType):  # not the body of a class
            patch.setattr(function, "__code__", after[name])


def _code(code: types.CodeType) -> dict[str, types.CodeType]:
    """Of everything in it that has a name, by that name."""
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= {inner.co_qualname: inner, **_code(inner)}
    return found
