"""Serving with two servers: one reads the prompts, the other answers, and keys and values move between them.

The reading server gives every request its first token and is done with it; the blocks of the prompt are packed then.
The answering server is asked for the rest once they could have arrived over the link. Both clocks are modelled and
begin together.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl

from experiments.serving import TICK_MS, request_table
from experiments.sharded_loop import run_to_end
from experiments.sharded_setup import Server
from experiments.workloads.workload import Workload
from paxkv import sharded_engine
from paxkv.cost_model import StepWork
from paxkv.disaggregated import Delivery, Parcel, check_pair, deliver, send
from paxkv.engine import EngineState
from paxkv.requests import TICK_US, Requests
from paxkv.sharded_engine import deal
from paxkv.sharding import to_host


class PairServed(NamedTuple):
    """The tables of a run on two meshes."""

    steps: pl.DataFrame  # one row a step in which anything happened; `replica` 0 reads, 1 answers
    requests: pl.DataFrame
    moves: pl.DataFrame  # one row a request that was handed over
    state: EngineState  # of the answering server


class Side(NamedTuple):
    """A server and its weights."""

    server: Server
    params: Any


def serve_pair(
    reads: Side,
    answers: Side,
    requests: Requests,
    workload: Workload,
    link_bytes_per_s: float,
    steps_per_dispatch: int,
    on_dispatch: Callable[[int], None] = lambda newly_ended: None,
) -> PairServed:
    """Serves until every request has ended.

    Args:
      reads: the server that computes prompts and first tokens.
      answers: the one that computes all other tokens.
      requests: on the device, all of them; greedy, one sequence each.
      workload: the same on the host.
      link_bytes_per_s: of the modelled link between the two.
      steps_per_dispatch: steps that run on the devices between two looks of the host.
      on_dispatch: called with the number of requests that have ended since it was called last.

    Raises:
      ValueError: the servers cannot hand anything over, or requests sample, stop at a token or have several sequences.
    """
    check_pair(reads.server.sharded, answers.server.sharded)
    if requests.samples != 1 or requests.stop_token >= 0 or float(jnp.max(requests.temperatures)) > 0:
        raise ValueError("requests: expected greedy ones of one sequence each without a stop token for two servers")
    prompts = jnp.pad(requests.prompts, ((0, 0), (0, -requests.prompts.shape[1] % reads.server.memory.block_size)))
    firsts = dataclasses.replace(requests, output_lens=jnp.minimum(requests.output_lens, 1))
    parcels: dict[int, Parcel] = {}

    def pack(state: EngineState, ended: list[int]) -> EngineState:
        for request in ended:
            parcels[request] = send(reads.server.sharded, state, prompts[request], int(requests.prompt_lens[request]))
        return state

    steps, state, _ = run_to_end(*reads, deal(firsts, 1), steps_per_dispatch, pack)
    read = _table(firsts, state, workload)
    begun = {row["request"]: row for row in read.iter_rows(named=True) if row["tokens"] and row["output_len"] > 1}
    on_dispatch(len(read) - len(begun))
    if not begun:
        empty = pl.DataFrame(schema=_MOVES)
        cache = sharded_engine.init_cache(answers.server.sharded, answers.server.new_cache)
        _, state = sharded_engine.init(answers.server.sharded, deal(firsts, 1), cache)  # which has nothing to answer
        return PairServed(steps, read.with_columns(replica=pl.lit(0, pl.Int32)), empty, state)

    block = answers.server.device_shape.block_bytes(answers.server.memory.block_size) * _parts(answers.server)
    link_ms = {r: 1000 * parcels[r].blocks * block / link_bytes_per_s for r in begun}
    order = sorted(begun, key=lambda r: (begun[r]["first_token_ms"] + link_ms[r], r))
    arrival_ms = np.array([begun[r]["first_token_ms"] + link_ms[r] for r in order])
    rest, rest_workload = _rest(requests, workload, order, [begun[r]["tokens"][0] for r in order], arrival_ms)
    waiting, moves = list(order), []

    nothing = StepWork(*[jnp.int32(0)] * len(StepWork._fields))
    step_ms = float(answers.server.sharded.engine.cost.ticks(nothing)) * TICK_MS

    def hand_over(state: EngineState, ended: list[int]) -> EngineState:
        on_dispatch(len(ended))
        now_ms = float(to_host(state.scheduler.clock)[0]) * TICK_MS
        horizon_ms = now_ms + _HORIZON * steps_per_dispatch * step_ms
        last_ms = -1.0 if not moves else arrival_ms[len(moves) - 1]
        # What may arrive before the next look, and in any case one to come, as an idle server goes on with that.
        while waiting and (arrival_ms[len(moves)] <= horizon_ms or last_ms <= now_ms):
            last_ms = arrival_ms[len(moves)]
            request = waiting.pop(0)
            state, delivery = deliver(answers.server.sharded, state, parcels.pop(request))
            moves.append(_move(request, delivery, link_ms[request]))
        return state

    more, state, _ = run_to_end(*answers, deal(rest, 1), steps_per_dispatch, hand_over)
    answered = _table(rest, state, rest_workload)
    table = _together(read, answered, order)
    steps = pl.concat([steps, more.with_columns(replica=pl.lit(1, pl.Int32))])
    table = table.with_columns(replica=pl.col("request").is_in(order).cast(pl.Int32))
    return PairServed(steps, table, pl.DataFrame(moves).sort("request"), state)


_MOVES = {
    "request": pl.Int64,
    "blocks": pl.Int64,
    "there": pl.Int64,
    "bytes": pl.Int64,
    "refused": pl.Boolean,
    "link_ms": pl.Float64,
}
_HORIZON = 4  # steps that a step may come to last


def _rest(
    requests: Requests, workload: Workload, order: list[int], firsts: list[int], arrival_ms: np.ndarray
) -> tuple[Requests, Workload]:
    """What is left to answer, in order of arrival: the first token is the prompt's last now."""
    chosen = np.array(order, np.int32)
    lengths = np.asarray(requests.prompt_lens)[chosen]
    prompts = np.pad(np.asarray(requests.prompts), ((0, 0), (0, 1)))[chosen]
    prompts[np.arange(len(order)), lengths] = firsts
    picked = jax.tree.map(lambda x: x[chosen], requests)
    ticks = np.ceil(np.round(arrival_ms * (1000 / TICK_US), 6)).astype(np.int32)
    rest = dataclasses.replace(
        picked,
        prompts=jnp.asarray(prompts),
        prompt_lens=jnp.asarray(lengths + 1),
        output_lens=picked.output_lens - 1,
        arrivals=jnp.asarray(ticks),
        leaders=jnp.arange(len(order), dtype=jnp.int32),
    )
    arrays = {"prompt_len": (lengths + 1).astype(np.int32), "output_len": workload.output_len[chosen] - 1}
    return rest, Workload(workload.provenance, arrival_ms, **arrays)


