"""Serving a workload with replicas on a mesh, and what that leaves behind as tables."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import polars as pl

from experiments.serving import request_table
from experiments.sharded_loop import run_to_end
from experiments.sharded_setup import Server
from experiments.workloads.workload import Workload
from paxkv import sharded_engine
from paxkv.engine import EngineState
from paxkv.requests import Requests
from paxkv.sharded_engine import Dealt, deal
from paxkv.sharding import to_host


class ShardedServed(NamedTuple):
    """The tables of a run on a mesh."""

    steps: pl.DataFrame  # see `sharded_loop.Ran`
    requests: pl.DataFrame  # one row a request, with the `replica` that served it
    state: EngineState  # the last one
    wall_compile_s: float


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
    dealt = deal(requests, server.sharded.replicas)

    def look(state: EngineState, ended: list[int]) -> EngineState:
        on_dispatch(sum(request >= 0 for request in ended))
        return state

    steps, state, wall_compile_s = run_to_end(server, params, dealt, steps_per_dispatch, look)
    return ShardedServed(steps, _request_table(dealt, state, workload), state, wall_compile_s)


def _request_table(dealt: Dealt, state: EngineState, workload: Workload) -> pl.DataFrame:
    """All requests in the order they were asked in, without what only filled replicas up."""
    tables = []
    seen = to_host(sharded_engine.without_cache(state))
    for replica, ids in enumerate(dealt.ids):
        own, progress = (jax.tree.map(lambda x, r=replica: x[r], t) for t in (dealt.requests, seen))
        # What only fills up comes last, and looks as if it had been asked for last.
        last = workload.num_requests - 1
        asked = np.where(ids < 0, last, ids // own.samples)[:: own.samples]
        arrays = {name: getattr(workload, name)[asked] for name in ("arrival_ms", "prompt_len", "output_len")}
        table = request_table(own, progress, Workload(workload.provenance, **arrays))
        tables.append(
            table.with_columns(replica=pl.lit(replica, pl.Int32), request=pl.Series(ids)).filter(pl.Series(ids >= 0))
        )
    return pl.concat(tables).sort("request")
