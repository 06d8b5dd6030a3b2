"""Serving a workload with replicas on a mesh, and what that leaves behind as tables."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import polars as pl

from experiments.serving import request_table, step_table
from experiments.sharded_setup import Server
from experiments.workloads.workload import Workload
from paxkv import sharded_engine
from paxkv.engine import EngineState, all_ended
from paxkv.outcomes import raise_on_fault
from paxkv.requests import Requests, Status
from paxkv.sharded_engine import Dealt, deal
from paxkv.sharding import to_host


class ShardedServed(NamedTuple):
    """The tables of a run on a mesh."""

    steps: pl.DataFrame  # one row a step of a `replica` in which anything happened
    requests: pl.DataFrame  # one row a request, with the `replica` that served it
    state: EngineState  # the last one
    wall_compile_s: float
    host_share: float  # of the time from the first step to the last, what the devices waited for the host


def serve(
    server: Server,
    params: Any,
    requests: Requests,
    workload: Workload,
    steps_per_dispatch: int,
    on_dispatch: Callable[[int], None] = lambda newly_ended: None,
) -> ShardedServed:
    """Serves until every request has ended.

    Args:
      server: where.
      params: the model's weights, placed by the server's rules.
      requests: on the device, all of them.
      workload: the same on the host.
      steps_per_dispatch: steps that run on the devices between two looks of the host.
      on_dispatch: called with the number of requests that have ended since it was called last.

    Raises:
      MemoryFaultError: a memory recorded a fault.
      RuntimeError: a dispatch changed nothing although requests are left, which would go on for ever.
    """
    sharded, memory = server.sharded, server.memory
    dealt = deal(requests, sharded.replicas)
    placed, state = sharded_engine.init(sharded, dealt, sharded_engine.init_cache(sharded, server.new_cache))
    begin = time.perf_counter()
    advance = sharded_engine.run_steps.lower(sharded, params, placed, state, steps_per_dispatch).compile()
    wall_compile_s = time.perf_counter() - begin

    tables: list[pl.DataFrame] = []
    step = ended = 0
    on_devices = 0.0
    begun = time.perf_counter()
    while not all_ended(state):
        begin = time.perf_counter()
        state, records = advance(params, placed, state)
        jax.block_until_ready(state)
        passed = time.perf_counter() - begin
        on_devices += passed
        faults = to_host(memory.seqs(state.scheduler.memory).faults)
        for r in range(sharded.replicas):
            raise_on_fault(jax.tree.map(lambda x, r=r: x[r], faults))
        records = to_host(records)
        found = [
            step_table(jax.tree.map(lambda x, r=r: x[r], records), step, sharded.engine.cost).select(
                pl.lit(r, pl.Int32).alias("replica"), pl.all(), wall_ms=pl.lit(1000 * passed / steps_per_dispatch)
            )
            for r in range(sharded.replicas)
        ]
        if all(table.is_empty() for table in found) and not all_ended(state):
            raise RuntimeError(f"no step after step {step} did anything, although requests are waiting")
        tables += found
        step += steps_per_dispatch
        before, ended = ended, int(np.sum(to_host(state.scheduler.progress.status) == Status.ENDED))
        on_dispatch(ended - before)
    host_share = 1 - on_devices / (time.perf_counter() - begun)
    return ShardedServed(pl.concat(tables), _request_table(dealt, state, workload), state, wall_compile_s, host_share)


def _request_table(dealt: Dealt, state: EngineState, workload: Workload) -> pl.DataFrame:
    """All requests in the order they were asked in, without what only filled replicas up."""
    tables = []
    for replica, ids in enumerate(dealt.ids):
        own, progress = (jax.tree.map(lambda x, r=replica: x[r], t) for t in (dealt.requests, _host(state)))
        # What only fills up comes last, and looks as if it had been asked for last.
        last = workload.num_requests - 1
        asked = np.where(ids < 0, last, ids // own.samples)[:: own.samples]
        arrays = {name: getattr(workload, name)[asked] for name in ("arrival_ms", "prompt_len", "output_len")}
        table = request_table(own, progress, Workload(workload.provenance, **arrays))
        tables.append(
            table.with_columns(replica=pl.lit(replica, pl.Int32), request=pl.Series(ids)).filter(pl.Series(ids >= 0))
        )
    return pl.concat(tables).sort("request")


def _host(state: EngineState) -> EngineState:
    return to_host(sharded_engine.without_cache(state))
