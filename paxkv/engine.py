"""The engine: one step of continuous batching, and many of them without a trip to the host.

    schedule -> write and attend in every layer -> sample -> commit -> record

A step is a pure function of its state. Its shapes are those of the memory and the token budget, never those of
the batch, so it is compiled once; a scan over it runs a whole dispatch on the device.
"""

import dataclasses
import typing
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from paxkv.attend import MemoryAttend, check_groups, check_rows, slots_by_group
from paxkv.beams import choose_beams
from paxkv.control_flow import run_if
from paxkv.cost_model import CostModel, StepCost
from paxkv.kv_cache import Attend, KVCache, copy_blocks_between, fill_blocks, with_blocks
from paxkv.kv_format import KVFormat, scheme
from paxkv.memory import KVMemory
from paxkv.paged import Paged
from paxkv.policy import Policy, require_schedulable
from paxkv.ragged import ragged, tokens_of
from paxkv.requests import Requests, Status
from paxkv.sampling import sample
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import Plan, SchedulerState, by_row, init_scheduler
from paxkv.steps import StepRecord, record_step, step_ticks, step_work
from paxkv.windows import num_places


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


# What a float32 model computes, as it is.
PLAIN_F32 = scheme("f32")

OnFree = Literal["keep", "zero", "poison"]
_WIPED = {"zero": 0.0, "poison": float("nan")}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Engine:
    """Everything about a server that does not change while it runs."""

    memory: KVMemory[Any]
    decode: Decode
    token_budget: int  # most tokens computed in a step
    cost: CostModel = dataclasses.field(default_factory=StepCost)
    backend: str | tuple[str, ...] | None = None  # of attention and cache writes
    policy: Policy = dataclasses.field(default_factory=Policy)
    kv_format: KVFormat = PLAIN_F32  # in which keys and values are stored
    on_free: OnFree = "keep"  # what becomes of keys and values that nobody has a use for: a pass over memory if wiped

    def __post_init__(self) -> None:
        """Refuses what the scheduler could not serve with, and memory that cannot be wiped."""
        if self.on_free not in typing.get_args(OnFree):
            raise ValueError(f"on_free: expected one of {', '.join(typing.get_args(OnFree))}, got {self.on_free!r}")
        if self.on_free != "keep" and not isinstance(self.memory, Paged):
            raise ValueError(
                f"on_free: expected 'keep' with {type(self.memory).__name__} memory, which has no blocks, got "
                f"{self.on_free!r}"
            )
        check_groups(self.kv_format, self.memory)
        max_chunk = self.memory.max_chunk if isinstance(self.memory, Paged) else None
        if max_chunk is not None and max_chunk < self.token_budget:
            raise ValueError(
                f"token_budget: expected at most memory.max_chunk = {max_chunk}, the most tokens of a sequence in a "
                f"step that the memory has room for under a window, got {self.token_budget}; give both the same"
            )
        cache = self.memory.cache if isinstance(self.memory, Paged) else None
        if cache is not None and cache.kv_format != self.kv_format.name:
            raise ValueError(
                f"kv_format: expected {cache.kv_format!r}, under which the memory's prefix cache knows its blocks, got "
                f"{self.kv_format.name!r}; give both the same, as in PrefixCache(kv_format=engine.kv_format.name)"
            )
        check_rows(self.kv_format, self.memory)
        require_schedulable(self.memory, self.token_budget, self.policy)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What is known of the tokens that were generated. Entries beyond a request's `generated` are 0."""

    ticks: jax.Array  # i32[requests, max_output]; when each token was produced
    margins: jax.Array  # f32[requests, max_output]; lead of the token over the second best; 0 for beams
    scores: jax.Array  # f32[requests]; log probability of all that a beam has generated


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """The whole server."""

    scheduler: SchedulerState
    cache: KVCache
    host_cache: KVCache | None  # what was swapped out, if the policy is to swap
    transcripts: jax.Array  # i32[requests, max_prompt + max_output]; prompt, then output so far, then 0
    outputs: Outputs


