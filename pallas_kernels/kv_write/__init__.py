"""New keys and values into the slots of a pool."""

from pallas_kernels.kv_write.api import Written, kv_write, store_rows

__all__ = ["Written", "kv_write", "store_rows"]
