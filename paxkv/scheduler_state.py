"""What the scheduler decides by, what it keeps, and what it hands to the engine."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.memory import KVMemory, Limits
from paxkv.requests import Progress, Requests, init_progress
from paxkv.swap_state import Moves


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """Memory, the requests' progress, and which request holds which row."""

    memory: Any  # state of a KVMemory
    progress: Progress
    row_request: jax.Array  # i32[rows]; the sentinel requests.count for a free row
    clock: jax.Array  # i32[]; ticks
    arrived: jax.Array  # i32[]; requests that had arrived when the last step was scheduled
    queued: jax.Array  # i32[]; those of them that wait for a row
    first: jax.Array  # i32[]; no request with a lower number waits
    places: jax.Array | None = None  # i32[requests]; where a request is parked on the host, `rows` if it is not


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What the next step computes, and what scheduling it took."""

    new_tokens: jax.Array  # i32[rows]; tokens each row computes
    starts: jax.Array  # i32[rows]; tokens stored before the step: the position of a row's first new token
    samples: jax.Array  # bool[rows]; rows that have then computed all they know, and sample
    admitted: jax.Array  # i32[]
    refused: jax.Array  # i32[]
    preempted: jax.Array  # i32[]
    recompute_tokens: jax.Array  # i32[]; stored tokens that preemption threw away
    hit_tokens: jax.Array  # i32[]; tokens that admitted requests found stored already, or brought
    closed: jax.Array  # bool[]; all who wait were told to, and will be again unless something is given back
    moves_out: Moves | None = None  # blocks to copy to the host before the step computes anything
    moves_in: Moves | None = None  # and back from it, after that


def init_scheduler(memory: KVMemory[Any], requests: Requests, limits: Limits | None = None) -> SchedulerState:
    """Empty memory, nobody started, clock at zero."""
    return SchedulerState(
        memory=memory.init(limits),
        progress=init_progress(requests.count),
        row_request=jnp.full(memory.rows, requests.count, jnp.int32),
        clock=jnp.int32(0),
        arrived=jnp.int32(0),
        queued=jnp.int32(0),
        first=jnp.int32(0),
        places=jnp.full(requests.count, memory.rows, jnp.int32) if memory.host_blocks else None,
    )


def known_tokens(requests: Requests, progress: Progress, row_request: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Prompt and output so far of the request in each row, 0 for a free row."""
    return by_row(requests.prompt_lens, row_request, 0) + by_row(progress.generated, row_request, 0)


def by_row(values: Int32[Array, " requests"], row_request: Int32[Array, " rows"], free: int) -> Int32[Array, " rows"]:
    """A value of the request in each row, `free` for a free row."""
    return values.at[row_request].get(mode="fill", fill_value=free)
