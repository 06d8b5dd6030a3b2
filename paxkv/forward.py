"""Reading tokens through a memory outside of the engine: texts that are given, or one request after another.

The engine compiles a whole step, scheduling included. Here the model is called as it is, so that its layers, which are
compiled one by one and shared, take seconds for a model whose whole step would take minutes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from paxkv.attend import MemoryAttend, check_groups, check_rows, slots_by_group
from paxkv.kv_cache import KVCache
from paxkv.kv_format import KVFormat
from paxkv.memory import Ask, Content, KVMemory
from paxkv.ragged import Ragged, ragged


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model over a memory: everything that does not change between calls."""

    memory: KVMemory[Any]
    decode: Any  # see `paxkv.engine.Decode`
    kv_format: KVFormat
    backend: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses a format that the memory's rows or groups of layers cannot have."""
        check_rows(self.kv_format, self.memory)
        check_groups(self.kv_format, self.memory)


def begin(
    reader: Reader, state: Any, known_tokens: int, final_tokens: int, content: Content | None = None
) -> tuple[Any, Int32[Array, ""], Int32[Array, ""]]:
    """Lets in a sequence.

    Args:
      reader: model and memory.
      state: of the memory.
      known_tokens: that are there to be computed.
      final_tokens: that it will have stored when it ends.
      content: needed by memories with a prefix cache. The row then begins with the tokens that were hit.

    Returns:
      The memory's state, the row (`rows` if none) and the `Outcome`.
    """
    ask = Ask(jnp.int32(known_tokens), jnp.int32(known_tokens), jnp.int32(final_tokens), content)
    return _admit(reader.memory, state, ask)


def extend(
    reader: Reader,
    params: Any,
    state: Any,
    cache: KVCache,
    tokens: Int32[Array, " tokens"],
    new_tokens: Int32[Array, " rows"],
    select: Int32[Array, " selected"],
    *,
    max_q_len: int,
) -> tuple[Any, KVCache, Float32[Array, "selected vocab"], Int32[Array, ""]]:
    """Computes new tokens of each row behind what it has stored.

    Args:
      reader: model and memory.
      params: weights of the model.
      state: of the memory.
      cache: keys and values so far. Taken over.
      tokens: the new ones, row after row.
      new_tokens: how many of them each row has.
      select: which of `tokens` the logits of the next one are wanted for.
      max_q_len: most new tokens of a row. Static.

    Returns:
      The memory's state, the cache, the logits, and the `Outcome`; unless it is `OK` the logits mean nothing.
    """
    state, batch, slots, outcome = _make_room(reader.memory, state, new_tokens, tokens.shape[0], max_q_len)
    attend = MemoryAttend(state, slots, batch.cu_lens, reader.memory, reader.kv_format, max_q_len, reader.backend)
    logits, cache = reader.decode(params, tokens, batch.position, select, cache, attend)
    return state, cache, logits, outcome


@jax.jit(static_argnames="memory")
def _admit(memory: KVMemory[Any], state: Any, ask: Ask) -> tuple[Any, Int32[Array, ""], Int32[Array, ""]]:
    return memory.admit(state, ask)


@jax.jit(static_argnames=("memory", "num_tokens", "max_q_len"))
def _make_room(
    memory: KVMemory[Any], state: Any, new_tokens: Int32[Array, " rows"], num_tokens: int, max_q_len: int
) -> tuple[Any, Ragged, tuple[Int32[Array, " tokens"], ...], Int32[Array, ""]]:
    state = memory.background(state)  # what the last call stored is computed
    starts = memory.seqs(state).lengths
    state, outcome = memory.append(state, new_tokens, max_q_len)
    batch = ragged(starts, new_tokens, num_tokens)
    return state, batch, slots_by_group(memory, state, batch), outcome
