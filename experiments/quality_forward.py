"""A text read by a model whose keys and values lie in a paged memory: blocks, tables, scales, as in a server.

The text is given, not generated, so that every way of storing is judged on the same tokens. It is read in chunks: what
a chunk attends to was stored before, its own tokens included, and is read back in the format under test.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from models.decoder import Decode, Params
from paxkv.attend import MemoryAttend
from paxkv.calibration import Calibration
from paxkv.init_cache import clipped_values, init_kv_cache
from paxkv.kv_cache import Attend, AttentionSpec, KVCache, LayerAttend, LayerCache
from paxkv.kv_format import KVFormat, scheme
from paxkv.kv_store import rotate
from paxkv.memory import Ask
from paxkv.outcomes import Outcome
from paxkv.paged import Paged

REFERENCE_BLOCK = 16  # tokens; what is stored without scales does not depend on it


class Reader(NamedTuple):
    """A model and how it reads: one sequence after another, each into an empty memory."""

    decode: Decode
    params: Params
    block_size: int = REFERENCE_BLOCK
    chunk_tokens: int = 256  # computed in one call; must divide the length of what is read
    backend: str | None = None  # of the attention kernels

    def memory(self, context: int) -> Paged:
        """Room for one sequence."""
        return Paged(1, context, self.block_size, -(-context // self.block_size))

    def empty_cache(self, context: int, fmt: KVFormat, calibration: Calibration | None) -> KVCache:
        """For one sequence."""
        config, slots = self.decode.config, self.memory(context).num_slots
        return init_kv_cache(
            config.layers,
            slots,
            config.kv_heads,
            config.head_dim,
            fmt,
            block_size=self.block_size,
            calibration=calibration,
        )


class Read(NamedTuple):
    """What came of reading a text."""

    logits: Float32[Array, "tokens vocab"]
    clipped: int  # values that were clipped when they were stored


def read(
    reader: Reader, tokens: Int32[np.ndarray, " tokens"], fmt: KVFormat, calibration: Calibration | None = None
) -> Read:
    """Logits after every token of one sequence, keys and values stored in a format.

    Args:
      reader: the model.
      tokens: the sequence, from its beginning.
      fmt: how keys and values are stored.
      calibration: where static scales come from; needed if the format has any.

    Raises:
      ValueError: the chunks do not divide the sequence.
    """
    cache = reader.empty_cache(len(tokens), fmt, calibration)
    logits, cache = _read(reader, tokens, cache, lambda attend: dataclasses.replace(attend, kv_format=fmt))
    return Read(logits, clipped_values(cache))


def _read(
    reader: Reader,
    tokens: Int32[np.ndarray, " tokens"],
    cache: KVCache,
    watch: Callable[[MemoryAttend], Attend],
) -> tuple[Float32[Array, "tokens vocab"], KVCache]:
    context, chunk = len(tokens), min(reader.chunk_tokens, len(tokens))
    if context % chunk:
        raise ValueError(f"chunk_tokens: expected a divisor of the {context} tokens that are read, got {chunk}")
    memory, length = reader.memory(context), jnp.int32(context)
    state, _, outcome = memory.admit(memory.init(), Ask(length, length, length))
    if Outcome(int(outcome)) is not Outcome.OK:
        raise RuntimeError(f"an empty memory of {context} slots did not admit a sequence of as many tokens")
    parts = []
    for first in range(0, context, chunk):
        positions = first + jnp.arange(chunk, dtype=jnp.int32)
        state, _ = memory.append(state, jnp.full(1, chunk, jnp.int32), chunk)
        slots = memory.slots(state, jnp.zeros(chunk, jnp.int32), positions)
        ends = jnp.array([0, chunk], jnp.int32)
        attend = MemoryAttend(state, slots, ends, memory, scheme("f32"), chunk, reader.backend)
        # Not under jit: layers of a kind share a compiled program, all of them together would take minutes.
        logits, cache = reader.decode(
            reader.params,
            jnp.asarray(tokens[first : first + chunk]),
            positions,
            jnp.arange(chunk, dtype=jnp.int32),
            cache,
            watch(attend),
        )
        parts.append(logits)
    return jnp.concatenate(parts), cache


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Measured(LayerCache):
    """Keys and values, and how large each channel of them got."""

    k_amax: jax.Array  # f32[kv_heads, head_dim]
    v_amax: jax.Array  # f32[kv_heads, head_dim]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Measure:
    """Attends as `inner` does, and keeps the largest absolute value of every channel."""

    inner: Any  # MemoryAttend
    rotates: bool = dataclasses.field(metadata={"static": True})

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        inner, place = self.inner.of_layer(layer)
        return dataclasses.replace(self, inner=inner), place

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """See `LayerAttend`."""
        out, stored = self.inner(q, k, v, cache, spec)
        k_amax, v_amax = (
            jnp.max(jnp.abs(x.astype(jnp.bfloat16).astype(jnp.float32)), axis=0)
            for x in (rotate(k) if self.rotates else k, v)
        )
        measured = _Measured(
            stored.k, stored.v, stored.clipped, jnp.maximum(cache.k_amax, k_amax), jnp.maximum(cache.v_amax, v_amax)
        )
        return out, measured


def calibrate(
    reader: Reader, sequences: Int32[np.ndarray, "sequences tokens"], *, rotated: bool = False
) -> Calibration:
    """How large keys and values get while a model reads some sequences, its memory in float32."""
    config = reader.decode.config
    nothing = jnp.zeros((config.kv_heads, config.head_dim), jnp.float32)
    seen = [(nothing, nothing)] * config.layers
    for tokens in sequences:
        empty = reader.empty_cache(len(tokens), scheme("f32"), None)
        cache = KVCache(
            tuple(_Measured(c.k, c.v, c.clipped, *amax) for c, amax in zip(empty.layers, seen, strict=True) if c)
        )
        _, cache = _read(reader, tokens, cache, lambda attend: _Measure(attend, rotated))
        seen = [(c.k_amax, c.v_amax) for c in cache.layers if isinstance(c, _Measured)]
    k_amax, v_amax = (np.stack([np.asarray(of[i]) for of in seen]) for i in (0, 1))
    return Calibration(k_amax, v_amax, tokens=int(sequences.size), rotated=rotated)


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
        out, stored = self.judged(q, k, v, cache, spec)
        sound, reference = self.reference(q, k, v, cache.reference, spec)
        difference = cache.difference + jnp.sum(jnp.square(out - sound), dtype=jnp.float32)
        size = cache.size + jnp.sum(jnp.square(sound), dtype=jnp.float32)
        return sound, _Judged(stored.k, stored.v, stored.clipped, reference, difference, size)


def attention_errors(
    reader: Reader,
    tokens: Int32[np.ndarray, " tokens"],
    fmt: KVFormat,
    reference: KVFormat,
    calibration: Calibration | None = None,
) -> list[float]:
    """What a format does to the output of each layer's attention by itself: relative L2 error over one sequence.

    Every layer is given what it would get without the format, so that errors of earlier layers do not add up.
    """
    context = len(tokens)
    caches = zip(
        reader.empty_cache(context, fmt, calibration).layers,
        reader.empty_cache(context, reference, calibration).layers,
        strict=True,
    )
    zero = jnp.float32(0)
    cache = KVCache(tuple(_Judged(c.k, c.v, c.clipped, r, zero, zero) for c, r in caches if c is not None))

    def both(attend: MemoryAttend) -> Attend:
        return _Judge(dataclasses.replace(attend, kv_format=fmt), dataclasses.replace(attend, kv_format=reference))

    _, cache = _read(reader, tokens, cache, both)
    return [float(jnp.sqrt(c.difference / c.size)) for c in cache.layers if isinstance(c, _Judged)]
