"""The waiting queue: who is admitted, who is refused, and who has to go on waiting."""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.control_flow import run_if
from paxkv.memory import Ask, Content, KVMemory
from paxkv.outcomes import Outcome
from paxkv.policy import Choices
from paxkv.publish_tokens import publish_granted
from paxkv.queue import first_waiting, least_waiting
from paxkv.requests import Reason, Requests, Status, final_lengths
from paxkv.scheduler_state import SchedulerState, by_row
from paxkv.swap_state import Moves, join_moves, no_moves_in


class Admitted(NamedTuple):
    """What came of a round of admissions."""

    state: SchedulerState
    granted: Int32[Array, " rows"]  # tokens that each new row computes in this step
    starts: Int32[Array, " rows"]  # tokens that it found stored, or brought
    admitted: Int32[Array, ""]
    refused: Int32[Array, ""]
    hit_tokens: Int32[Array, ""]
    moves: Moves | None  # blocks to copy back from the host
    closed: Bool[Array, ""]  # all who wait were told to


class _Round(NamedTuple):
    so_far: Admitted
    closed: Bool[Array, ""]  # nobody else is admitted in this step
    candidate: Int32[Array, ""]
    completes: Bool[Array, ""]  # it belongs to a group that runs in part


def admit_waiting(
    memory: KVMemory[Any],
    policy: Choices,
    requests: Requests,
    transcripts: Int32[Array, "requests width"] | None,
    state: SchedulerState,
    token_budget: Int32[Array, ""],
    max_new_tokens: int,
    closed: Bool[Array, ""],
) -> Admitted:
    """Admits waiting requests in order until one has to wait, the budget is spent, or nobody is left.

    Unless `policy.overtake`, nobody is passed over: under `first_come` a small request never overtakes a large one, so
    the large one is sure to be served.

    A request that is admitted to a memory that publishes on schedule stores and publishes its tokens at once, so that
    the next one in the same step can share them.
    """
    at_once = memory.publishes == "on_schedule"

    def is_open(carry: _Round) -> Bool[Array, ""]:
        left = token_budget - jnp.sum(carry.so_far.granted)
        is_open = ~carry.closed & (carry.candidate < requests.count) & (left > 0)
        if not policy.may("chunked", False):
            return is_open
        known = _known(requests, carry.so_far.state, carry.candidate)
        if requests.delivered is not None:
            known -= _delivered(requests, carry.so_far.state, carry.candidate, known)
        return is_open & (policy.chunked | (known <= left) | (known > max_new_tokens))

    def try_one(carry: _Round) -> _Round:
        so_far, candidate = carry.so_far, carry.candidate
        state = so_far.state
        known = _known(requests, state, candidate)
        content = _content(requests, transcripts, state, candidate)

        def ask(answer: tuple) -> tuple:
            *_, moves, _ = answer
            return _ask(memory, policy, requests, state, candidate, known, content, moves)

        answer = (state.memory, jnp.int32(memory.rows), jnp.int32(Outcome.LATER), so_far.moves, jnp.bool(False))
        if policy.limits_adapters:
            answer = run_if(~_too_many_adapters(policy, requests, state, candidate), ask, answer)
        else:
            answer = ask(answer)
        memory_state, row, outcome, moves, forked = answer
        ok, ends = outcome == Outcome.OK, outcome == Outcome.NEVER
        row = jnp.where(ok, row, memory.rows)
        state = _book(memory, requests, state, memory_state, candidate, row, ends)
        if requests.delivered is not None:
            brought = _delivered(requests, state, candidate, known)
            arrives = jnp.zeros(memory.rows, jnp.int32).at[row].set(brought, mode="drop")
            memory_state, _ = memory.append(state.memory, arrives, memory.max_len)
            state = dataclasses.replace(state, memory=memory_state)

        stored = memory.seqs(state.memory).lengths.at[row].get(mode="fill", fill_value=0)
        together = memory.can_fork & (requests.group_sizes[candidate] > 1)
        wanted = known - stored - together.astype(jnp.int32)  # the last token waits until all are there
        # What a fork shares may be computed in this very step, after the copy that its first token would need.
        wanted = jnp.where(forked, 0, wanted)
        tokens = jnp.minimum(wanted, token_budget - jnp.sum(so_far.granted))
        granted = jnp.zeros(memory.rows, jnp.int32).at[row].set(tokens, mode="drop")
        if at_once:
            starts = memory.seqs(state.memory).lengths
            memory_state, _ = memory.append(state.memory, granted, max_new_tokens)
            state = dataclasses.replace(state, memory=memory_state)
            state = publish_granted(memory, transcripts, state, starts, granted, max_new_tokens)
        later = ~ok & ~ends
        state, following, completes = _next_waiting(memory, policy, requests, state, candidate)
        return _Round(
            Admitted(
                state=state,
                granted=so_far.granted + granted,
                starts=so_far.starts.at[row].set(stored, mode="drop"),
                admitted=so_far.admitted + ok.astype(jnp.int32),
                refused=so_far.refused + ends.astype(jnp.int32),
                hit_tokens=so_far.hit_tokens + stored,
                moves=moves,
                closed=so_far.closed,
            ),
            closed=later & (carry.completes | ~policy.overtake),
            candidate=following,
            completes=completes,
        )

    nothing = jnp.zeros(memory.rows, jnp.int32)
    zero = jnp.int32(0)
    moves = no_moves_in(memory.num_units, memory.host_blocks) if policy.swaps(memory) else None
    state, candidate, completes = _next_waiting(memory, policy, requests, state, jnp.int32(-1))
    so_far = Admitted(state, nothing, jnp.zeros_like(nothing), zero, zero, zero, moves, jnp.bool(False))
    last = jax.lax.while_loop(is_open, try_one, _Round(so_far, closed, candidate, completes))
    all_asked = ~closed & (last.closed | (last.candidate >= requests.count))
    end = last.so_far._replace(closed=all_asked)
    if not at_once:
        memory_state, _ = memory.append(end.state.memory, end.granted, max_new_tokens)
        end = end._replace(state=dataclasses.replace(end.state, memory=memory_state))
    return end


