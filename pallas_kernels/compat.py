"""What differs between the versions of jax that this package runs on; no other module looks at a version."""

import contextlib
import warnings

import jax

# Since 0.11 every lowering through Pallas' Triton backend warns. The message is matched whole up to its verb, so no
# other deprecation is hidden.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated and will be removed", category=DeprecationWarning
)


def absent_device(device_kind: str, num_cores: int, platform: str) -> contextlib.AbstractContextManager[object]:
    """A context in which programs are traced and lowered for a device that this machine lacks.

    Kernels ask for the chip they are traced for, and since jax 0.11 for that which they are lowered for.

    Args:
      device_kind: as `jax.Device.device_kind` spells it.
      num_cores: streaming multiprocessors or tensor cores of the device.
      platform: "gpu" or "tpu".
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
    # Without axes, so that shardings inside the program are free to name any.
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
