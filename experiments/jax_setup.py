"""How JAX is set up for every experiment, in one place: as strict as in the tests."""


def configure() -> None:
    """No silent promotion of dtypes or ranks: a result never depends on a cast that nobody wrote."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
