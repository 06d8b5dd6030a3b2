"""Prompts through the block manager, one after another, in one compiled scan."""

import dataclasses
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Int32

from experiments.prefix_prompts import Prompts
from paxkv.block_pool import retain
from paxkv.block_tables import blocks_for
from paxkv.cache_stats import MISS_REASONS, CacheStats
from paxkv.memory import Ask, Content
from paxkv.outcomes import Outcome, raise_on_fault
from paxkv.paged import Paged, PagedState

_NOBODY = 2**31 - 1


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Prompt:
    """One prompt; all of them with a leading axis."""

    ids: jax.Array  # i32[pieces]
    length: jax.Array  # i32[]
    known_tokens: jax.Array  # i32[]
    priority: jax.Array  # i32[]
    number: jax.Array  # i32[]; its place in the sequence


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """The memory, and which prompt holds each of its rows."""

    state: PagedState
    holder: jax.Array  # i32[rows]; number of the prompt, 2**31 - 1 for a free row


class Replayed(NamedTuple):
    """What came of a sequence of prompts."""

    frame: pl.DataFrame  # a row a prompt
    shared_blocks: int  # blocks that more than one prompt holds at the end
    most_sharers: int  # prompts that hold the same block at the end


def replay(
    memory: Paged, prompts: Prompts, known_tokens: Int32[np.ndarray, " prompts"], chunk_tokens: int, num_blocks: int
) -> Replayed:
    """Admits one prompt after another, stores and publishes it, and holds it until its row or room is needed.

    Args:
      memory: with a prefix cache, and as many rows as prompts are held at a time. The oldest makes way for the next.
      prompts: what is asked.
      known_tokens: what each prompt asks room for, at least its length; what is above that is not stored.
      chunk_tokens: tokens stored and published in one call.
      num_blocks: blocks of the memory that are in use, at most all. One compiled program serves every such size.

    Returns:
      A row a prompt: `tokens`, `hit_tokens` of them found in the cache, `evictions` of cached blocks it caused, and,
      once it is stored, `held_blocks` by all prompts and `unshared_blocks` that they would hold without sharing. If
      the memory explains misses, also `missed_<reason>` for each of `cache_stats.MISS_REASONS`, in tokens.

    Raises:
      ValueError: a prompt cannot fit, whatever is released.
      MemoryFaultError: the manager recorded a fault.
    """
    carry, columns = _scan(
        memory,
        prompts.unit,
        chunk_tokens,
        _Prompt(
            ids=jnp.asarray(prompts.ids),
            length=jnp.asarray(prompts.lengths),
            known_tokens=jnp.asarray(known_tokens),
            priority=jnp.asarray(prompts.priorities),
            number=jnp.arange(len(prompts), dtype=jnp.int32),
        ),
        _Carry(_begin(memory, num_blocks), jnp.full(memory.rows, _NOBODY, jnp.int32)),
    )
    outcomes = np.asarray(columns.pop("outcome"))
    if (outcomes != Outcome.OK).any():
        first = int(np.argmax(outcomes != Outcome.OK))
        raise ValueError(
            f"prompt {first}: expected room for its {known_tokens[first]} tokens in a cache of {num_blocks} "
            f"blocks of {memory.block_size}, got {Outcome(outcomes[first]).name}; raise cache_tokens"
        )
    raise_on_fault(carry.state.seqs.faults)
    references = np.asarray(carry.state.pool.ref_counts)
    return Replayed(
        frame=pl.DataFrame({name: np.asarray(column) for name, column in columns.items()}),
        shared_blocks=int((references > 1).sum()),
        most_sharers=int(references.max()),
    )


def _begin(memory: Paged, num_blocks: int) -> PagedState:
    """The empty memory, all but `num_blocks` blocks set aside. Not in the program, which XLA would fold it into."""
    state = memory.init()
    every = jnp.arange(memory.num_blocks, dtype=jnp.int32)
    set_aside = jnp.where(every < num_blocks, memory.num_blocks, every)
    return dataclasses.replace(state, pool=retain(state.pool, set_aside))


