"""What differs between the versions of jax that this package runs on; no other module looks at a version."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator

import jax

# Since 0.11 every lowering through Pallas' Triton backend warns. The message is matched whole up to its verb, so no
# other deprecation is hidden.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated and will be removed", category=DeprecationWarning
)


_absent_kind: contextvars.ContextVar[str | None] = contextvars.ContextVar("absent_kind", default=None)


@contextlib.contextmanager
def absent_device(device_kind: str, num_cores: int, platform: str) -> Iterator[None]:
    """A context in which programs are traced and lowered for a device that this machine lacks.

    Since 0.11 a kernel asks the mesh what it is lowered for; before, the lowering platform was enough.

    Args:
      device_kind: as `jax.Device.device_kind` spells it.
      num_cores: streaming multiprocessors or tensor cores of the device.
      platform: "gpu" or "tpu".
    """
    token = _absent_kind.set(device_kind)
    try:
        with contextlib.ExitStack() as stack:
            if jax.__version_info__ >= (0, 11):
                device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
                # Without axes, so that shardings inside the program are free to name any.
                mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            yield
    finally:
        _absent_kind.reset(token)


def device_kind() -> str:
    """The kind of device that programs are traced for: the absent one of the context, or the first that is here."""
    return _absent_kind.get() or jax.devices()[0].device_kind
