"""One decode step of a replica's devices, without the scheduler: compiled to see what they hold and exchange."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from models.config import DecoderConfig
from models.decoder import Decode
from models.deep import DeepDecode, abstract_stacked
from paxkv.attend import MemoryAttend
from paxkv.block_tables import BlockTable
from paxkv.deep_attend import DeepAttend, init_deep_cache
from paxkv.kv_cache import KVCache
from paxkv.paged import Paged
from paxkv.sharded_engine import ShardedEngine, abstract_cache, as_replica, on_devices, one_replica, specs_of
from paxkv.sharding import partition

DecodeStep = Callable[..., tuple[Int32[Array, " rows"], KVCache]]


def decode_step(sharded: ShardedEngine, *, deep: bool = False) -> DecodeStep:
    """The step as a function of weights, cache, block tables, lengths and tokens; every row computes one token.

    Its arguments are weights placed by the rules of `sharded`, a cache as `sharded_engine.init_cache` gives it (taken
    over), i32[rows, blocks_per_seq] block ids, i32[rows] tokens stored, those of this step included, and i32[rows]
    tokens. It gives the most likely tokens and the cache.

    Args:
      sharded: the servers.
      deep: whether layers are one loop, over weights and a cache like those of `deep_arguments`.
    """
    engine, memory, decode = sharded.engine, sharded.engine.memory, cast(Decode, sharded.engine.decode)
    if not isinstance(memory, Paged):
        raise ValueError(f"sharded.engine.memory: expected a paged one, got {type(memory).__name__}")

    def on_device(
        params: Any, cache: KVCache, tables: jax.Array, lengths: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        state, row = memory.init(), jnp.arange(memory.rows, dtype=jnp.int32)
        ends = (lengths + memory.block_size - 1) // memory.block_size
        state = dataclasses.replace(
            state,
            seqs=dataclasses.replace(state.seqs, lengths=lengths, active=jnp.ones(memory.rows, jnp.bool)),
            tables=(BlockTable(tables, jnp.zeros_like(ends), ends),),
        )
        slots = memory.slots(state, row, lengths - 1)
        cu_lens = jnp.arange(memory.rows + 1, dtype=jnp.int32)
        attend = MemoryAttend(state, (slots,), cu_lens, memory, engine.kv_format, 1, engine.backend)
        one = one_replica(cache)
        if deep:
            run, attend = DeepDecode(decode.config, decode.split), DeepAttend(attend, decode.config.layers)
        else:
            run = decode
        logits, one = run(params, tokens, lengths - 1, row, one, attend)
        return jnp.argmax(logits, axis=1).astype(jnp.int32), as_replica(one)

    def step(params: Any, cache: KVCache, *batch: jax.Array) -> tuple[jax.Array, KVCache]:
        of_cache, whole = specs_of(cache), partition(())
        ins = (specs_of(params), of_cache, *[whole] * len(batch))
        run = on_devices(sharded, on_device, ins, (whole, of_cache))
        return run(params, cache, *batch)

    return step


def batch_of(memory: Paged) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tables, lengths and tokens that a step is given, as shapes and dtypes."""
    sizes = ((memory.rows, memory.blocks_per_seq), (memory.rows,), (memory.rows,))
    return tuple(jax.ShapeDtypeStruct(shape, "int32") for shape in sizes)


def deep_arguments(sharded: ShardedEngine, config: DecoderConfig) -> tuple[Any, ...]:
    """What a step whose layers are one loop is given, as shapes and dtypes and where they lie.

    Args:
      sharded: the servers.
      config: of the whole model.
    """
    memory = cast(Paged, sharded.engine.memory)

    def new_cache() -> KVCache:
        return init_deep_cache(config.layers, memory, config.kv_heads, config.head_dim, sharded.engine.kv_format)

    whole = NamedSharding(sharded.mesh, partition(()))
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in batch_of(memory)]
    weights = abstract_stacked(config, sharded.mesh, sharded.rules)
    return weights, abstract_cache(sharded, new_cache), *batch


def expected_exchanges(sharded: ShardedEngine) -> dict[tuple[str, int], int]:
    """What a decode step has to exchange, and how often: kind and bytes that each device gives.

    The sums of the decoder, the gathered logits, and where blocks are split one merge in every layer: nothing within
    attention otherwise, and no keys or values.
    """
    part, memory = cast(Decode, sharded.engine.decode), cast(Paged, sharded.engine.memory)
    config, split, rows = part.config, part.split, memory.rows
    stream = ("all-reduce", rows * config.width * jnp.dtype(config.dtype).itemsize)
    counts = collections.Counter()
    counts[stream] = bool(split.vocab) + config.layers * (bool(split.heads) + bool(split.ffn))
    counts["all-gather", 4 * rows * config.vocab] += bool(split.vocab)
    for exchange in merge_exchanges(sharded):
        counts[exchange] += config.layers
    return dict(+counts)


def merge_exchanges(sharded: ShardedEngine) -> tuple[tuple[str, int], ...]:
    """Those of them that merge the attention of devices that share the blocks, in each layer; see `merge_over`."""
    config, rows = cast(Decode, sharded.engine.decode).config, cast(Paged, sharded.engine.memory).rows
    if sharded.mesh.shape["kv"] == 1:
        return ()
    return ("all-gather", 4 * rows * config.q_heads), ("all-reduce", 4 * rows * config.q_heads * config.head_dim)
