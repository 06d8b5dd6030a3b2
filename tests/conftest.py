"""Strictness for every test: no silent promotion, eight CPU devices, real shapes checked at run time."""

import os

import hypothesis
import jax
import pytest

from tests.programs import forget_programs

# No deadline: the first example of a test compiles. No database: a run does not depend on the one before it.
hypothesis.settings.register_profile("default", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("default")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most programs run once and for a moment: compiling them takes longer than all the tests run.
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11) and "XLA_FLAGS" not in os.environ:  # later ones have no such choice
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    jax.devices()  # reads them, once and for all; compilers in processes of their own need not know them
    del os.environ["XLA_FLAGS"]


@pytest.fixture(autouse=True, scope="module")
def programs_do_not_pile_up():
    """A process may map only so much memory: some hundred compiled programs. Each file gives its own back."""
    yield
    forget_programs()
