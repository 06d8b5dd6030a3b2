"""What experiments on simulated servers share: a server's knobs, its simulator, and what a simulation leaves behind."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import polars as pl

from experiments.cost_config import CostConfig, make_cost
from experiments.progress import Progress as ProgressBars
from experiments.run_directory import RunDirectory
from experiments.serving import TICK_MS, step_table
from experiments.workloads.config import WorkloadConfig, load_workload
from experiments.workloads.workload import Workload
from paxkv.capacity import kv_budget, parse_size
from paxkv.config import MemoryConfig, make_memory
from paxkv.memory import Limits
from paxkv.model_shapes import KVShape, model_shape
from paxkv.paged import Paged
from paxkv.policy import Choices, Policy
from paxkv.requests import Progress, Reason, Requests, make_requests
from paxkv.simulate import Simulator, simulate
from paxkv.steps import StepRecord


@dataclasses.dataclass(frozen=True)
class Server:
    """A server as far as it does not depend on how its memory is handed out.

    Attributes:
      model: whose keys and values are stored, such as OPT-13B; see `paxkv.model_shapes`.
      tensor_parallel: devices that share its heads.
      element_bytes: bytes of an element of keys and values.
      kv_memory: for keys and values, of each device, such as "12 GiB".
      memory_fraction: share of it that may be used, as decimal text.
      rows: most requests that run at once.
      max_model_len: most tokens of one sequence.
      token_budget: most tokens computed in a step.
      policy: what the scheduler may choose.
      cost: how long a step takes.
      max_stride: most steps that the simulator takes at once; changes nothing but how long that takes.
    """

    model: str = "Llama-3-8B"
    tensor_parallel: int = 1
    element_bytes: int = 2
    kv_memory: str = "16 GiB"
    memory_fraction: str = "1"
    rows: int = 256
    max_model_len: int = 2048
    token_budget: int = 2048
    policy: Policy = dataclasses.field(default_factory=Policy)
    cost: CostConfig = dataclasses.field(default_factory=CostConfig)
    max_stride: int = 8

    def shape(self) -> KVShape:
        """Keys and values as one device stores them."""
        return dataclasses.replace(
            model_shape(self.model), element_bytes=self.element_bytes, tensor_parallel=self.tensor_parallel
        )

    def budget_bytes(self) -> int:
        """For keys and values, of each device."""
        return kv_budget(parse_size(self.kv_memory, "kv_memory"), self.memory_fraction)

    def budget_tokens(self) -> float:
        """Tokens that this pays for, laid end to end."""
        return self.budget_bytes() / self.shape().token_bytes


class Simulated(NamedTuple):
    """The tables of one simulation."""

    steps: pl.DataFrame  # one row a step in which anything happened
    requests: pl.DataFrame  # one row a request
    turns: int  # strides in which the steps were taken


class Kept(NamedTuple):
    """What a part of a run keeps of a simulation."""

    steps: pl.DataFrame
    requests: pl.DataFrame


def make_simulator(server: Server, memory: MemoryConfig) -> Simulator:
    """The server with one memory.

    Raises:
      ValueError: a knob is out of range.
    """
    shape = server.shape()
    handed_out = make_memory(memory, shape, server.budget_bytes(), server.rows, server.max_model_len)
    if handed_out.capacity > server.budget_tokens():
        # Every share that is reported is one of what the budget pays for.
        raise ValueError(
            f"memory.num_blocks: expected no more tokens than the {server.budget_tokens():,.0f} that "
            f"server.kv_memory = {server.kv_memory} pays for, got {memory.num_blocks} blocks of {memory.block_size}"
        )
    whole = dataclasses.replace(shape, tensor_parallel=1)
    return Simulator(
        memory=handed_out,
        token_budget=server.token_budget,
        cost=make_cost(server.cost, whole, memory.block_size if isinstance(handed_out, Paged) else None),
        policy=server.policy,
        max_stride=server.max_stride,
    )


def to_requests(workload: Workload, seed: int, **labels: Any) -> Requests:
    """The workload on the device, without tokens; `labels` as `make_requests` takes them."""
    return make_requests(None, workload.prompt_len, workload.output_len, workload.arrival_ms, seed=seed, **labels)


def simulate_load(
    server: Server, simulator: Simulator, load: WorkloadConfig, seed: int, progress: ProgressBars, name: str
) -> Simulated:
    """Draws or reads a load under one seed, and simulates it under a bar of this name."""
    workload = load_workload(load, server.max_model_len, seed)
    with progress.task(name, total=workload.num_requests) as advance:
        return simulate_workload(simulator, workload, to_requests(workload, seed), advance)


def require_served(served: int) -> None:
    """Refuses to measure a simulation in which nobody was served: it says nothing of a server.

    Args:
      served: whatever is 0 then, such as the tokens that were computed.
    """
    if not served:
        raise ValueError("workload: expected a request that can be served, got none; are its prompts too long?")


def simulated_part(run_dir: RunDirectory, name: str, compute: Callable[[], Simulated]) -> Kept:
    """The tables of a part of a run, simulated unless the part is finished."""
    part = run_dir.finished_part(name)
    if part is None:
        simulated = compute()
        with run_dir.part(name) as part:
            part.write_parquet("steps.parquet", simulated.steps)
            part.write_parquet("requests.parquet", simulated.requests)
        part = run_dir.require_part(name)
    return Kept(part.read_parquet("steps.parquet"), part.read_parquet("requests.parquet"))


def simulate_workload(
    simulator: Simulator,
    workload: Workload,
    requests: Requests,
    on_dispatch: Callable[[int], Any] = lambda newly_ended: None,
    *,
    limits: Limits | None = None,
    choice: Choices | None = None,
) -> Simulated:
    """Simulates a workload to its end.

    Args:
      simulator: the server.
      workload: on the host.
      requests: the same on the device.
      on_dispatch: called with the number of requests that have ended since it was called last.
      limits: as for `paxkv.simulate.simulate`, which also says what is raised.
      choice: likewise.
    """
    simulated = simulate(simulator, requests, limits, choice=choice, on_dispatch=on_dispatch)
    return to_tables(simulator, workload, *simulated)


def to_tables(simulator: Simulator, workload: Workload, steps: StepRecord, progress: Progress, turns: int) -> Simulated:
    """What a simulation left behind as tables; times are modelled, in ms, null for what never happened."""

    def when(at: jax.Array) -> pl.Series:
        return pl.Series(np.asarray(at)).replace(-1, None) * TICK_MS

    requests = pl.DataFrame(
        {
            "request": np.arange(workload.num_requests, dtype=np.int32),
            "arrival_ms": workload.arrival_ms,
            "prompt_len": workload.prompt_len,
            "output_len": workload.output_len,
            "generated": np.asarray(progress.generated),
            "reason": [Reason(int(r)).name.lower() for r in np.asarray(progress.reason)],
            "admitted_ms": when(progress.admitted_at),
            "first_token_ms": when(progress.first_token_at),
            "ended_ms": when(progress.ended_at),
            "preemptions": np.asarray(progress.preemptions),
        }
    )
    return Simulated(step_table(steps, 0, simulator.cost), requests, turns)
