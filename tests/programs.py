"""Compiled programs, which tests share and have to give back."""

import gc
import sys

import jax


def forget_programs() -> None:
    """Drops every compiled program: those of jax, and what functions of the tests remember of them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()
