"""The engine: one step of continuous batching, and many of them without a trip to the host.

    schedule -> write and attend in every layer -> sample -> commit -> record

A step is a pure function of its state. Its shapes are those of the memory and the token budget, never those of
the batch, so it is compiled once; a scan over it runs a whole dispatch on the device.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.kv_write import kv_write
from paxkv.control_flow import run_if
from paxkv.cost_model import StepCost, step_ticks
from paxkv.kv_cache import Attend, KVCache
from paxkv.memory import KVMemory, Usage
from paxkv.requests import Requests, Status, final_lengths
from paxkv.sampling import sample
from paxkv.scheduler import (
    Plan,
    SchedulerState,
    commit,
    init_scheduler,
    next_arrival,
    schedule,
)


@typing.runtime_checkable
class Decode(Protocol):
    """A model as the engine calls it. Hashable, so that it can be a static argument of a jitted function."""

    def __call__(
        self,
        params: Any,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float32[Array, "rows vocab"], KVCache]:
        """Logits of the token after each selected one; `select` may be out of range where nothing is wanted."""
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Engine:
    """Everything about a server that does not change while it runs."""

    memory: KVMemory[Any]
    decode: Decode
    token_budget: int  # most tokens computed in a step
    cost: StepCost = dataclasses.field(default_factory=StepCost)
    backend: str | tuple[str, ...] | None = None  # of the attention kernels

    def __post_init__(self) -> None:
        """Refuses a budget that could leave a running request without its token."""
        if self.token_budget < self.memory.rows:
            raise ValueError(
                f"token_budget: expected at least rows = {self.memory.rows}, so that every running request gets "
                f"its token in each step, got {self.token_budget}; raise it, or lower rows"
            )


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What was generated. Entries beyond a request's `generated` are 0."""

    tokens: jax.Array  # i32[requests, max_output]
    ticks: jax.Array  # i32[requests, max_output]; when each token was produced
    margins: jax.Array  # f32[requests, max_output]; lead of the best logit over the second best


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """The whole server."""

    scheduler: SchedulerState
    cache: KVCache
    outputs: Outputs


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What happened in a step; all i32[]. Usage is taken at its peak, after memory grew and before it shrank."""

    clock: jax.Array  # ticks, at the start
    ticks: jax.Array  # modelled duration; of an idle step, the time to the next arrival
    running: jax.Array
    waiting: jax.Array  # arrived and without a row
    new_tokens: jax.Array  # 0: nothing was there to do
    prefill_tokens: jax.Array  # of those, tokens of requests that had more than one to compute
    sampled: jax.Array
    admitted: jax.Array
    refused: jax.Array
    preempted: jax.Array
    recompute_tokens: jax.Array
    ended: jax.Array
    kv_tokens: jax.Array  # stored tokens that attention read
    usage: Usage
    sync_map_calls: jax.Array
    background_map_calls: jax.Array
    unmap_calls: jax.Array


def init_engine(engine: Engine, requests: Requests, cache: KVCache) -> EngineState:
    """Nothing stored, nobody started. Takes over `cache`.

    Raises:
      ValueError: if `cache` has another number of slots than the memory hands out.
    """
    slots = cache.k[0].shape[0]
    if slots != engine.memory.num_slots:
        raise ValueError(
            f"cache: expected {engine.memory.num_slots} slots, which is what the memory hands out, got {slots}"
        )
    shape = (requests.count, max(1, int(jnp.max(requests.output_lens))))
    return EngineState(
        scheduler=init_scheduler(engine.memory, requests),
        cache=cache,
        outputs=Outputs(
            tokens=jnp.zeros(shape, jnp.int32),
            ticks=jnp.zeros(shape, jnp.int32),
            margins=jnp.zeros(shape, jnp.float32),
        ),
    )


@jax.jit(static_argnames=("engine", "num_steps"), donate_argnames="state")
def run_steps(
    engine: Engine, params: Any, requests: Requests, state: EngineState, num_steps: int
) -> tuple[EngineState, StepRecord]:
    """Runs `num_steps` steps on the device. Donates `state`.

    Returns:
      The state, and a record whose arrays have `num_steps` entries.
    """
    return jax.lax.scan(lambda carry, _: step(engine, params, requests, carry), state, length=num_steps)


def step(engine: Engine, params: Any, requests: Requests, state: EngineState) -> tuple[EngineState, StepRecord]:
    """One step of the server: schedule, compute, sample, book, record."""
    memory, before = engine.memory, state.scheduler
    calls_before = memory.map_calls(before.memory)
    scheduled, plan = schedule(memory, requests, before, engine.token_budget)

    cache, logits = _forward(engine, params, requests, scheduled, plan, state.outputs, state.cache)
    request = scheduled.row_request
    drawn_from = jax.vmap(jax.random.fold_in)(
        requests.keys.at[request].get(mode="clip"),
        scheduled.progress.generated.at[request].get(mode="fill", fill_value=0),
    )
    temperature = requests.temperatures.at[request].get(mode="fill", fill_value=0)
    tokens, margins = sample(logits, temperature, drawn_from)

    calls = memory.map_calls(scheduled.memory)
    seqs = memory.seqs(scheduled.memory)
    total = jnp.sum(plan.new_tokens)
    kv_tokens = jnp.sum(jnp.where(plan.new_tokens > 0, seqs.lengths, 0))
    busy = step_ticks(engine.cost, total, kv_tokens, calls.sync - calls_before.sync)
    ticks = jnp.where(total > 0, busy, next_arrival(requests, scheduled) - scheduled.clock)
    now = scheduled.clock + ticks

    outputs = _book_outputs(state.outputs, scheduled, plan, requests, tokens, margins, now)
    stored_at_end = final_lengths(requests, memory.max_len).at[request].get(mode="fill", fill_value=0)
    used = memory.usage(scheduled.memory, stored_at_end)
    after = commit(memory, requests, scheduled, plan, tokens, now)
    calls_after = memory.map_calls(after.memory)

    waiting = (scheduled.progress.status == Status.WAITING) & (requests.arrivals <= scheduled.clock)
    ended = jnp.sum(after.progress.status == Status.ENDED) - jnp.sum(scheduled.progress.status == Status.ENDED)
    record = StepRecord(
        clock=scheduled.clock,
        ticks=ticks,
        running=jnp.sum(seqs.active, dtype=jnp.int32),
        waiting=jnp.sum(waiting, dtype=jnp.int32),
        new_tokens=total,
        prefill_tokens=jnp.sum(jnp.where(plan.samples & (plan.new_tokens == 1), 0, plan.new_tokens)),
        sampled=jnp.sum(plan.samples, dtype=jnp.int32),
        admitted=plan.admitted,
        refused=plan.refused,
        preempted=plan.preempted,
        recompute_tokens=plan.recompute_tokens,
        ended=ended.astype(jnp.int32),
        kv_tokens=kv_tokens,
        usage=used,
        sync_map_calls=calls_after.sync - calls_before.sync,
        background_map_calls=calls_after.background - calls_before.background,
        unmap_calls=calls_after.unmap - calls_before.unmap,
    )
    return EngineState(scheduler=after, cache=cache, outputs=outputs), record


def _forward(
    engine: Engine,
    params: Any,
    requests: Requests,
    scheduled: SchedulerState,
    plan: Plan,
    outputs: Outputs,
    cache: KVCache,
) -> tuple[KVCache, Float32[Array, "rows vocab"]]:
    """Computes the planned tokens, if any: as `rows` tokens if every row has at most one, else as `token_budget`."""

    def compute(cache: KVCache, num_tokens: int, max_q_len: int) -> tuple[KVCache, jax.Array]:
        memory = engine.memory
        cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(plan.new_tokens)])
        index = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(cu_q_lens, index, side="right", method="compare_all").astype(jnp.int32) - 1
        # Beyond the last token `row` is the number of rows, so every look-up below is filled, not clamped.
        start = plan.starts.at[row].get(mode="fill", fill_value=0)
        position = start + index - cu_q_lens.at[row].get(mode="fill", fill_value=0)
        tokens = _known_token(requests, outputs, scheduled.row_request, row, position)
        slots = memory.slots(scheduled.memory, row, position)

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
            k_slots, v_slots = kv_write(cache.k[layer], cache.v[layer], k, v, slots)
            out = memory.attend(
                scheduled.memory,
                q,
                k_slots,
                v_slots,
                cu_q_lens,
                max_q_len=max_q_len,
                backend=engine.backend,
            )
            return out, KVCache(
                k=_replace(cache.k, layer, k_slots),
                v=_replace(cache.v, layer, v_slots),
            )

        last = jnp.where(plan.samples, cu_q_lens[1:] - 1, num_tokens)
        logits, cache = engine.decode(params, tokens, position, last, cache, attend)
        return cache, logits

    rows, budget = engine.memory.rows, engine.token_budget
    most = jnp.max(plan.new_tokens)
    vocab = jax.eval_shape(lambda c: compute(c, rows, 1)[1], cache).shape[1]
    carry = (cache, jnp.zeros((rows, vocab), jnp.float32))
    carry = run_if(most == 1, lambda c: compute(c[0], rows, 1), carry)
    return run_if(most > 1, lambda c: compute(c[0], budget, budget), carry)


def _known_token(
    requests: Requests,
    outputs: Outputs,
    row_request: Int32[Array, " rows"],
    row: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> Int32[Array, " tokens"]:
    """The token at a position of the sequence in a row: prompt first, then output. 0 where there is no row."""
    request = row_request.at[row].get(mode="fill", fill_value=requests.count)
    prompt_len = requests.prompt_lens.at[request].get(mode="fill", fill_value=0)
    in_prompt = requests.prompts.at[request, position].get(mode="fill", fill_value=0)
    generated = jnp.maximum(position - prompt_len, 0)
    in_output = outputs.tokens.at[request, generated].get(mode="fill", fill_value=0)
    return jnp.where(position < prompt_len, in_prompt, in_output)


def _book_outputs(
    outputs: Outputs,
    scheduled: SchedulerState,
    plan: Plan,
    requests: Requests,
    tokens: Int32[Array, " rows"],
    margins: Float32[Array, " rows"],
    now: Int32[Array, ""],
) -> Outputs:
    """Writes each sampled token behind the output its request already has."""
    at = jnp.where(plan.samples, scheduled.row_request, requests.count)
    place = scheduled.progress.generated.at[at].get(mode="fill", fill_value=0)
    return Outputs(
        tokens=outputs.tokens.at[at, place].set(tokens, mode="drop"),
        ticks=outputs.ticks.at[at, place].set(now, mode="drop"),
        margins=outputs.margins.at[at, place].set(margins, mode="drop"),
    )


def _replace(arrays: Sequence[jax.Array], at: int, array: jax.Array) -> tuple[jax.Array, ...]:
    return (*arrays[:at], array, *arrays[at + 1 :])


def all_ended(state: EngineState) -> bool:
    """Host side: whether every request has ended. Waits for the device."""
    return bool(jnp.all(state.scheduler.progress.status == Status.ENDED))
