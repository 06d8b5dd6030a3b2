"""Strictness for every test: no silent promotion, eight CPU devices, real shapes checked at run time."""

import hypothesis
import jax

# No deadline: the first example of a test compiles. No database: a run does not depend on the one before it.
hypothesis.settings.register_profile("default", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("default")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