def _known(requests: Requests, state: SchedulerState, candidate: Int32[Array, ""]) -> Int32[Array, ""]:
    """Prompt and output so far; 1 for nobody."""
    prompt = requests.prompt_lens.at[candidate].get(mode="fill", fill_value=1)
    return prompt + state.progress.generated.at[candidate].get(mode="fill", fill_value=0)


def _delivered(
    requests: Requests, state: SchedulerState, candidate: Int32[Array, ""], known: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Tokens whose keys and values come with the candidate; they come once, and are lost to a preemption."""
    brought = typing.cast(jax.Array, requests.delivered).at[candidate].get(mode="fill", fill_value=0)
    is_new = state.progress.preemptions.at[candidate].get(mode="fill", fill_value=1) == 0
    return jnp.where(is_new, jnp.minimum(brought, known - 1), 0)


def _too_many_adapters(
    policy: Choices, requests: Requests, state: SchedulerState, candidate: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Whether the candidate's adapter would be one too many beside those that run."""
    none = -(2**31)
    running = jnp.sort(by_row(requests.adapters, state.row_request, none))
    is_other = (running != none) & jnp.concatenate([jnp.ones(1, jnp.bool), running[1:] != running[:-1]])
    wanted = requests.adapters[candidate]
    return ~jnp.any(running == wanted) & (jnp.sum(is_other, dtype=jnp.int32) >= policy.max_adapters)


def _next_waiting(
    memory: KVMemory[Any],
    policy: Choices,
    requests: Requests,
    state: SchedulerState,
    after: Int32[Array, ""],
) -> tuple[SchedulerState, Int32[Array, ""], Bool[Array, ""]]:
    """The next request in order that has arrived and waits, `requests.count` if there is none.

    Under `policy.overtake` the next one after another. Before all others come those whose group runs in part: it holds
    memory and cannot go on without them.

    Returns:
      The state, in which that nobody before waits may have become known; the request, and whether its group runs in
      part.
    """
    nobody = requests.count
    first = first_waiting(requests, state, state.first)
    state = dataclasses.replace(state, first=first)
    after = jnp.where(policy.overtake, after, -1)
    following = first_waiting(requests, state, jnp.maximum(first, after + 1))
    following = jnp.where(following < state.arrived, following, nobody)
    if policy.may("order", "shortest", "priority", "deadline"):
        by_key = (policy.order != 0) & (state.queued > 0)
        following = jax.lax.cond(by_key, lambda: least_waiting(policy, requests, state, after), lambda: following)
    if not (memory.can_fork and requests.samples > 1):
        return state, following, jnp.bool(False)
    leaders = by_row(requests.leaders, state.row_request, nobody)
    runs = jnp.zeros(nobody, jnp.bool).at[leaders].set(True, mode="drop")
    has_come = jnp.arange(nobody, dtype=jnp.int32) < state.arrived
    missing = (state.progress.status == Status.WAITING) & has_come & runs[requests.leaders]
    completes = jnp.any(missing)
    return state, jnp.where(completes, jnp.argmax(missing).astype(jnp.int32), following), completes


def _content(
    requests: Requests,
    transcripts: Int32[Array, "requests width"] | None,
    state: SchedulerState,
    candidate: Int32[Array, ""],
) -> Content | None:
    """What the candidate's keys and values depend on."""
    if transcripts is None:
        return None
    return Content(
        tokens=transcripts[candidate],
        adapter=requests.adapters[candidate],
        salt=requests.salts[candidate],
        priority=requests.priorities[candidate],
        resumed=state.progress.preemptions[candidate] > 0,
        lookup=jnp.bool(True),
    )


def _ask(
    memory: KVMemory[Any],
    policy: Choices,
    requests: Requests,
    state: SchedulerState,
    candidate: Int32[Array, ""],
    known: Int32[Array, ""],
    content: Content | None,
    moves: Moves | None,
) -> tuple[Any, Int32[Array, ""], Int32[Array, ""], Moves | None, Bool[Array, ""]]:
    """Asks memory to admit the candidate, to fork it from the one that computed its prompt, or to swap it in.

    What is parked on the host of a candidate that is never swapped in is discarded.

    Returns:
      The memory's state, the row and the `Outcome`; the blocks to copy back from the host; and whether it was a fork.
    """
    prompt = requests.prompt_lens[candidate]
    no_output = requests.output_lens[candidate] == 0
    too_long = prompt >= memory.max_len
    impossible = memory.max_len + 1  # longer than any sequence may be, so memory answers NEVER
    room = None
    if policy.may("reserve_output", True):
        predicted = jnp.minimum(prompt + requests.predicted_lens[candidate], memory.max_len) - 1
        # Room kept for one of a group could be what the others need to join it, and it waits for them.
        reserves = policy.reserve_output & ((requests.group_sizes[candidate] == 1) | (not memory.can_fork))
        room = jnp.where(reserves, jnp.maximum(known, predicted), known)
    ask = Ask(
        known_tokens=known,
        prompt_tokens=prompt,
        final_tokens=jnp.where(no_output | too_long, impossible, final_lengths(requests, memory.max_len, candidate)),
        content=content,
        sequences=requests.group_sizes[candidate] if memory.can_fork else 1,
        room_tokens=room,
    )
    forks = memory.can_fork and requests.samples > 1
    if not forks and moves is None:
        return *memory.admit(state.memory, ask), None, jnp.bool(False)

    together = by_row(requests.leaders, state.row_request, requests.count) == requests.leaders[candidate]
    # Of the loops below one runs once, or none does: then the candidate waits for its prompt.
    answer = (state.memory, jnp.int32(memory.rows), jnp.int32(Outcome.LATER))
    is_new = jnp.bool(True)
    if moves is not None:
        place = typing.cast(jax.Array, state.places)[candidate]
        is_new = place == memory.rows

        def come_back(carry: tuple) -> tuple:
            (memory_state, _, _), moves = carry
            memory_state, row, outcome, new = memory.swap_in(memory_state, place, ~jnp.any(together))
            # Whoever never comes back leaves the host too.
            ends = outcome == Outcome.NEVER
            memory_state = run_if(ends, lambda state: memory.discard(state, place)[0], memory_state)
            return (memory_state, row, outcome), join_moves(moves, new)

        answer, moves = run_if(~is_new, come_back, (answer, moves))
    if not forks:
        return *run_if(is_new, lambda carry: memory.admit(carry[0], ask), answer), moves, jnp.bool(False)

    # Whoever comes to others that run with the same prompt takes it from one of them, once that has it.
    stored = jnp.where(together, memory.seqs(state.memory).lengths, -1)
    parent = jnp.argmax(stored).astype(jnp.int32)
    follows = is_new & jnp.any(together)
    ready = follows & (stored[parent] >= prompt - 1)
    answer = run_if(ready, lambda carry: memory.fork(carry[0], parent, prompt - 1, known, content), answer)
    return *run_if(is_new & ~follows, lambda carry: memory.admit(carry[0], ask), answer), moves, ready


def _book(
    memory: KVMemory[Any],
    requests: Requests,
    state: SchedulerState,
    memory_state: Any,
    candidate: Int32[Array, ""],
    row: Int32[Array, ""],
    ends: Bool[Array, ""],
) -> SchedulerState:
    """Books the answer: the candidate runs in `row`, or has been refused, or waits on."""
    progress, nobody = state.progress, requests.count
    runs = row < memory.rows
    too_long = requests.prompt_lens[candidate] >= memory.max_len
    reason = jnp.where(too_long, Reason.REFUSED_TOO_LONG, Reason.REFUSED_NEVER_FITS)
    reason = jnp.where(requests.output_lens[candidate] == 0, Reason.NO_OUTPUT, reason)
    admitted_at = progress.admitted_at[candidate]
    at_end = jnp.where(ends, candidate, nobody)
    progress = dataclasses.replace(
        progress,
        status=progress.status.at[candidate].set(
            jnp.where(runs, Status.RUNNING, jnp.where(ends, Status.ENDED, Status.WAITING))
        ),
        reason=progress.reason.at[at_end].set(reason, mode="drop"),
        ended_at=progress.ended_at.at[at_end].set(state.clock, mode="drop"),
        admitted_at=progress.admitted_at.at[candidate].set(
            jnp.where(runs & (admitted_at < 0), state.clock, admitted_at)
        ),
    )
    places = state.places
    if places is not None:
        places = places.at[jnp.where(runs | ends, candidate, nobody)].set(memory.rows, mode="drop")
    return dataclasses.replace(
        state,
        memory=memory_state,
        progress=progress,
        row_request=state.row_request.at[row].set(candidate, mode="drop"),
        queued=state.queued - (runs | ends).astype(jnp.int32),
        places=places,
    )
