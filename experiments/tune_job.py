"""What the process of one candidate does: what is here, or how long a kernel with these sizes takes."""

import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_bench import TOLERANCE, spread
from pallas_kernels import tuning
from pallas_kernels.offline_cases import KERNELS
from pallas_kernels.paged_attention.shapes import AttentionCase


def describe_device(dump_dir: pathlib.Path) -> dict[str, str]:
    """Platform and kind of the first device, asked in a process of its own: who asks may keep the device to itself."""
    del dump_dir
    device = jax.devices()[0]
    return {"platform": device.platform, "kind": device.device_kind}


def measure(
    *,
    kernel: str,
    case: str,
    backend: str,
    sizes: Mapping[str, Any],
    seed: int,
    repeats: int,
    calls: int,
    dump_dir: pathlib.Path,
) -> dict[str, float]:
    """Times one case with sequences as long as they can be.

    Args:
      kernel: one that attends, of `offline_cases.KERNELS`.
      case: name of one of its cases.
      backend: whose kernel it is.
      sizes: fields that differ from the kernel's default.
      seed: of keys, values, queries and tables.
      repeats: rounds after a first that is not counted.
      calls: calls of a round, one after another without a wait.
      dump_dir: not used.

    Returns:
      Milliseconds of a call: `ms`, the median over the rounds, and its quartiles.

    Raises:
      ValueError: the output is not that of the XLA reference.
    """
    del dump_dir
    entry = KERNELS[kernel]
    (found,) = (each for each in entry.cases if each.name == case)
    arrays = fill(found, entry.build(found, backend).arguments, seed)
    right = jax.jit(entry.build(found, "xla").function)(**arrays)
    with tuning.candidate(sizes):
        attend = jax.jit(entry.build(found, backend).function)
        answer = jax.block_until_ready(attend(**arrays))
    error = _difference(answer, right)
    if not error <= TOLERANCE[found.q_dtype]:
        raise ValueError(f"output must be the reference's but for rounding, got a difference of {error:.1e}")
    ms = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([attend(**arrays) for _ in range(calls)])
        ms.append(1e3 * (time.perf_counter() - begin) / calls)
    return spread(np.array(ms))


def fill(case: AttentionCase, shapes: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, jax.Array]:
    """Values for the arguments of a case: every sequence full, an equal share of the queries each, blocks anywhere."""
    rng = np.random.default_rng(seed)
    capacity, queries = case.blocks_per_seq * case.block_size, min(case.tokens // case.seqs, case.max_q_len)
    given = {
        "kv_lens": np.full(case.seqs, capacity),
        "cu_q_lens": np.arange(case.seqs + 1) * queries,
        "starts": np.arange(case.seqs) * capacity,
        "block_tables": rng.permutation(case.seqs * case.blocks_per_seq).reshape(case.seqs, -1),
    }

    def values(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if name in given:
            return given[name]
        if name.endswith("_scale"):
            return np.full(shape, 1 / 64 if case.kv_dtype == "int8" else 1.0)
        spread_of = 64.0 if dtype == jnp.int8 else 2.0 if name == "q" else 1.0
        drawn = spread_of * rng.standard_normal(shape, np.float32)
        return np.clip(np.rint(drawn), -127, 127) if dtype == jnp.int8 else drawn

    return {name: jnp.asarray(values(name, a.shape, a.dtype)).astype(a.dtype) for name, a in shapes.items()}


def _difference(answer: Any, right: Any) -> float:
    """The largest difference of the outputs, over the largest of those that are right."""
    answer, right = (np.asarray(jax.tree.leaves(x)[0]).astype(np.float64) for x in (answer, right))
    return float(np.max(np.abs(answer - right)) / np.max(np.abs(right)))
