"""How JAX is set up for every experiment, in one place: as strict as in the tests."""


def configure() -> None:
    """No silent promotion of dtypes or ranks: a result never depends on a cast that nobody wrote."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def stay_on_cpu() -> None:
    """Starts no other device, nor a plugin for one, in this process."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def use_cpu_devices(count: int) -> None:
    """Makes the CPU look like so many devices, where JAX has not begun to use it.

    Raises:
      ValueError: it has, with fewer.
    """
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # too late
        if jax.default_backend() == "cpu" and jax.device_count() < count:
            raise ValueError(
                f"cpu_devices: expected at most {jax.device_count()}, as JAX was started with so many, got {count}"
            ) from error
