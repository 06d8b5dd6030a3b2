"""Mistakes in the source of a module, and the tests that must notice them."""

import types
from collections.abc import Callable
from typing import Any

import jax
import pytest

from paxkv import checks
from tests.pallas_kernels.mistakes import mistake_in_place
from tests.programs import forget_programs


def each(test: Callable[..., None], *cases: Any) -> Callable[[], None]:
    """A test as it runs for these of its parameters."""

    def run() -> None:
        for case in cases:
            test(*case if isinstance(case, tuple) else (case,))

    return run


def every(module: types.ModuleType) -> Callable[[], None]:
    """The tests of a module that take nothing."""

    def run() -> None:
        for name, test in vars(module).items():
            if name.startswith("test_") and not getattr(test, "pytestmark", ()) and not test.__code__.co_argcount:
                test()

    return run


def assert_noticed(module: types.ModuleType, check: Callable[[], None], right: str, wrong: str) -> None:
    """Runs tests with a mistake in the source of a module, and fails unless they do."""
    forget_programs()  # which were compiled of the right source
    try:
        with pytest.MonkeyPatch.context() as patch:
            mistake_in_place(patch, module, right, wrong)
            with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception, checks.InvariantError)) as told:
                check()
    finally:
        forget_programs()
    assert not isinstance(told.value, jax.errors.JaxRuntimeError)
