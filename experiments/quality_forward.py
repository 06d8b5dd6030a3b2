"""A text read by a model whose keys and values lie in a paged memory: blocks, tables, scales, as in a server.

The text is given, not generated, so that every way of storing is judged on the same tokens. It is read in chunks: what
a chunk attends to was stored before, its own tokens included, and is read back in the format under test. Reads of all
lengths share one compiled program of each format, since the last chunk is padded and the memory is as long as may be.
"""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from experiments.quality_metrics import relative_error
from models.decoder import Decode, Params
from models.dense_attend import DenseAttend
from paxkv import forward
from paxkv.calibration import Calibration
from paxkv.init_cache import clipped_values, init_kv_cache
from paxkv.kv_cache import Attend, AttentionSpec, KVCache, KVPool, LayerAttend, LayerCache, no_cache
from paxkv.kv_format import KVFormat
from paxkv.outcomes import Outcome
from paxkv.paged import Paged


class Subject(NamedTuple):
    """A model and how it reads: one sequence after another, each into an empty memory."""

    decode: Decode
    params: Params
    max_len: int  # most tokens of a sequence
    block_size: int = 16
    chunk_tokens: int = 256  # computed in one call
    backend: str | None = None  # of the attention kernels


class Read(NamedTuple):
    """What came of reading a text."""

    logits: Float32[Array, "wanted vocab"]
    clipped: int  # values that were clipped when they were stored


class Step(NamedTuple):
    """What the model makes of a token that was chosen for it."""

    token: int  # the most likely one
    gap: float  # its logit above that of the second


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attended:
    """What the attention of a layer was given for a sequence, and what it gave without a cache, in float32."""

    q: jax.Array  # f32[tokens, q_heads, head_dim]
    k: jax.Array  # f32[tokens, kv_heads, head_dim]
    v: jax.Array  # f32[tokens, kv_heads, head_dim]
    out: jax.Array  # f32[tokens, q_heads, head_dim]
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})


def read(
    subject: Subject,
    tokens: Int32[np.ndarray, " tokens"],
    fmt: KVFormat,
    calibration: Calibration | None = None,
    last: int | None = None,
) -> Read:
    """Logits after tokens of one sequence, keys and values stored in a format.

    Args:
      subject: the model.
      tokens: the sequence, from its beginning.
      fmt: how keys and values are stored.
      calibration: where static scales come from; needed if the format has any.
      last: how many tokens, from the end, logits are wanted after; None for all.

    Raises:
      ValueError: the sequence is longer than the memory.
    """
    sequence, logits = _read(subject, _begin(subject, fmt, calibration), tokens, len(tokens) if last is None else last)
    return Read(logits, clipped_values(sequence.cache))


def continue_greedily(
    subject: Subject,
    prompt: Int32[np.ndarray, " tokens"],
    steps: int,
    fmt: KVFormat,
    calibration: Calibration | None = None,
) -> list[Step]:
    """The most likely token after a prompt, then after that too, and so on: each is computed by itself and stored.

    Raises:
      ValueError: the prompt is longer than the memory.
      RuntimeError: what follows does not fit.
    """
    sequence, logits = _read(subject, _begin(subject, fmt, calibration), prompt, last=1)
    found: list[Step] = []
    while len(found) < steps:
        logit, token = (np.asarray(x[0]) for x in jax.lax.top_k(logits, 2))
        found.append(Step(int(token[0]), float(logit[0] - logit[1])))
        if len(found) < steps:
            sequence, logits = _extend(subject.params, sequence, token[:1], 1, jnp.zeros(1, jnp.int32))
    return found


def attend_without_cache(subject: Subject, tokens: Int32[np.ndarray, " tokens"]) -> tuple[Attended, ...]:
    """What every layer's attention is given and gives when nothing is stored."""
    layers, positions = subject.decode.config.layers, jnp.arange(len(tokens), dtype=jnp.int32)
    none = jnp.zeros(1, jnp.int32)
    _, seen = subject.decode(subject.params, jnp.asarray(tokens), positions, none, no_cache(layers), _Watch())
    watched = (layer for layer in seen.layers if isinstance(layer, _Watched))
    return tuple(Attended(layer.q, layer.k.data, layer.v.data, layer.out, layer.spec) for layer in watched)


