"""What processes of the offline tests do."""

import dataclasses
import os
import re
import time

from pallas_kernels import offline


def echo(words, dump_dir):
    return {"words": words, "empty": not list(dump_dir.iterdir()), "flags": os.environ.get("SOME_FLAGS")}


def refuse(dump_dir):
    raise ValueError("block_size must be at least 1, got 0")


def lack(dump_dir):
    offline.require_packages("json", "no_such_compiler")


def fail(dump_dir):
    raise KeyError("what")


def crash(dump_dir):
    print("Check failed: everything", flush=True)
    os.write(2, b"F0101 compiler.cc:1] Check failed: shape.rank() == 2\n")
    os.abort()


def hang(dump_dir):
    (dump_dir / "begun").touch()
    time.sleep(600)


def offset_bits(blocks, kv_dtype, dump_dir):
    """Widths of the offsets with which the decode kernel reads a pool of so many blocks of 16 slots."""
    # Here, as the other jobs need no jax.
    import jax
    import jax.numpy as jnp

    from pallas_kernels import offline_cases, offline_gpu
    from pallas_kernels.targets import TOPOLOGIES

    case = offline_cases.cases("paged_decode", "gpu")["d128_kv8_g4_b16_bf16"]
    program = offline_cases.KERNELS["paged_decode"].build(dataclasses.replace(case, kv_dtype=kv_dtype), "triton")
    pool = jax.ShapeDtypeStruct((blocks, 16, 8, 128), jnp.dtype(kv_dtype))
    function, arguments = offline_cases.placed(
        program._replace(arguments=program.arguments | {"k": pool, "v": pool}), ()
    )
    offline_gpu.compile_for(function, arguments, TOPOLOGIES["h100"])
    (listing,) = dump_dir.glob("*attention_decode.triton-to-llvm.txt")
    return {
        "bits": sorted(set(re.findall(r"addptr.*tensor<64x128x!tt.ptr.*tensor<64x128xi(\d+)", listing.read_text())))
    }