def _table(requests: Requests, state: EngineState, workload: Workload) -> pl.DataFrame:
    one = jax.tree.map(lambda x: x[0], to_host(sharded_engine.without_cache(state)))
    return request_table(requests, one, workload)


def _together(read: pl.DataFrame, answered: pl.DataFrame, order: list[int]) -> pl.DataFrame:
    """One row a request: how it came and its first token from the one server, all else from the other."""
    rows = {row["request"]: row for row in read.iter_rows(named=True)}
    for place, row in zip(order, answered.iter_rows(named=True), strict=True):
        before = rows[place]
        rows[place] = before | {
            "generated": before["generated"] + row["generated"],
            "reason": row["reason"],
            "ended_ms": row["ended_ms"],
            "preemptions": before["preemptions"] + row["preemptions"],
            **{name: before[name] + row[name] for name in ("tokens", "token_ms", "margins")},
        }
    return pl.DataFrame([rows[request] for request in sorted(rows)], schema=read.schema)


def _move(request: int, delivery: Delivery, link_ms: float) -> dict[str, Any]:
    return {
        "request": request,
        "blocks": delivery.moved,
        "there": delivery.there,
        "bytes": delivery.bytes,
        "refused": delivery.refused,
        "link_ms": link_ms,
    }


def _parts(server: Server) -> int:
    """Parts of the KV heads, which a block's bytes are spread over."""
    return server.sharded.mesh.shape["model"]