def attention_errors(
    subject: Subject, attended: tuple[Attended, ...], fmt: KVFormat, calibration: Calibration | None = None
) -> list[float]:
    """What a format does to the output of each layer's attention by itself: relative L2 error over one sequence.

    Every layer is given what it would get without a cache, so that errors of earlier layers do not add up.

    Args:
      subject: the model.
      attended: what `attend_without_cache` saw.
      fmt: how keys and values are stored.
      calibration: where static scales come from; needed if the format has any.
    """
    context, every = attended[0].q.shape[0], jnp.arange(len(attended), dtype=jnp.int32)
    sequence = _begin(subject, fmt, calibration)
    sequence = sequence._replace(reader=dataclasses.replace(sequence.reader, decode=_replay))
    _, errors = _extend(attended, sequence, np.zeros(context, np.int32), context, every)
    return np.asarray(errors[:, 0]).tolist()


class _Sequence(NamedTuple):
    """What a sequence has stored, and where."""

    reader: forward.Reader
    state: Any  # of the memory
    cache: KVCache


def _begin(subject: Subject, fmt: KVFormat, calibration: Calibration | None) -> _Sequence:
    """A sequence without tokens in a memory with room for it alone."""
    config, max_len = subject.decode.config, subject.max_len
    memory = Paged(1, max_len, subject.block_size, -(-max_len // subject.block_size))
    cache = init_kv_cache(
        config.layers,
        memory.num_slots,
        config.kv_heads,
        config.head_dim,
        fmt,
        block_size=subject.block_size,
        rows=memory.rows,
        calibration=calibration,
    )
    reader = forward.Reader(memory, subject.decode, fmt, subject.backend)
    state, _, outcome = forward.begin(reader, memory.init(), max_len, max_len)
    _require_ok(outcome)
    return _Sequence(reader, state, cache)


def _read(
    subject: Subject, sequence: _Sequence, tokens: Int32[np.ndarray, " tokens"], last: int
) -> tuple[_Sequence, Float32[Array, "last vocab"]]:
    """Logits after the last tokens, which are read in chunks of one size."""
    context, chunk = len(tokens), min(subject.chunk_tokens, subject.max_len)
    if not 1 <= last <= context <= subject.max_len:
        raise ValueError(
            f"tokens: expected {last} to max_len = {subject.max_len}, as logits of {last} are wanted, got {context}"
        )
    every, parts = jnp.arange(chunk, dtype=jnp.int32), []
    for first in range(0, context, chunk):
        unwanted = context - last - first  # of this chunk and those that follow
        select = every if unwanted < chunk else every[:1]
        sequence, logits = _extend(subject.params, sequence, tokens[first : first + chunk], chunk, select)
        if unwanted < chunk:
            parts.append(logits[max(0, unwanted) : context - first])
    return sequence, jnp.concatenate(parts)


def _extend(
    params: Any,
    sequence: _Sequence,
    tokens: Int32[np.ndarray, " tokens"],
    size: int,
    select: Int32[Array, " selected"],
) -> tuple[_Sequence, Float32[Array, "selected vocab"]]:
    """Computes and stores tokens in one step of `size` of them, and picks logits."""
    reader, state, cache = sequence
    padded = jnp.asarray(np.pad(tokens, (0, size - len(tokens))))
    counts = jnp.full(1, len(tokens), jnp.int32)
    state, cache, logits, outcome = forward.extend(reader, params, state, cache, padded, counts, select, max_q_len=size)
    _require_ok(outcome)
    return _Sequence(reader, state, cache), logits


def _require_ok(outcome: Int32[Array, ""]) -> None:
    """The memory is as long as a sequence may be, so that anything else is a defect of ours."""
    if int(outcome) != Outcome.OK:
        raise RuntimeError(f"memory: expected room for the whole sequence, got {Outcome(int(outcome)).name}")


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Watched(LayerCache):
    """Keys and values as they came, beside what else `Attended` holds."""

    q: jax.Array
    out: jax.Array
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Watch:
    """Attends without a cache, and keeps what it was given and gave in place of one."""

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        return self, layer

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """See `LayerAttend`."""
        out, _ = DenseAttend(batch=1)(q, k, v, cache, spec)
        return out, _Watched(KVPool(k), KVPool(v), jnp.int32(0), q, out, spec)


def _replay(
    params: tuple[Attended, ...],
    tokens: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
    select: Int32[Array, " selected"],
    cache: KVCache,
    attend: Attend,
) -> tuple[Float32[Array, "selected one"], KVCache]:
    """In place of a model: its attentions alone, on what they were given before; in place of logits, their errors."""
    errors = []
    for i, attended in enumerate(params):
        of_layer, place = attend.of_layer(i)
        errors.append(_error(of_layer, attended, cache.layers[place]))
    return jnp.stack(errors)[select, None], cache


@jax.jit
def _error(attend: LayerAttend, attended: Attended, cache: LayerCache | None) -> Float32[Array, ""]:
    out, _ = attend(attended.q, attended.k, attended.v, cache, attended.spec)
    return relative_error(out, attended.out)
