"""Handing the tokens of a step to memory, so that it can share what is equal."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.control_flow import run_if
from paxkv.memory import KVMemory
from paxkv.ragged import ragged, tokens_of
from paxkv.scheduler_state import SchedulerState


def publish_granted(
    memory: KVMemory[Any],
    transcripts: Int32[Array, "requests width"] | None,
    state: SchedulerState,
    starts: Int32[Array, " rows"],
    granted: Int32[Array, " rows"],
    max_new_tokens: int,
) -> SchedulerState:
    """Publishes the tokens that each row was granted in this step.

    Args:
      memory: the memory.
      transcripts: prompt and output so far of each request.
      state: the state; its rows have stored what they were granted.
      starts: tokens that each row had stored before.
      granted: tokens that it stored since.
      max_new_tokens: most tokens of all rows together.

    Raises:
      ValueError: memory shares what is equal, and there are no transcripts.
    """
    if memory.publishes is None:
        return state
    if transcripts is None:
        raise ValueError("transcripts: expected the tokens of all requests, as memory has a prefix cache, got None")

    def publish(memory_state: Any, num_tokens: int, most: int) -> Any:
        batch = ragged(starts, granted, num_tokens)
        tokens = tokens_of(transcripts, state.row_request, batch)
        return memory.publish(memory_state, tokens, batch.cu_lens, most)

    longest = jnp.max(granted)
    memory_state = run_if(longest == 1, lambda m: publish(m, memory.rows, 1), state.memory)
    memory_state = run_if(longest > 1, lambda m: publish(m, max_new_tokens, max_new_tokens), memory_state)
    return dataclasses.replace(state, memory=memory_state)
