"""The calls that `kernel_bench` times: one batch, stored in blocks, in ranges, and as the kernels of jax ask for."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.contiguous_attention import api as contiguous_api
from pallas_kernels.paged_attention import api as paged_api

Kind = Literal["decode", "prefill"]
Tables = Literal["identity", "permuted"]
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "fp8", "int8": "int8"}


@dataclasses.dataclass(frozen=True)
class Work:
    """One batch of attention: what is asked and how it is stored, but not where.

    Attributes:
      kind: `decode` for one query of each sequence, `prefill` for a chunk of queries at its end.
      seqs: sequences in the batch.
      context: tokens of each, those of this call included.
      chunk: queries of each.
      kv_heads: key and value heads.
      group: query heads for each of them.
      head_dim: elements per head.
      q_dtype: dtype of queries and output.
      kv_dtype: dtype of stored keys and values; 8 bits have a scale for each head.
    """

    kind: Kind
    seqs: int
    context: int
    chunk: int
    kv_heads: int
    group: int
    head_dim: int
    q_dtype: str
    kv_dtype: str

    @property
    def name(self) -> str:
        """Begins the names of the calls that do it."""
        return f"{self.kind}_{SHORT[self.kv_dtype]}"

    @property
    def scaled(self) -> bool:
        """Whether stored values have scales."""
        return jnp.dtype(self.kv_dtype).itemsize == 1

    def bytes_moved(self, block_size: int | None) -> int:
        """The least that a call reads and writes: keys and values once, queries, output, and a block table's entries.

        Scales of heads are too few to count; a kernel that splits a sequence also moves the parts, which is its cost.
        """
        stored = self.seqs * self.context * self.kv_heads * 2 * self.head_dim * jnp.dtype(self.kv_dtype).itemsize
        heads = self.seqs * self.chunk * self.kv_heads * self.group
        computed = 2 * heads * self.head_dim * jnp.dtype(self.q_dtype).itemsize
        entries = 0 if block_size is None else self.kv_heads * self.seqs * -(-self.context // block_size)
        return stored + computed + 4 * entries


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to do a piece of work. All calls of a work have the same answer."""

    name: str
    work: Work
    block_size: int | None
    function: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    backend: str


def calls(
    work: Work, seed: int, block_sizes: tuple[int, ...], tables: tuple[Tables, ...], backend: str | None
) -> Iterator[Call]:
    """The calls of a work: contiguous first, then paged by block size and table, jax's own beside ours where it runs.

    Every call has its own memory, so that none finds what another has brought into a cache.
    """
    rng = np.random.default_rng(seed)
    shape = (work.seqs * work.context, work.kv_heads, work.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)).astype(work.kv_dtype) for _ in range(2))
    q_shape = (work.seqs * work.chunk, work.kv_heads * work.group, work.head_dim)
    q = jnp.asarray(2 * rng.standard_normal(q_shape, np.float32)).astype(work.q_dtype)
    lengths = jnp.full(work.seqs, work.context, jnp.int32)
    bounds = jnp.arange(work.seqs + 1, dtype=jnp.int32) * work.chunk
    one = jnp.ones(work.kv_heads, jnp.float32)
    scales: dict[str, jax.Array] = {"k_scale": one, "v_scale": one} if work.scaled else {}

    starts = jnp.arange(work.seqs, dtype=jnp.int32) * work.context
    yield _call(
        f"{work.name}_contiguous", work, None, contiguous_api, (q, k, v, starts, lengths, bounds), scales, backend
    )
    for block_size in block_sizes:
        blocks_per_seq = -(-work.context // block_size)
        num_blocks = work.seqs * blocks_per_seq
        for order in tables:
            ids = np.arange(num_blocks) if order == "identity" else rng.permutation(num_blocks)
            table = jnp.asarray(ids.reshape(work.seqs, blocks_per_seq), jnp.int32)
            pools = tuple(in_blocks(array, work, block_size, ids) for array in (k, v))
            arguments = (q, *pools, table, lengths, bounds)
            name = f"{work.name}_b{block_size}_{order}"
            yield _call(name, work, block_size, paged_api, arguments, scales, backend)
            peer = jax_paged_decode(work)
            if peer is not None and order == "permuted":
                by_head = tuple(jnp.moveaxis(pool, 2, 0) for pool in pools)
                yield Call(f"jax_{name}", work, block_size, peer, (q, *by_head, table, lengths), "jax")


def refusal(call: Call) -> str | None:
    """Why a call cannot be made here, in the words of whoever refuses it; None if it can."""
    try:
        jax.block_until_ready(call.function(*call.arguments))
    except (NotImplementedError, ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def in_blocks(array: jax.Array, work: Work, block_size: int, ids: np.ndarray) -> jax.Array:
    """Contiguous sequences cut into blocks, the i-th of all of them laid where `ids[i]` says."""
    rows = array.reshape(work.seqs, work.context, *array.shape[1:])
    padding = -work.context % block_size
    rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0), (0, 0)))
    blocks = rows.reshape(-1, block_size, *array.shape[1:])
    return blocks.at[jnp.asarray(np.argsort(ids), jnp.int32)].get(mode="promise_in_bounds")


def jax_paged_decode(work: Work) -> Callable[..., jax.Array] | None:
    """The kernel of jax for paged decode on this platform; None where it has none, or not for this work."""
    if work.kind != "decode" or work.scaled:
        return None
    scale = work.head_dim**-0.5
    if jax.default_backend() == "gpu":
        from jax.experimental.pallas.ops.gpu import paged_attention as gpu

        def on_gpu(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
            # It wants whole tiles in every split; its own defaults are 16 splits and tiles of 8 blocks of 16.
            splits = math.gcd(16, table.shape[1])
            at_once = math.gcd(max(1, 128 // k.shape[2]), table.shape[1] // splits)
            scaled = (q * scale).astype(q.dtype)
            return gpu.paged_attention(scaled, k, v, table, lengths, pages_per_compute_block=at_once, k_splits=splits)

        return jax.jit(on_gpu)
    if jax.default_backend() == "tpu":
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        def on_tpu(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
            at_once = max(n for n in range(1, 33) if table.shape[1] % n == 0)
            scaled = (q * scale).astype(q.dtype)
            return paged_attention(scaled, k, v, lengths, table, pages_per_compute_block=at_once)

        return jax.jit(on_tpu)
    return None


def _call(
    name: str,
    work: Work,
    block_size: int | None,
    api: Any,
    arguments: tuple[jax.Array, ...],
    scales: dict[str, jax.Array],
    backend: str | None,
) -> Call:
    """A call of one of our operations by the first backend of this platform that can do it."""
    attention = api.paged_attention if block_size is not None else api.contiguous_attention
    names = [backend] if backend is not None else dispatch.preferred(api.BACKENDS)
    for chosen in names:
        function = jax.jit(functools.partial(attention, max_q_len=work.chunk, backend=chosen, **scales))
        try:
            jax.eval_shape(function, *arguments)
        except (NotImplementedError, ValueError):
            if chosen == names[-1]:
                raise
        else:
            return Call(name, work, block_size, function, arguments, chosen)
    raise ValueError(f"backend: expected at least one to try, got {names}")