def init_engine(engine: Engine, requests: Requests, cache: KVCache, *, max_output: int | None = None) -> EngineState:
    """Nothing stored, nobody started. Takes over `cache`.

    Inside of jit `max_output`, the most tokens that a request asks for, has to be given.

    Raises:
      ValueError: if `cache` has another number of slots or entries than the memory needs, beams ask for more than it
        can do, or requests bring keys and values, which here would be missing: see `paxkv.disaggregated`.
    """
    slots = cache.num_slots
    if slots != engine.memory.num_slots:
        raise ValueError(
            f"cache: expected {engine.memory.num_slots} slots, which is what the memory hands out, got {slots}"
        )
    if requests.beams and not engine.memory.can_fork:
        raise ValueError("memory: expected one that can fork, as beams share blocks, such as Paged(..., forks=True)")
    if requests.delivered is not None:
        raise ValueError("delivered: expected None, as an engine stores what it computes; send them as a parcel")
    places = num_places(engine.memory.layer_groups, len(cache.layers))
    if len(cache.layers) != places:
        raise ValueError(
            f"cache: expected {places} entries, one for each layer of the memory's largest group, got "
            f"{len(cache.layers)}; see `windows.num_places`"
        )
    if max_output is None:
        max_output = int(jnp.max(requests.output_lens))
    shape = (requests.count, max(1, max_output))
    return EngineState(
        scheduler=init_scheduler(engine.memory, requests),
        cache=cache,
        host_cache=_host_cache(engine, cache),
        transcripts=jnp.pad(requests.prompts, ((0, 0), (0, shape[1]))),
        outputs=Outputs(
            ticks=jnp.zeros(shape, jnp.int32),
            margins=jnp.zeros(shape, jnp.float32),
            scores=jnp.zeros(requests.count, jnp.float32),
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
    scheduled, plan = schedule(memory, requests, before, engine.token_budget, engine.policy, state.transcripts)
    cache, host_cache = _swap(memory, plan, state.cache, state.host_cache)
    memory_state, cache, copied = memory.settle(scheduled.memory, cache)
    scheduled = dataclasses.replace(scheduled, memory=memory_state)

    cache, logits = _forward(engine, params, scheduled, plan, state.transcripts, cache)
    request = scheduled.row_request
    drawn_from = jax.vmap(jax.random.fold_in)(
        requests.keys.at[request].get(mode="clip"),
        scheduled.progress.generated.at[request].get(mode="fill", fill_value=0),
    )
    temperature = requests.temperatures.at[request].get(mode="fill", fill_value=0)
    tokens, margins = sample(logits, temperature, drawn_from)

    work = step_work(memory, before, scheduled, plan)
    now = scheduled.clock + step_ticks(memory, engine.cost, requests, scheduled, work)
    transcripts, outputs, ready = state.transcripts, state.outputs, scheduled
    if requests.beams:
        ready, transcripts, outputs, tokens = _search(memory, requests, scheduled, plan, transcripts, outputs, logits)
        margins = jnp.zeros_like(margins)
    transcripts, outputs = _book(transcripts, outputs, ready, plan, requests, tokens, margins, now)
    after = commit(memory, requests, ready, plan, tokens, now, transcripts, engine.token_budget)
    cache = _wipe(engine, (before.memory, ready.memory), after.memory, cache)
    record = record_step(memory, requests, before, scheduled, plan, work, after, copied)
    return EngineState(after, cache, host_cache, transcripts, outputs), record


def _host_cache(engine: Engine, cache: KVCache) -> KVCache | None:
    """Room for what is swapped out."""
    memory = engine.memory
    if not engine.policy.swaps(memory):
        return None
    return with_blocks(cache, memory.host_blocks, memory.num_slots // memory.num_units)


def _swap(
    memory: KVMemory[Any], plan: Plan, cache: KVCache, host_cache: KVCache | None
) -> tuple[KVCache, KVCache | None]:
    """Copies what was swapped out to the host, and what was swapped in back from it."""
    if host_cache is None or plan.moves_out is None or plan.moves_in is None:
        return cache, host_cache
    block_size = memory.num_slots // memory.num_units
    out, back = plan.moves_out, plan.moves_in
    host_cache = copy_blocks_between(cache, host_cache, out.sources, out.destinations, block_size)
    return copy_blocks_between(host_cache, cache, back.sources, back.destinations, block_size), host_cache


def _wipe(engine: Engine, earlier: tuple[Any, ...], after: Any, cache: KVCache) -> KVCache:
    """Overwrites the blocks that this step left without use.

    A block that went straight from one sequence to another is not wiped in between: its new owner reads nothing of it
    but what it wrote itself.
    """
    memory = engine.memory
    if engine.on_free == "keep" or not isinstance(memory, Paged):
        return cache
    value = _WIPED[engine.on_free]
    gone = jnp.any(jnp.stack([memory.vacated(before, after) for before in earlier]), axis=0)
    units = jnp.arange(memory.num_units, dtype=jnp.int32)
    ids = memory.own_blocks(jnp.where(gone, units, memory.num_units))
    block_size = memory.block_size
    return run_if(jnp.any(gone), lambda cache: fill_blocks(cache, ids, value, block_size), cache)


def _forward(
    engine: Engine,
    params: Any,
    scheduled: SchedulerState,
    plan: Plan,
    transcripts: Int32[Array, "requests width"],
    cache: KVCache,
) -> tuple[KVCache, Float32[Array, "rows vocab"]]:
    """Computes the planned tokens, if any: as `rows` tokens if every row has at most one, else as `token_budget`."""

    def compute(cache: KVCache, num_tokens: int, max_q_len: int) -> tuple[KVCache, jax.Array]:
        memory = engine.memory
        batch = ragged(plan.starts, plan.new_tokens, num_tokens)
        tokens = tokens_of(transcripts, scheduled.row_request, batch)
        slots = slots_by_group(memory, scheduled.memory, batch)
        attend = MemoryAttend(
            scheduled.memory, slots, batch.cu_lens, memory, engine.kv_format, max_q_len, engine.backend
        )
        last = jnp.where(plan.samples, batch.cu_lens[1:] - 1, num_tokens)
        logits, cache = engine.decode(params, tokens, batch.position, last, cache, attend)
        return cache, logits

    rows, budget = engine.memory.rows, engine.token_budget
    most = jnp.max(plan.new_tokens)
    vocab = jax.eval_shape(lambda c: compute(c, rows, 1)[1], cache).shape[1]
    carry = (cache, jnp.zeros((rows, vocab), jnp.float32))
    carry = run_if(most == 1, lambda c: compute(c[0], rows, 1), carry)
    return run_if(most > 1, lambda c: compute(c[0], budget, budget), carry)


def _search(
    memory: KVMemory[Any],
    requests: Requests,
    scheduled: SchedulerState,
    plan: Plan,
    transcripts: Int32[Array, "requests width"],
    outputs: Outputs,
    logits: Float32[Array, "rows vocab"],
) -> tuple[SchedulerState, Int32[Array, "requests width"], Outputs, Int32[Array, " rows"]]:
    """Lets every row go on with one of the best continuations of its group, and take over what came before it."""
    request, width, nobody = scheduled.row_request, requests.samples, requests.count
    row = jnp.arange(memory.rows, dtype=jnp.int32)
    row_of = jnp.full(nobody, memory.rows, jnp.int32).at[request].set(row, mode="drop")
    leader = by_row(requests.leaders, request, nobody)
    members = row_of.at[leader[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]].get(mode="fill", fill_value=0)
    beams = choose_beams(
        logits,
        outputs.scores.at[request].get(mode="fill", fill_value=0),
        jnp.clip(members, 0, memory.rows - 1),
        jnp.clip(request - leader, 0, width - 1),
        by_row(scheduled.progress.generated, request, 0) == 0,
    )
    sources = jnp.where(plan.samples, beams.sources, row)
    source_request = request[sources]
    at = jnp.where(plan.samples, request, nobody)
    transcripts = transcripts.at[at].set(transcripts[source_request], mode="drop")
    outputs = dataclasses.replace(
        outputs,
        ticks=outputs.ticks.at[at].set(outputs.ticks[source_request], mode="drop"),
        scores=outputs.scores.at[at].set(beams.scores, mode="drop"),
    )
    memory_state = memory.reorder(scheduled.memory, sources)
    return dataclasses.replace(scheduled, memory=memory_state), transcripts, outputs, beams.tokens


def _book(
    transcripts: Int32[Array, "requests width"],
    outputs: Outputs,
    scheduled: SchedulerState,
    plan: Plan,
    requests: Requests,
    tokens: Int32[Array, " rows"],
    margins: Float32[Array, " rows"],
    now: Int32[Array, ""],
) -> tuple[Int32[Array, "requests width"], Outputs]:
    """Writes each sampled token behind what its request already has."""
    at = jnp.where(plan.samples, scheduled.row_request, requests.count)
    place = scheduled.progress.generated.at[at].get(mode="fill", fill_value=0)
    prompt_len = requests.prompt_lens.at[at].get(mode="fill", fill_value=0)
    return transcripts.at[at, prompt_len + place].set(tokens, mode="drop"), dataclasses.replace(
        outputs,
        ticks=outputs.ticks.at[at, place].set(now, mode="drop"),
        margins=outputs.margins.at[at, place].set(margins, mode="drop"),
    )


def all_ended(state: EngineState) -> bool:
    """Host side: whether every request has ended. Waits for the device."""
    return bool(jnp.all(state.scheduler.progress.status == Status.ENDED))


def output_tokens(requests: Requests, state: EngineState) -> list[list[int]]:
    """Host side: what each request has generated so far. Waits for the device."""
    transcripts = np.asarray(state.transcripts)
    begins, counts = np.asarray(requests.prompt_lens), np.asarray(state.scheduler.progress.generated)
    return [row[b : b + n].tolist() for row, b, n in zip(transcripts, begins, counts, strict=True)]
