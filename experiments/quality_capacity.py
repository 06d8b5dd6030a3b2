"""What a format buys: blocks in equal bytes, and how many requests of a workload run at once in them."""

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from experiments import metrics
from experiments.serving import serve
from experiments.workloads.workload import Workload
from models.config import DecoderConfig
from paxkv.capacity import plan_blocks
from paxkv.config import MemoryConfig, make_memory
from paxkv.engine import Engine
from paxkv.kv_cache import Attend, KVCache
from paxkv.kv_format import KVFormat, scheme
from paxkv.model_shapes import KVShape
from paxkv.requests import make_requests

# The cache of a model that stores nothing.
_NOTHING = KVShape(layers=1, kv_heads=1, head_dim=1, element_bytes=4)


class Capacity(NamedTuple):
    """What a format takes and what fits, exact."""

    bytes_per_token: Fraction  # keys, values and scales of all layers, those of a block shared out to its tokens
    blocks: int  # in the budget
    ratio: Fraction  # blocks for one of bfloat16, before rounding down

    def as_dict(self) -> dict[str, Any]:
        """For results; the ratio as text, since it is exact."""
        return {
            "bytes_per_token": float(self.bytes_per_token),
            "blocks": self.blocks,
            "blocks_per_bf16": str(self.ratio),
        }


def capacity_of(fmt: KVFormat, model: DecoderConfig, block_size: int, budget_bytes: int, rows: int) -> Capacity:
    """What a model's keys and values take in a format.

    Raises:
      ValueError: the format does not fit the model, or not one block fits the budget.
    """
    shape, plain = (f.shape(model.layers, model.kv_heads, model.head_dim) for f in (fmt, scheme("bf16")))
    block_bytes = shape.block_bytes(block_size)
    beside = rows * shape.row_bytes
    if budget_bytes < beside + block_bytes:
        raise ValueError(
            f"kv_memory: expected at least {beside + block_bytes} bytes, {block_bytes} for a block of {fmt.name} and "
            f"{beside} for what {rows} rows keep beside the blocks, got {budget_bytes}"
        )
    return Capacity(
        bytes_per_token=Fraction(block_bytes, block_size),
        blocks=plan_blocks(shape, block_size, budget_bytes - beside).num_blocks,
        ratio=Fraction(plain.block_bytes(block_size), block_bytes),
    )


@dataclasses.dataclass(frozen=True)
class _NoModel:
    """A model that computes and stores nothing: how many requests run does not depend on what they say."""

    def __call__(
        self,
        params: None,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float32[Array, "rows vocab"], KVCache]:
        """See `paxkv.engine.Decode`."""
        return jnp.zeros((select.shape[0], 2), jnp.float32), cache


def running_requests(
    num_blocks: int, block_size: int, workload: Workload, rows: int, max_model_len: int, token_budget: int
) -> dict[str, float | int]:
    """Serves a workload in so many blocks, with the scheduler of a real server and a model that does nothing.

    Returns:
      `peak_running` requests, and `mean_running` over the time in which others were queueing.
    """
    memory = make_memory(
        MemoryConfig("paged", block_size, num_blocks=num_blocks),
        _NOTHING,
        num_blocks * _NOTHING.block_bytes(block_size),
        rows,
        max_model_len,
    )
    prompts = np.zeros((workload.num_requests, max(1, int(workload.prompt_len.max()))), np.int32)
    requests = make_requests(prompts, workload.prompt_len, workload.output_len, workload.arrival_ms, seed=0)
    engine = Engine(memory, _NoModel(), token_budget)
    # Without a model the engine runs for less time than it takes to optimise it.
    quickly = {"xla_backend_optimization_level": 0}
    steps = serve(engine, None, requests, workload, _NOTHING, steps_per_dispatch=64, compiler_options=quickly).steps
    found = metrics.memory_metrics(steps)
    return {name: found[name] for name in ("peak_running", "mean_running", "preemptions") if name in found}
