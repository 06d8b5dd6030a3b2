"""Text from a model, token by token, its keys and values in paged memory.

The prompt is computed in one ragged chunk, padded so that prompts of similar length share a program; then one token a
step. The model runs outside `jit`, so that each kind of layer is compiled once and a model of thirty layers starts as
fast as one of two.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Key

from models.config import Dtype
from models.decoder import Decoder, Params, make_decode
from paxkv.forward import Reader, begin, extend
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import KVCache
from paxkv.kv_format import KVFormat, scheme
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.sampling import sample

BLOCK_SIZE = 16
_SMALLEST_CHUNK = 16  # tokens of a prompt that are computed at once; chunks double from here
_PLAIN: Mapping[Dtype, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


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
        kv_format: KVFormat | None = None,
    ) -> None:
        """Checks the request.

        Args:
          model: the decoder.
          prompt: token ids.
          max_tokens: most new tokens.
          eos: ids that end the text; they are not given out.
          temperature: 0 for the best token each time.
          seed: of the draws.
          kv_format: in which keys and values are kept; None for that of the activations.

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
        self._temperature, self._key = temperature, jax.random.key(seed)
        self._kv_format = kv_format or scheme(_PLAIN[config.dtype])
        self.speed = Speed(len(prompt), 0.0, 0, 0.0)

    def __iter__(self) -> Iterator[int]:
        """The new tokens, each as soon as it is known."""
        config, most = self._model.config, len(self._prompt) + self._max_tokens
        # The padding of the prompt takes no slots; the chunk that it fills is a bound all the same.
        blocks = -(-max(most, _chunk(len(self._prompt))) // BLOCK_SIZE)
        memory = Paged(rows=1, max_len=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE, num_blocks=blocks)
        cache = init_kv_cache(
            config.layers,
            memory.num_slots,
            config.kv_heads,
            config.head_dim,
            self._kv_format,
            block_size=BLOCK_SIZE,
        )
        decode, params = make_decode(self._model)
        reader = Reader(memory, decode, self._kv_format)

        began = time.perf_counter()
        state, _, outcome = begin(reader, memory.init(), 0, most)
        _require_ok(outcome)
        token, state, cache = self._extend(reader, params, state, cache, self._prompt)
        self.speed = Speed(len(self._prompt), time.perf_counter() - began, 1, 0.0)
        while token not in self._eos:
            yield token
            if self.speed.new_tokens == self._max_tokens:
                return
            began = time.perf_counter()
            token, state, cache = self._extend(reader, params, state, cache, [token])
            seconds = self.speed.decode_seconds + time.perf_counter() - began
            self.speed = dataclasses.replace(self.speed, new_tokens=self.speed.new_tokens + 1, decode_seconds=seconds)

    def _extend(self, reader: Reader, params: Params, state: Any, cache: KVCache, tokens: Sequence[int]) -> tuple:
        """Computes tokens behind what is stored, and draws the next."""
        padded = np.zeros(_chunk(len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        state, cache, logits, outcome = extend(
            reader,
            params,
            state,
            cache,
            jnp.asarray(padded),
            jnp.asarray([len(tokens)], jnp.int32),
            jnp.asarray([len(tokens) - 1], jnp.int32),
            max_q_len=len(padded),
        )
        _require_ok(outcome)
        drawn = jnp.int32(self.speed.new_tokens)
        token = _draw(logits, jnp.float32(self._temperature), self._key, drawn)
        return int(token[0]), state, cache


def _chunk(tokens: int) -> int:
    """Tokens that a step is compiled for: one, or a power of two."""
    return 1 if tokens == 1 else max(_SMALLEST_CHUNK, 1 << (tokens - 1).bit_length())


def _require_ok(outcome: jax.Array) -> None:
    if outcome != Outcome.OK:
        raise RuntimeError(f"a memory made for one request refused it: {Outcome(int(outcome)).name}")


@jax.jit
def _draw(
    logits: Float32[Array, "one vocab"],
    temperature: Float32[Array, ""],
    key: Key[Array, ""],
    drawn: Int32[Array, ""],
) -> Int32[Array, " one"]:
    return sample(logits, temperature[None], jax.random.fold_in(key, drawn)[None])[0]
