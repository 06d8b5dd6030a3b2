"""Moving a request's blocks between two sharded servers: one that reads prompts, and one that answers.

Both may be split over devices in any way. The host decides when; the devices of the source gather the blocks, the
arrays go from mesh to mesh, and the devices of the destination put away what is theirs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from paxkv.engine import EngineState
from paxkv.kv_cache import KVCache, block_bytes, map_blocks
from paxkv.memory import Content, content
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.sharded_engine import ShardedEngine, as_replica, cache_specs, on_devices, one_replica, specs_of
from paxkv.sharding import partition, to_host
from paxkv.transfer import Taken, check_transfers, find_blocks, pack, take_blocks, unpack


class Parcel(NamedTuple):
    """Blocks of a prompt on their way."""

    source: ShardedEngine
    cache: KVCache  # of these blocks alone, on the source's devices
    tokens: Int32[Array, " width"]  # of the prompt, then anything
    blocks: int  # full blocks of the prompt that the source had


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What became of a parcel."""

    moved: int  # blocks
    there: int  # blocks that the destination had already
    bytes: int  # that were moved, scales included
    refused: bool  # there was no room: the destination will compute all of it


def check_pair(source: ShardedEngine, destination: ShardedEngine) -> None:
    """Refuses two servers between which nothing can move.

    Raises:
      ValueError: naming what differs.
    """
    for name, sharded in (("source", source), ("destination", destination)):
        check_transfers(_paged(sharded))
        if sharded.replicas != 1:
            raise ValueError(f"{name}: expected one replica, got {sharded.replicas}")
        if sharded.engine.kv_format.precise_tokens:
            raise ValueError(f"{name}: expected precise_tokens=0, as they lie beside the blocks")
    ours, theirs = _paged(source).block_size, _paged(destination).block_size
    if ours != theirs or source.engine.kv_format != destination.engine.kv_format:
        raise ValueError(
            f"destination: expected blocks of {ours} tokens in {source.engine.kv_format.name}, as at the source, got "
            f"{theirs} in {destination.engine.kv_format.name}"
        )


def send(source: ShardedEngine, state: EngineState, prompt: Int32[Array, " width"], tokens: int) -> Parcel:
    """Gathers what the source has of a prompt's full blocks.

    Args:
      source: where the prompt was read.
      state: of the source; it stays as it is.
      prompt: token ids, then anything; always of one width, or the program is compiled anew.
      tokens: of the prompt.
    """
    packed, count = _send(source, state, prompt, jnp.int32(tokens))
    return Parcel(source, packed, prompt, int(to_host(count)[0]))


def deliver(destination: ShardedEngine, state: EngineState, parcel: Parcel) -> tuple[EngineState, Delivery]:
    """Takes a parcel into the destination's prefix cache. Takes over `state`.

    Only what the destination lacks goes over the link; the rest of the parcel stays where it is.
    """
    there = min(parcel.blocks, int(to_host(_count(destination, state, parcel.tokens, jnp.int32(parcel.blocks)))[0]))
    if there == parcel.blocks:
        return state, Delivery(0, there, 0, refused=False)
    # A power of two, so that few programs are compiled.
    size, whole = _paged(destination).block_size, _one_shape(parcel.cache)
    width = min(1 << (parcel.blocks - there - 1).bit_length(), whole.num_slots // size)
    first = min(there, whole.num_slots // size - width)
    some = _cut(parcel.source, parcel.cache, jnp.int32(first), width)
    lies = cache_specs(some, destination.rules, split_slots=False)
    moved = jax.device_put(some, jax.tree.map(lambda spec: NamedSharding(destination.mesh, spec), lies))
    state, taken = _deliver(destination, state, moved, parcel.tokens, jnp.int32(parcel.blocks), jnp.int32(first))
    found: Any = to_host(taken)
    count, refused = int(found.moved[0]), int(found.outcome[0]) != Outcome.OK
    return state, Delivery(count, int(found.there[0]), count * block_bytes(whole, size), refused)


@jax.jit(static_argnames="source")
def _send(
    source: ShardedEngine, state: EngineState, prompt: jax.Array, tokens: jax.Array
) -> tuple[KVCache, Int32[Array, " replicas"]]:
    memory = _paged(source)

    def on_device(state: EngineState, prompt: jax.Array, tokens: jax.Array) -> tuple[KVCache, jax.Array]:
        one = one_replica(state)
        ids, count = find_blocks(memory, one.scheduler.memory, content(prompt), tokens)
        return as_replica(pack(memory, one.cache, ids)), count[None]

    out = (cache_specs(state.cache, source.rules, split_slots=False), partition(("replicas",)))
    whole = partition(())
    return on_devices(source, on_device, (specs_of(state), whole, whole), out)(state, prompt, tokens)


@jax.jit(static_argnames="destination")
def _count(
    destination: ShardedEngine, state: EngineState, prompt: jax.Array, blocks: jax.Array
) -> Int32[Array, " replicas"]:
    memory = _paged(destination)

    def on_device(state: EngineState, prompt: jax.Array, blocks: jax.Array) -> jax.Array:
        tokens = blocks * memory.block_size
        return find_blocks(memory, one_replica(state).scheduler.memory, content(prompt), tokens)[1][None]

    whole = partition(())
    run = on_devices(destination, on_device, (specs_of(state), whole, whole), partition(("replicas",)))
    return run(state, prompt, blocks)


@jax.jit(static_argnames="destination", donate_argnames="state")
def _deliver(
    destination: ShardedEngine,
    state: EngineState,
    parcel: KVCache,
    prompt: jax.Array,
    blocks: jax.Array,
    first: jax.Array,
) -> tuple[EngineState, Taken]:
    memory = _paged(destination)

    def on_device(
        state: EngineState, parcel: KVCache, prompt: jax.Array, blocks: jax.Array, first: jax.Array
    ) -> tuple[EngineState, Taken]:
        one, some = one_replica(state), one_replica(parcel)
        asked: Content = content(prompt)
        after, taken = take_blocks(memory, one.scheduler.memory, asked, blocks)
        count = some.num_slots // memory.block_size
        ids = jax.lax.dynamic_slice(taken.blocks, (first,), (count,))
        cache = unpack(memory, one.cache, some, ids)
        scheduler = dataclasses.replace(one.scheduler, memory=after)
        return as_replica(dataclasses.replace(one, scheduler=scheduler, cache=cache)), as_replica(taken)

    whole = partition(())
    ins = (specs_of(state), specs_of(parcel), whole, whole, whole)
    out = (specs_of(state), partition(("replicas",)))
    return on_devices(destination, on_device, ins, out)(state, parcel, prompt, blocks, first)


@jax.jit(static_argnames=("source", "count"))
def _cut(source: ShardedEngine, parcel: KVCache, first: jax.Array, count: int) -> KVCache:
    """`count` of a parcel's blocks."""
    size = _paged(source).block_size

    def on_device(parcel: KVCache, first: jax.Array) -> KVCache:
        def cut(array: jax.Array, rows: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, first * rows, count * rows)

        return as_replica(map_blocks(cut, size, one_replica(parcel)))

    lies = specs_of(parcel)
    return on_devices(source, on_device, (lies, partition(())), lies)(parcel, first)


def _one_shape(cache: KVCache) -> KVCache:
    """Shapes and dtypes of one replica's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cache)


def _paged(sharded: ShardedEngine) -> Paged:
    memory = sharded.engine.memory
    if not isinstance(memory, Paged):
        raise ValueError(f"engine.memory: expected a paged one, got {type(memory).__name__}")
    return memory
