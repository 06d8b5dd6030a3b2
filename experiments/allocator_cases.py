"""The transitions that `allocator_bench` times, as scans, and the states that they start from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxkv.chain_hash import prefix_hashes
from paxkv.memory import Ask, content
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.paged_state import PagedState

VOCAB = 128_000


def started(memory: Paged, seed: int) -> PagedState:
    """All rows admitted, row r holding r mod block_size tokens, so that as many rows start a block in every step."""
    state = memory.init()
    one = jnp.int32(1)
    ask = Ask(one, one, one, content(jnp.zeros(memory.block_size, jnp.int32)) if memory.cache else None)
    admit = jax.jit(memory.admit)
    for _ in range(memory.rows):
        state, _, outcome = admit(state, ask)
        _require_ok(outcome, f"room for {memory.rows} rows")
    phases = jnp.arange(memory.rows, dtype=jnp.int32) % memory.block_size
    state, _ = jax.jit(memory.append, static_argnums=2)(state, phases, memory.block_size)
    if memory.cache:
        tokens = jax.random.randint(jax.random.key(seed), (memory.rows * memory.block_size,), 0, VOCAB, jnp.int32)
        cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(phases)])
        state = jax.jit(memory.publish, static_argnums=3)(state, tokens, cu_lens, memory.block_size)
    return state


def decode_scan(memory: Paged, steps: int) -> Callable[[PagedState], PagedState]:
    """A compiled scan of `steps` decode steps. Donates its argument."""

    def one(state: PagedState, _: None) -> tuple[PagedState, None]:
        return memory.append(state, jnp.ones(memory.rows, jnp.int32), 1)[0], None

    return jax.jit(lambda state: jax.lax.scan(one, state, length=steps)[0], donate_argnums=0)


def decode_cached_scan(memory: Paged, steps: int) -> Callable[[PagedState], PagedState]:
    """The same with a prefix cache: other tokens in every row and step are hashed, and full blocks published."""
    row = jnp.arange(memory.rows, dtype=jnp.int32)

    def one(state: PagedState, step: jax.Array) -> tuple[PagedState, None]:
        state, _ = memory.append(state, jnp.ones(memory.rows, jnp.int32), 1)
        tokens = (row * 7919 + step * 104_729) % VOCAB
        return memory.publish(state, tokens, jnp.arange(memory.rows + 1, dtype=jnp.int32), 1), None

    counted = jnp.arange(steps, dtype=jnp.int32)
    return jax.jit(lambda state: jax.lax.scan(one, state, counted)[0], donate_argnums=0)


def cached_prompts(memory: Paged, tokens: jax.Array) -> tuple[PagedState, PagedState]:
    """Every prompt stored in a row of its own and published, and the same when all rows were released.

    Args:
      memory: with a prefix cache, and a row for each prompt.
      tokens: i32[prompts, prompt_tokens].
    """
    state, length = memory.init(), tokens.shape[1]
    admit, publish = jax.jit(memory.admit), jax.jit(memory.publish, static_argnums=3)
    append = jax.jit(memory.append, static_argnums=2)
    row = jnp.arange(memory.rows, dtype=jnp.int32)
    for i, prompt in enumerate(tokens):
        state, _, outcome = admit(state, _ask(prompt))
        _require_ok(outcome, f"room for {len(tokens)} prompts")
        state, outcome = append(state, jnp.where(row == i, length, 0), length)
        _require_ok(outcome, f"blocks for {len(tokens)} prompts")
        cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.where(row == i, length, 0))])
        state = publish(state, prompt, cu_lens, length)
    return state, jax.jit(memory.release)(state, row < len(tokens))


def admit_scan(memory: Paged, tokens: jax.Array) -> Callable[[PagedState], PagedState]:
    """A compiled scan that admits each of these prompts, hashing included. Donates its argument."""

    def one(state: PagedState, prompt: jax.Array) -> tuple[PagedState, None]:
        return memory.admit(state, _ask(prompt))[0], None

    return jax.jit(lambda state: jax.lax.scan(one, state, tokens)[0], donate_argnums=0)


def free_scan(memory: Paged, count: int) -> Callable[[PagedState], PagedState]:
    """A compiled scan that releases the first `count` rows, one after another. Donates its argument."""
    row = jnp.arange(memory.rows, dtype=jnp.int32)

    def one(state: PagedState, at: jax.Array) -> tuple[PagedState, None]:
        return memory.release(state, row == at), None

    return jax.jit(lambda state: jax.lax.scan(one, state, row[:count])[0], donate_argnums=0)


def hash_scan(tokens: jax.Array, block_size: int, count: int) -> Callable[[jax.Array], jax.Array]:
    """A compiled scan that hashes a prompt at every block `count` times, each time with other tokens."""

    def one(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return prefix_hashes(tokens + step, seed, block_size)[-1], None

    counted = jnp.arange(count, dtype=jnp.int32)
    return jax.jit(lambda seed: jax.lax.scan(one, seed, counted)[0])


def _ask(prompt: jax.Array) -> Ask:
    length = jnp.int32(prompt.shape[0])
    return Ask(length, length, length, content(prompt))


def _require_ok(outcome: Any, expected: str) -> None:
    if int(outcome) != Outcome.OK:
        raise RuntimeError(f"expected {expected}, got {Outcome(int(outcome)).name}")