@jax.jit(static_argnames=("memory", "unit", "chunk_tokens"), donate_argnames="carry")
def _scan(
    memory: Paged, unit: int, chunk_tokens: int, prompts: _Prompt, carry: _Carry
) -> tuple[_Carry, dict[str, Int32[Array, " prompts"]]]:
    num_blocks = carry.state.pool.num_free  # nothing is held yet

    def one(carry: _Carry, prompt: _Prompt) -> tuple[_Carry, dict[str, Array]]:
        before = _stats(carry.state)
        carry, row, outcome = _admit(memory, unit, carry, prompt)
        hit_tokens = carry.state.seqs.lengths.at[row].get(mode="fill", fill_value=0)
        state = _store(memory, unit, chunk_tokens, carry.state, row, prompt)
        after = _stats(state)
        columns = {
            "tokens": prompt.length,
            "hit_tokens": jnp.minimum(hit_tokens, prompt.length),
            "evictions": after.evictions - before.evictions,
            "held_blocks": num_blocks - state.pool.num_free,
            "unshared_blocks": jnp.sum(blocks_for(state.seqs.lengths, memory.block_size)),
            "outcome": outcome,
        }
        if memory.cache is not None and memory.cache.explain:
            columns |= _missed(before, after)
        return dataclasses.replace(carry, state=state), columns

    return jax.lax.scan(one, carry, prompts)


def _admit(
    memory: Paged, unit: int, carry: _Carry, prompt: _Prompt
) -> tuple[_Carry, Int32[Array, ""], Int32[Array, ""]]:
    """Asks for a row; while the answer is LATER, the oldest prompt is released and it is asked again."""
    ask = Ask(
        known_tokens=prompt.known_tokens,
        prompt_tokens=prompt.known_tokens,
        final_tokens=prompt.known_tokens,
        content=Content(
            tokens=_tokens(prompt, unit, jnp.arange(memory.max_len, dtype=jnp.int32)),
            adapter=jnp.int32(0),
            salt=jnp.int32(0),
            resumed=jnp.bool(False),
            lookup=jnp.bool(True),
            priority=prompt.priority,
        ),
    )

    def refused(attempt: tuple[_Carry, Array, Array, Array]) -> Array:
        carry, _, outcome, first = attempt
        return first | ((outcome == Outcome.LATER) & jnp.any(carry.state.seqs.active))

    def again(attempt: tuple[_Carry, Array, Array, Array]) -> tuple[_Carry, Array, Array, Array]:
        carry, _, _, first = attempt
        oldest = (jnp.arange(memory.rows) == jnp.argmin(carry.holder)) & ~first
        state = memory.release(carry.state, oldest)
        state, row, outcome = memory.admit(state, ask)
        holder = jnp.where(oldest, _NOBODY, carry.holder).at[row].set(prompt.number, mode="drop")
        return _Carry(state, holder), row, outcome, jnp.bool(False)

    nothing = (carry, jnp.int32(memory.rows), jnp.int32(Outcome.LATER), jnp.bool(True))
    carry, row, outcome, _ = jax.lax.while_loop(refused, again, nothing)
    return carry, row, outcome


def _store(
    memory: Paged, unit: int, chunk_tokens: int, state: PagedState, row: Int32[Array, ""], prompt: _Prompt
) -> PagedState:
    """Appends and publishes what the row does not have yet, a chunk at a time; nothing for the row that is none."""

    def stored(state: PagedState) -> Array:
        return state.seqs.lengths.at[row].get(mode="fill", fill_value=_NOBODY)

    def chunk(state: PagedState) -> PagedState:
        first = stored(state)
        count = jnp.minimum(prompt.length - first, chunk_tokens)
        state, _ = memory.append(state, jnp.zeros(memory.rows, jnp.int32).at[row].set(count), chunk_tokens)
        tokens = _tokens(prompt, unit, first + jnp.arange(chunk_tokens, dtype=jnp.int32))
        return memory.publish(state, tokens, jnp.where(jnp.arange(memory.rows + 1) > row, count, 0), chunk_tokens)

    # A refused append would not get on; its fault is told on the host.
    return jax.lax.while_loop(
        lambda state: (stored(state) < prompt.length) & (state.seqs.faults.word == 0), chunk, state
    )


def _missed(before: CacheStats, after: CacheStats) -> dict[str, Int32[Array, ""]]:
    """Tokens that were not hit between two readings, by the reason why."""
    missed = {f"missed_{name}": getattr(after, name) - getattr(before, name) for name in MISS_REASONS}
    # All prompts have one adapter and salt: what was cached for others was cached for them, and evicted so long ago
    # that the smaller of the two memories of it was overwritten.
    missed["missed_evicted"] += missed["missed_other_key"]
    return missed | {"missed_other_key": jnp.zeros_like(missed["missed_other_key"])}


def _stats(state: PagedState) -> CacheStats:
    return typing.cast(CacheStats, state.stats)


def _tokens(prompt: _Prompt, unit: int, position: Int32[Array, " tokens"]) -> Int32[Array, " tokens"]:
    """The tokens of a prompt at the given positions; what lies after its end is never stored."""
    return prompt.ids.at[position // unit].get(mode="fill", fill_value=0) * unit + position % unit
