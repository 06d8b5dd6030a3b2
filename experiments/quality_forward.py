"""A text read by a model whose keys and values lie in a paged memory: blocks, tables, scales, as in a server.

The text is given, not generated, so that every way of storing is judged on the same tokens. It is read in chunks: what
a chunk attends to was stored before, its own tokens included, and is read back in the format under test.
"""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from models.decoder import Decode, Params
from paxkv import forward
from paxkv.calibration import Calibration
from paxkv.init_cache import clipped_values, init_kv_cache
from paxkv.kv_cache import Attend, AttentionSpec, KVCache, LayerAttend, LayerCache
from paxkv.kv_format import KVFormat
from paxkv.outcomes import Outcome
from paxkv.paged import Paged


class Subject(NamedTuple):
    """A model and how it reads: one sequence after another, each into an empty memory."""

    decode: Decode
    params: Params
    block_size: int = 16
    chunk_tokens: int = 256  # computed in one call; must divide the length of what is read
    backend: str | None = None  # of the attention kernels


class Read(NamedTuple):
    """What came of reading a text."""

    logits: Float32[Array, "tokens vocab"]
    clipped: int  # values that were clipped when they were stored


def read(
    subject: Subject, tokens: Int32[np.ndarray, " tokens"], fmt: KVFormat, calibration: Calibration | None = None
) -> Read:
    """Logits after every token of one sequence, keys and values stored in a format.

    Args:
      subject: the model.
      tokens: the sequence, from its beginning.
      fmt: how keys and values are stored.
      calibration: where static scales come from; needed if the format has any.

    Raises:
      ValueError: the chunks do not divide the sequence.
    """
    cache = _empty_cache(subject, len(tokens), fmt, calibration)
    logits, cache = _read(subject, subject.decode, tokens, fmt, cache)
    return Read(logits, clipped_values(cache))


def attention_errors(
    subject: Subject,
    tokens: Int32[np.ndarray, " tokens"],
    fmt: KVFormat,
    reference: KVFormat,
    calibration: Calibration | None = None,
) -> list[float]:
    """What a format does to the output of each layer's attention by itself: relative L2 error over one sequence.

    Every layer is given what it would get without the format, so that errors of earlier layers do not add up.
    """
    judged = _empty_cache(subject, len(tokens), fmt, calibration)
    sound = _empty_cache(subject, len(tokens), reference, calibration)
    pairs = zip(judged.layers, sound.layers, strict=True)
    cache = KVCache(tuple(_Judged(c.k, c.v, c.clipped, r, jnp.float32(0), jnp.float32(0)) for c, r in pairs if c and r))
    _, cache = _read(subject, _JudgingDecode(subject.decode, reference), tokens, fmt, cache)
    return [float(jnp.sqrt(layer.difference / layer.size)) for layer in cache.layers if isinstance(layer, _Judged)]


def _memory(subject: Subject, context: int) -> Paged:
    """Room for one sequence."""
    return Paged(1, context, subject.block_size, -(-context // subject.block_size))


def _empty_cache(subject: Subject, context: int, fmt: KVFormat, calibration: Calibration | None) -> KVCache:
    config, memory = subject.decode.config, _memory(subject, context)
    return init_kv_cache(
        config.layers,
        memory.num_slots,
        config.kv_heads,
        config.head_dim,
        fmt,
        block_size=subject.block_size,
        rows=memory.rows,
        calibration=calibration,
    )


def _read(
    subject: Subject, decode: Any, tokens: Int32[np.ndarray, " tokens"], fmt: KVFormat, cache: KVCache
) -> tuple[Float32[Array, "tokens vocab"], KVCache]:
    context, chunk = len(tokens), min(subject.chunk_tokens, len(tokens))
    if context % chunk:
        raise ValueError(f"chunk_tokens: expected a divisor of the {context} tokens that are read, got {chunk}")
    memory = _memory(subject, context)
    reader = forward.Reader(memory, decode, fmt, subject.backend)
    state, _, outcome = forward.begin(reader, memory.init(), context, context)
    every, counts = jnp.arange(chunk, dtype=jnp.int32), jnp.full(1, chunk, jnp.int32)
    parts, outcomes = [], [outcome]
    for first in range(0, context, chunk):
        new = jnp.asarray(tokens[first : first + chunk])
        state, cache, logits, outcome = forward.extend(
            reader, subject.params, state, cache, new, counts, every, max_q_len=chunk
        )
        parts.append(logits)
        outcomes.append(outcome)
    if any(int(outcome) != Outcome.OK for outcome in outcomes):
        raise RuntimeError(f"a memory of {context} slots had no room for {context} tokens")
    return jnp.concatenate(parts), cache


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Judged(LayerCache):
    """Keys and values in the format under test and in the reference's, and how far apart the attentions were."""

    reference: LayerCache
    difference: jax.Array  # f32[]; sum of squares of all outputs' differences
    size: jax.Array  # f32[]; sum of squares of the reference's outputs


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Judge:
    """Attends both ways and hands on what the reference gives, so that each layer is judged on sound inputs."""

    judged: Any  # MemoryAttend
    reference: Any  # MemoryAttend

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        judged, place = self.judged.of_layer(layer)
        return _Judge(judged, self.reference.of_layer(layer)[0]), place

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """See `LayerAttend`."""
        if not isinstance(cache, _Judged):
            raise ValueError(f"cache: expected one that is read in two ways, got {type(cache).__name__}")
        out, stored = self.judged(q, k, v, cache, spec)
        sound, reference = self.reference(q, k, v, cache.reference, spec)
        difference = cache.difference + jnp.sum(jnp.square(out - sound), dtype=jnp.float32)
        size = cache.size + jnp.sum(jnp.square(sound), dtype=jnp.float32)
        return sound, _Judged(stored.k, stored.v, stored.clipped, reference, difference, size)


@dataclasses.dataclass(frozen=True)
class _JudgingDecode:
    """A model whose layers are judged; see `_Judge`."""

    decode: Decode
    reference: KVFormat

    def __call__(self, params: Params, tokens: Any, positions: Any, select: Any, cache: KVCache, attend: Any) -> Any:
        """See `paxkv.engine.Decode`."""
        judge: Attend = _Judge(attend, dataclasses.replace(attend, kv_format=self.reference))
        return self.decode(params, tokens, positions, select, cache, judge)
