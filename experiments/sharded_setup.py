"""From a mesh to a server on it: what each device holds, and how many blocks fit."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from models.config import DecoderConfig
from models.decoder import Decode
from models.split import device_config, split_of
from paxkv.capacity import parse_size, plan_blocks
from paxkv.config import MemoryConfig, make_memory
from paxkv.cost_model import StepCost
from paxkv.engine import Engine
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import KVCache
from paxkv.kv_format import KVFormat
from paxkv.model_shapes import KVShape
from paxkv.paged import Paged
from paxkv.policy import FIRST_COME, Policy
from paxkv.sharded_engine import ShardedEngine
from paxkv.sharding import RULES, MeshShape, Rules, make_mesh
from paxkv.sizes import require_int
from paxkv.split_paged import Dealing, split_blocks

_NAME = re.compile(r"d([1-9][0-9]*)m([1-9][0-9]*)k([1-9][0-9]*)")


class Server(NamedTuple):
    """A sharded engine, and what its devices hold."""

    sharded: ShardedEngine
    memory: Paged  # of a replica, as the engine has it
    new_cache: Callable[[], KVCache]  # of one replica, with all its heads and slots
    device_shape: KVShape  # keys and values of one device, of all its tokens' layers

    @property
    def kv_bytes_per_device(self) -> int:
        """By arithmetic: whole blocks, with their scales."""
        parts = self.sharded.mesh.shape["kv"]
        blocks = self.memory.num_blocks // parts * self.device_shape.block_bytes(self.memory.block_size)
        return blocks + self.memory.rows * self.device_shape.row_bytes


@dataclasses.dataclass(frozen=True)
class Serving:
    """What does not depend on the mesh: how much each device has, and how the server works."""

    kv_bytes: int  # of each device
    memory: MemoryConfig
    rows: int
    max_model_len: int
    token_budget: int
    kv_format: KVFormat
    rules: Rules = RULES
    dealing: Dealing = "round_robin"
    replicate_kv_heads: bool = True
    policy: Policy = FIRST_COME
    cost: StepCost = dataclasses.field(default_factory=StepCost)
    kernels: str | tuple[str, ...] | None = None


def parse_mesh(name: str) -> MeshShape:
    """The shape of a name such as `d1m8k1`.

    Raises:
      ValueError: it is none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"meshes: expected names such as d1m8k1, of data, model and kv, got {name!r}")
    return MeshShape(*(int(part) for part in match.groups()))


def part_of(name: str) -> str:
    """The part of a run in which a mesh, or a pair of them, was served."""
    return name.replace("+", "-")


def device_shape(config: DecoderConfig, shape: MeshShape, kv_format: KVFormat, replicate_kv_heads: bool) -> KVShape:
    """Keys and values of a model as one device of a mesh stores them."""
    whole = kv_format.shape(config.layers, config.kv_heads, config.head_dim)
    replicated = replicate_kv_heads and shape.model > 1
    return dataclasses.replace(whole, tensor_parallel=shape.model, replicate_kv_heads=replicated)


def make_server(
    config: DecoderConfig, shape: MeshShape, serving: Serving, devices: Sequence[Any] | None = None
) -> Server:
    """A server of a model on a mesh, with as many blocks as its devices have room for.

    Raises:
      ValueError: the model cannot be split so, or not one block fits.
    """
    mesh = make_mesh(
        shape, config.q_heads, config.kv_heads, replicate_kv_heads=serving.replicate_kv_heads, devices=devices
    )
    of_device = device_shape(config, shape, serving.kv_format, serving.replicate_kv_heads)
    memory = replica_memory(shape, serving, of_device)
    engine = Engine(
        memory,
        Decode(device_config(config, mesh, serving.rules), split_of(mesh, serving.rules)),
        serving.token_budget,
        serving.cost,
        serving.kernels,
        serving.policy,
        serving.kv_format,
    )

    def new_cache() -> KVCache:
        slots = memory.num_blocks * memory.block_size
        sizes = (config.layers, slots, config.kv_heads, config.head_dim)
        return init_kv_cache(*sizes, serving.kv_format, block_size=memory.block_size, rows=memory.rows)

    return Server(ShardedEngine(engine, mesh, serving.rules), memory, new_cache, of_device)


def replica_memory(shape: MeshShape, serving: Serving, of_device: KVShape) -> Paged:
    """The memory of one replica, with as many blocks as its devices have room for.

    Raises:
      ValueError: a knob is out of range, cannot be had where blocks lie across devices, or not one block fits.
    """
    asked = serving.memory
    if asked.kind != "paged":
        raise ValueError(f"memory.kind: expected 'paged', got {asked.kind!r}")
    if asked.num_blocks is not None:
        require_int("memory.num_blocks", asked.num_blocks)
    if shape.kv > 1 and parse_size(asked.swap_space, "memory.swap_space"):
        raise ValueError(
            f"memory.swap_space: expected '0 GiB' where blocks lie across devices, got {asked.swap_space!r}; preempt "
            "by recomputing, or take a mesh with k1"
        )
    rows_bytes = require_int("rows", serving.rows) * of_device.row_bytes
    budget, block = serving.kv_bytes - rows_bytes, of_device.block_bytes(asked.block_size)
    if budget < block:
        raise ValueError(
            f"kv_memory: expected room on each device for a block of {block} bytes"
            f"{f' beside {rows_bytes} of the rows' if rows_bytes else ''}, got {serving.kv_bytes}; give more memory, "
            "or lower memory.block_size"
        )
    here = plan_blocks(of_device, serving.memory.block_size, budget, serving.memory.num_blocks).num_blocks
    memory = make_memory(
        dataclasses.replace(serving.memory, num_blocks=here * shape.kv),
        of_device,
        serving.kv_bytes,
        serving.rows,
        serving.max_model_len,
        kv_format=serving.kv_format.name,
    )
    if not isinstance(memory, Paged):
        raise ValueError(f"memory.kind: expected 'paged', got {serving.memory.kind!r}")
    return split_blocks(memory, shape.kv, serving.dealing) if shape.kv > 1 else memory


def device_bytes(tree: Any) -> int:
    """Most bytes that one device holds of some arrays, as they lie."""
    held: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())
