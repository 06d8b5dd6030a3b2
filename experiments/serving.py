"""Serving a workload to its end with one memory, and what that leaves behind as tables."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl

from experiments.workloads.workload import Workload
from paxkv.attend import block_size_of
from paxkv.capacity import entry_shape
from paxkv.cost_model import CostModel
from paxkv.engine import Engine, EngineState, all_ended, init_engine, output_tokens, run_steps
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import KVCache
from paxkv.kv_format import KVFormat
from paxkv.memory import KVMemory
from paxkv.model_shapes import KVShape
from paxkv.outcomes import raise_on_fault
from paxkv.requests import TICK_US, Reason, Requests, Status
from paxkv.steps import StepRecord

TICK_MS = TICK_US / 1000


class Served(NamedTuple):
    """The tables of one run of an engine."""

    steps: pl.DataFrame  # one row a step in which anything happened
    requests: pl.DataFrame  # one row a request, its tokens and their times as lists
    pool: pl.DataFrame  # `step`, and `owners`: the request that holds each unit, -1 for none; once a dispatch
    wall_compile_s: float


def serve(
    engine: Engine,
    params: Any,
    requests: Requests,
    workload: Workload,
    shape: KVShape,
    steps_per_dispatch: int,
    on_dispatch: Callable[[int], None] = lambda newly_ended: None,
    compiler_options: dict[str, Any] | None = None,
) -> Served:
    """Runs `engine` until every request has ended.

    Args:
      engine: the server.
      params: weights of its model.
      requests: the workload on the device, perhaps with several sequences of each prompt.
      workload: the same on the host, for the exact arrival times.
      shape: of the model's keys and values.
      steps_per_dispatch: steps that run on the device between two looks of the host.
      on_dispatch: called with the number of requests that have ended since it was called last.
      compiler_options: of XLA, for the engine; None for the usual ones.

    Raises:
      ValueError: the arrays of keys and values do not fit into the device, or the modelled clock ran out.
      RuntimeError: a dispatch changed nothing although requests are left, which would go on for ever.
      MemoryFaultError: the memory recorded a fault.
    """
    memory = engine.memory
    cache = _allocate(shape, memory, engine.kv_format)
    state = init_engine(engine, requests, cache)
    begin = time.perf_counter()
    advance = run_steps.lower(engine, params, requests, state, steps_per_dispatch).compile(compiler_options)
    picture = jax.jit(_owning_requests, static_argnums=0).lower(memory, state).compile()
    wall_compile_s = time.perf_counter() - begin

    records: list[pl.DataFrame] = []
    pictures: list[dict[str, Any]] = []
    step = clock = ended = 0
    while not all_ended(state):
        begin = time.perf_counter()
        state, record = advance(params, requests, state)
        jax.block_until_ready(state)
        wall_ms = 1000 * (time.perf_counter() - begin) / steps_per_dispatch
        raise_on_fault(memory.seqs(state.scheduler.memory).faults)
        if int(state.scheduler.clock) < clock:
            limit_s = 2**31 * TICK_MS / 1000
            raise ValueError(
                f"the modelled clock passed {limit_s:.0f} s, the most that it can count; serve fewer requests, or "
                "lower the workload's time_scale or the cost of a step"
            )
        clock = int(state.scheduler.clock)
        table = step_table(record, step, engine.cost).with_columns(wall_ms=pl.lit(wall_ms))
        if table.is_empty() and not all_ended(state):
            raise RuntimeError(f"no step after step {step} did anything, although requests are waiting")
        records.append(table)
        step += steps_per_dispatch
        pictures.append({"step": step, "owners": np.asarray(picture(state)).tolist()})
        before, ended = ended, int(jnp.sum(state.scheduler.progress.status == Status.ENDED))
        on_dispatch(ended - before)
    return Served(
        steps=pl.concat(records),
        requests=request_table(requests, state, workload),
        pool=pl.DataFrame(pictures, schema={"step": pl.Int32, "owners": pl.List(pl.Int32)}),
        wall_compile_s=wall_compile_s,
    )


def _allocate(shape: KVShape, memory: KVMemory[Any], kv_format: KVFormat) -> KVCache:
    """The arrays of keys and values, or a sentence that says why there are none."""
    slots, entry = memory.num_slots, entry_shape(shape, memory.layer_groups)
    sizes = (entry.layers, slots, entry.kv_heads, entry.head_dim)
    try:
        cache = init_kv_cache(*sizes, kv_format, block_size=block_size_of(memory), rows=memory.rows)
        return jax.block_until_ready(cache)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the device has no room for keys and values of {slots} slots, {slots * entry.token_bytes} bytes; lower "
            "the budget, and for vAttention, whose virtual ranges are real arrays here, rows or max_model_len"
        ) from error


def _owning_requests(memory: Any, state: EngineState) -> jax.Array:
    """The request that holds each unit of memory, -1 for none: i32[units]."""
    nobody = state.scheduler.progress.status.shape[0]
    owner = memory.owners(state.scheduler.memory)
    request = state.scheduler.row_request.at[owner].get(mode="fill", fill_value=nobody)
    return jnp.where(request == nobody, -1, request)


def step_table(record: StepRecord, first_step: int, cost: CostModel) -> pl.DataFrame:
    """One row a step, without those in which nothing happened. Times are modelled, in ms."""
    flat = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "usage"}
    flat |= {f.name: getattr(record.usage, f.name) for f in dataclasses.fields(record.usage)}
    table = pl.DataFrame({name: np.asarray(values) for name, values in flat.items()})
    table = table.with_row_index("step", offset=first_step).with_columns(
        pl.col("step").cast(pl.Int32),
        clock_ms=pl.col("clock") * TICK_MS,
        duration_ms=pl.col("ticks") * TICK_MS,
        map_calls=pl.col("sync_map_calls") + pl.col("background_map_calls"),
        mapping_ms=(pl.col("sync_map_calls") + pl.col("background_map_calls")) * (cost.map_call_ns / 1e6),
        sync_mapping_ms=pl.col("sync_map_calls") * (cost.map_call_ns / 1e6),
        swap_ms=(pl.col("swapped_out_blocks") + pl.col("swapped_in_blocks")) * (cost.swap_block_ns / 1e6),
    )
    happened = (pl.col("new_tokens") > 0) | (pl.col("ticks") > 0) | (pl.col("refused") > 0)
    return table.filter(happened).drop("clock", "ticks")


def request_table(requests: Requests, state: EngineState, workload: Workload) -> pl.DataFrame:
    """One row a request, a sample or a beam being one. Times are modelled, in ms; null for what never happened."""
    progress, outputs = state.scheduler.progress, state.outputs
    generated = np.asarray(progress.generated)
    ticks, margins = np.asarray(outputs.ticks), np.asarray(outputs.margins)

    def when(at: jax.Array) -> pl.Series:
        return pl.Series(np.asarray(at)).replace(-1, None) * TICK_MS

    table = pl.DataFrame(
        {
            "request": np.arange(requests.count, dtype=np.int32),
            "arrival_ms": np.repeat(workload.arrival_ms, requests.samples),
            "prompt_len": np.repeat(workload.prompt_len, requests.samples),
            "output_len": np.repeat(workload.output_len, requests.samples),
            "generated": generated,
            "reason": [Reason(int(r)).name.lower() for r in np.asarray(progress.reason)],
            "admitted_ms": when(progress.admitted_at),
            "first_token_ms": when(progress.first_token_at),
            "ended_ms": when(progress.ended_at),
            "preemptions": np.asarray(progress.preemptions),
            "tokens": output_tokens(requests, state),
            "token_ms": [(row[:n] * TICK_MS).tolist() for row, n in zip(ticks, generated, strict=True)],
            "margins": [row[:n].tolist() for row, n in zip(margins, generated, strict=True)],
        },
        schema_overrides={
            "tokens": pl.List(pl.Int32),
            "token_ms": pl.List(pl.Float64),
            "margins": pl.List(pl.Float32),
        },
    )
    return table.with_columns(score=np.asarray(outputs.scores)) if requests.beams else table
