"""The host's loop around servers on devices: it starts some steps, and looks at what they did.

Tables are written while the devices compute the next steps, so that they wait only for what the host has to know before
it can go on: whether anybody is left, and whether a memory recorded a fault. The steps' program leaves that on every
device, so that no process has to ask another for it.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import polars as pl

from experiments.serving import step_table
from experiments.sharded_setup import Server
from paxkv import sharded_engine
from paxkv.engine import EngineState
from paxkv.outcomes import Faults, raise_on_fault
from paxkv.requests import Requests, Status
from paxkv.sharded_engine import Dealt, ShardedEngine
from paxkv.sharding import everywhere
from paxkv.steps import StepRecord


class Seen(NamedTuple):
    """What the host looks at after some steps; every array has the replicas in front."""

    records: StepRecord  # i32[replicas, steps]
    status: jax.Array  # i32[replicas, requests]
    faults: Faults


class Ran(NamedTuple):
    """What is left when all requests have ended."""

    # One row a step of a `replica` in which anything happened. A step's `wall_ms` is its part of the time in which the
    # devices computed, its `host_ms` of the time in which they waited for the host before.
    steps: pl.DataFrame
    state: EngineState
    wall_compile_s: float


def run_to_end(
    server: Server,
    params: Any,
    dealt: Dealt,
    steps_per_dispatch: int,
    look: Callable[[EngineState, list[int]], EngineState],
) -> Ran:
    """Serves until every request has ended.

    Args:
      server: where.
      params: the model's weights, placed by the server's rules.
      dealt: what each replica is asked.
      steps_per_dispatch: steps that run on the devices between two looks of the host.
      look: called before the first dispatch and after each, with the requests, by their `dealt.ids`, that have ended
        since it was called last. Takes over the state, and gives back the one to go on with.

    Raises:
      MemoryFaultError: a memory recorded a fault.
      RuntimeError: a dispatch changed nothing although requests are left, which would go on for ever.
    """
    sharded = server.sharded
    requests, state = sharded_engine.init(sharded, dealt, sharded_engine.init_cache(sharded, server.new_cache))
    begin = time.perf_counter()
    advance = _advance.lower(sharded, params, requests, state, steps_per_dispatch).compile()
    wall_compile_s = time.perf_counter() - begin

    tables: list[pl.DataFrame] = []
    unwritten: tuple[StepRecord, float, float] | None = None
    ended = np.zeros(dealt.ids.shape, bool)

    def write(record: StepRecord, host_s: float, devices_s: float) -> None:
        first = len(tables) // sharded.replicas * steps_per_dispatch
        spent = {"wall_ms": 1000 * devices_s / steps_per_dispatch, "host_ms": 1000 * host_s / steps_per_dispatch}
        for replica in range(sharded.replicas):
            table = step_table(jax.tree.map(lambda x, r=replica: x[r], record), first, sharded.engine.cost)
            literals = {name: pl.lit(value) for name, value in spent.items()}
            tables.append(table.select(pl.lit(replica, pl.Int32).alias("replica"), pl.all(), **literals))

    state = look(state, [])
    idle_since = time.perf_counter()
    while not ended.all():
        state, on_devices = advance(params, requests, state)
        begun = time.perf_counter()
        if unwritten is not None:
            write(*unwritten)
            if all(table.is_empty() for table in tables[-sharded.replicas :]):
                last = len(tables) // sharded.replicas * steps_per_dispatch - 1
                raise RuntimeError(f"no step up to step {last} did anything, although requests are waiting")
        jax.block_until_ready(state)
        host_s, idle_since = begun - idle_since, time.perf_counter()
        seen: Seen = jax.device_get(on_devices)
        for replica in range(sharded.replicas):
            raise_on_fault(jax.tree.map(lambda x, r=replica: x[r], seen.faults))
        unwritten = seen.records, host_s, idle_since - begun
        new = (seen.status == Status.ENDED) & ~ended
        ended |= new
        state = look(state, dealt.ids[new].tolist())
    if unwritten is not None:
        write(*unwritten)
    return Ran(pl.concat(tables), state, wall_compile_s)


@jax.jit(static_argnames=("sharded", "num_steps"), donate_argnames="state")
def _advance(
    sharded: ShardedEngine, params: Any, requests: Requests, state: EngineState, num_steps: int
) -> tuple[EngineState, Seen]:
    """Runs `num_steps` steps of every replica, and leaves what the host looks at on every device. Donates `state`."""
    state, records = sharded_engine.run_steps(sharded, params, requests, state, num_steps)
    scheduler = state.scheduler
    faults = sharded.engine.memory.seqs(scheduler.memory).faults
    return state, everywhere(Seen(records, scheduler.progress.status, faults))
