"""Played candidates: what becomes of one is told by its `num_stages`, how long it takes by its `kv_tile`."""

import os
import time


def measure(sizes, dump_dir, **_):
    match sizes.get("num_stages"):
        case 1:
            os.abort()
        case 2:
            time.sleep(600)
        case 3:
            raise ValueError("output must be the reference's but for rounding, got a difference of 1e+00")
        case 4:
            raise KeyError("what")
    return {"ms": float(sizes.get("kv_tile", 40))}
