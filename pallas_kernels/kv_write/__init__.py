"""New keys and values into the slots of a pool."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
