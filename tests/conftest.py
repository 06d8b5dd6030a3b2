"""Strictness for every test: no silent promotion, eight CPU devices, real shapes checked at run time."""

import gc
import sys

import hypothesis
import jax
import pytest

# No deadline: the first example of a test compiles. No database: a run does not depend on the one before it.
hypothesis.settings.register_profile("default", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("default")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def programs_do_not_pile_up():
    """A process may map only so much memory: some hundred compiled programs. Each file gives its own back."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()
