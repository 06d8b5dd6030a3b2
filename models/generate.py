"""Text from a model, token by token, its keys and values in paged memory.

The prompt is computed in one ragged chunk, padded so that prompts of similar length share a program; then one token a
step. The model runs outside `jit`, so that each kind of layer is compiled once and a model of thirty layers starts as
fast as one of two.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key

from models.decoder import Decoder
from paxkv.attend import MemoryAttend
from paxkv.kv_cache import KVCache, init_kv_cache
from paxkv.memory import Ask
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.paged_state import PagedState
from paxkv.ragged import ragged
from paxkv.sampling import sample

BLOCK_SIZE = 16
_SMALLEST_CHUNK = 16  # tokens; chunks double from here


@dataclasses.dataclass(frozen=True)
class Speed:
    """How long a text took; compiling is part of the prompt's time, and of the first token's."""

    prompt_tokens: int
    prefill_seconds: float
    new_tokens: int
    decode_seconds: float  # of all new tokens but the first, which the prefill gave

    @property
    def prefill_per_second(self) -> float:
        """Tokens of the prompt per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """New tokens per second, without the first."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Generation:
    """Iterates over the new tokens of one prompt; `speed` is known at any time."""

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        eos: Sequence[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        """Checks the request.

        Args:
          model: the decoder.
          prompt: token ids.
          max_tokens: most new tokens.
          eos: ids that end the text; they are not given out.
          temperature: 0 for the best token each time.
          seed: of the draws.
          backend: of attention and cache writes.

        Raises:
          ValueError: The prompt is empty, has ids outside the vocabulary, or is too long for the model.
        """
        config = model.config
        if not prompt or not all(0 <= token < config.vocab for token in prompt):
            raise ValueError(f"prompt: expected at least one id, each in [0, {config.vocab}), got {list(prompt)[:8]}")
        if max_tokens < 1 or len(prompt) + max_tokens > config.max_len:
            raise ValueError(
                f"max_tokens: expected at least 1 and, with a prompt of {len(prompt)}, at most "
                f"{config.max_len - len(prompt)}, as the model reads {config.max_len} tokens, got {max_tokens}"
            )
        if not temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {temperature}")
        self._model, self._prompt, self._eos, self._max_tokens = model, list(prompt), frozenset(eos), max_tokens
        self._temperature, self._key, self._backend = temperature, jax.random.key(seed), backend
        self.speed = Speed(len(prompt), 0.0, 0, 0.0)

    def __iter__(self) -> Iterator[int]:
        """The new tokens, each as soon as it is known."""
        config, prompt = self._model.config, self._prompt
        most = len(prompt) + self._max_tokens
        chunk = _SMALLEST_CHUNK
        while chunk < len(prompt):
            chunk *= 2
        blocks = -(-max(most, chunk) // BLOCK_SIZE)
        memory = Paged(rows=1, max_len=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE, num_blocks=blocks)
        cache = init_kv_cache(
            config.layers, memory.num_slots, config.kv_heads, config.head_dim, jnp.dtype(config.dtype)
        )
        began = time.perf_counter()
        state, _, outcome = memory.admit(memory.init(), Ask(jnp.int32(0), jnp.int32(len(prompt)), jnp.int32(most)))
        if outcome != Outcome.OK:
            raise RuntimeError(f"a memory made for {most} tokens refused them: {Outcome(int(outcome)).name}")
        padded = jnp.asarray([*prompt, *[0] * (chunk - len(prompt))], jnp.int32)
        token, state, cache = self._step(memory, state, cache, padded, len(prompt), 0)
        for count in range(1, self._max_tokens + 1):
            now = time.perf_counter()
            if count == 1:
                self.speed = Speed(len(prompt), now - began, 1, 0.0)
                began = now
            else:
                self.speed = dataclasses.replace(self.speed, new_tokens=count, decode_seconds=now - began)
            if int(token[0]) in self._eos:
                return
            yield int(token[0])
            if count < self._max_tokens:
                token, state, cache = self._step(memory, state, cache, token, 1, count)

    def _step(
        self,
        memory: Paged,
        state: PagedState,
        cache: KVCache,
        tokens: Int32[Array, " tokens"],
        count: int,
        drawn: int,
    ) -> tuple[Int32[Array, " one"], PagedState, KVCache]:
        """Computes the first `count` of `tokens` behind what is stored, and draws the next."""
        state, attend, positions = _make_room(memory, state, jnp.int32(count), tokens.size, self._backend)
        select = jnp.asarray([count - 1], jnp.int32)
        logits, cache = self._model(tokens, positions, select, cache, attend)
        token = _draw(logits, jnp.float32(self._temperature), self._key, jnp.int32(drawn))
        return jax.block_until_ready(token), state, cache


@jax.jit(static_argnames=("memory", "size", "backend"))
def _make_room(
    memory: Paged, state: PagedState, count: Int32[Array, ""], size: int, backend: str | None
) -> tuple[PagedState, MemoryAttend, Int32[Array, " tokens"]]:
    starts = memory.seqs(state).lengths
    state, _ = memory.append(state, count[None], size)
    batch = ragged(starts, count[None], size)
    slots = memory.slots(state, batch.row, batch.position)
    return state, MemoryAttend(state, slots, batch.cu_lens, memory, size, backend), batch.position


@jax.jit
def _draw(
    logits: Float32[Array, "one vocab"],
    temperature: Float32[Array, ""],
    key: Key[Array, ""],
    drawn: Int32[Array, ""],
) -> Int32[Array, " one"]:
    return sample(logits, temperature[None], jax.random.fold_in(key, drawn)[None])[0]
