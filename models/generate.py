"""Continues a text token by token, through the same paged memory that the engine serves from."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key

from models.decoder import Decode, Params
from paxkv.forward import Reader, begin, extend
from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import KVFormat
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.sampling import sample
from paxkv.sizes import require_int

SMALLEST = 16  # tokens that a prompt is padded to


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Raises:
      ValueError: a number is out of range.
    """

    max_tokens: int = 64  # to add
    temperature: float = 0.0  # 0 takes the best token each time
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if not 0 <= require_int("seed", self.seed, minimum=0) < 2**32:
            raise ValueError(f"seed: expected less than 2**32, got {self.seed}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")


def generate(
    decode: Decode,
    params: Params,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    kv_format: KVFormat,
    block_size: int = 16,
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is known. Nothing ends them but their number.

    The prompt is computed in one step, in a batch of a power of two of tokens, so that prompts of most lengths share
    compiled programs; then every step computes one token.

    Args:
      decode: the model.
      params: its weights.
      prompt: token ids, at least one.
      sampling: how many tokens, and how they are chosen.
      kv_format: of the cache.
      block_size: tokens in a block of the memory.

    Raises:
      ValueError: the prompt is empty, has ids that the model lacks, or is too long together with what is to follow;
        `block_size` is not positive, or what the model says is NaN.
    """
    require_int("block_size", block_size)
    config = decode.config
    length, end = len(prompt), len(prompt) + sampling.max_tokens
    if not prompt:
        raise ValueError("prompt: expected at least one token, got none")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab:
        raise ValueError(f"prompt: expected ids from 0 to {config.vocab - 1}, got {min(prompt)} to {max(prompt)}")
    if end > config.max_len:
        raise ValueError(
            f"max_tokens: expected at most {config.max_len - length} behind a prompt of {length} tokens, as the model "
            f"reads {config.max_len}, got {sampling.max_tokens}"
        )
    max_len = _padded(end)
    memory = Paged(rows=1, max_len=max_len, block_size=block_size, num_blocks=-(-max_len // block_size))
    shape = (config.layers, memory.num_slots, config.kv_heads, config.head_dim)
    cache = init_kv_cache(*shape, kv_format, block_size=block_size, rows=memory.rows)
    reader = Reader(memory, decode, kv_format)
    state, _, outcome = begin(reader, memory.init(), length, end)
    _require_ok(outcome)

    tokens = jnp.asarray(np.pad(np.asarray(prompt, np.int32), (0, _padded(length) - length)))
    new_tokens, last = jnp.full(1, length, jnp.int32), jnp.full(1, length - 1, jnp.int32)
    one, first = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    key, temperature = jax.random.key(sampling.seed), jnp.full(1, sampling.temperature, jnp.float32)
    for _ in range(sampling.max_tokens):
        state, cache, logits, outcome = extend(
            reader, params, state, cache, tokens, new_tokens, last, max_q_len=tokens.shape[0]
        )
        _require_ok(outcome)
        tokens, key, is_nan = _choose(logits, temperature, key)
        if bool(is_nan):
            raise ValueError(
                f"logits: expected numbers, got NaN; a weight is NaN, or the dtype {config.dtype} or the format "
                f"{kv_format.name} of keys and values cannot hold this model's numbers: try float32 and f32"
            )
        new_tokens, last = one, first
        yield int(tokens[0])


@jax.jit
def _choose(
    logits: Float32[Array, "rows vocab"], temperatures: Float32[Array, " rows"], key: Key[Array, ""]
) -> tuple[Int32[Array, " rows"], Key[Array, ""], Bool[Array, ""]]:
    key, *keys = jax.random.split(key, logits.shape[0] + 1)
    tokens, _ = sample(logits, temperatures, jnp.stack(keys))
    return tokens, key, jnp.any(jnp.isnan(logits))


def _padded(tokens: int) -> int:
    return max(SMALLEST, 1 << (tokens - 1).bit_length())


def _require_ok(outcome: Int32[Array, ""]) -> None:
    """The memory is as large as the sequence, so that anything else is a defect of ours."""
    if int(outcome) != Outcome.OK:
        raise RuntimeError(f"memory: expected room for the whole sequence, got {Outcome(int(outcome)).name}")
