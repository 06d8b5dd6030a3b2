"""One decode step of a replica's devices, without the scheduler: compiled to see what they hold and exchange."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from paxkv.attend import MemoryAttend
from paxkv.block_tables import BlockTable
from paxkv.kv_cache import KVCache
from paxkv.paged import Paged
from paxkv.sharded_engine import ShardedEngine

DecodeStep = Callable[..., tuple[Int32[Array, " rows"], KVCache]]


def decode_step(sharded: ShardedEngine) -> DecodeStep:
    """The step as a function of weights, cache, block tables, lengths and tokens; every row computes one token.

    Its arguments are weights placed by the rules of `sharded`, a cache as `sharded_engine.init_cache` gives it (taken
    over), i32[rows, blocks_per_seq] block ids, i32[rows] tokens stored, those of this step included, and i32[rows]
    tokens. It gives the most likely tokens and the cache.
    """
    engine, memory = sharded.engine, sharded.engine.memory
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
        one = jax.tree.map(lambda x: x[0], cache)
        logits, one = engine.decode(params, tokens, lengths - 1, row, one, attend)
        return jnp.argmax(logits, axis=1).astype(jnp.int32), jax.tree.map(lambda x: x[None], one)

    def step(params: Any, cache: KVCache, *batch: jax.Array) -> tuple[jax.Array, KVCache]:
        of_params, of_cache = (jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree) for tree in (params, cache))
        whole = PartitionSpec()
        run = jax.shard_map(
            on_device,
            mesh=sharded.mesh,
            in_specs=(of_params, of_cache, *[whole] * len(batch)),
            out_specs=(whole, of_cache),
            check_vma=False,
        )
        return run(params, cache, *batch)

    return step


def batch_of(memory: Paged) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tables, lengths and tokens that a step is given, as shapes and dtypes."""
    sizes = ((memory.rows, memory.blocks_per_seq), (memory.rows,), (memory.rows,))
    return tuple(jax.ShapeDtypeStruct(shape, "int32") for shape in sizes)
