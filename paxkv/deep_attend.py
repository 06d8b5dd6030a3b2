"""Attention over one pool that holds the blocks of all layers, for a model whose layers are one loop.

A loop cannot take another array in each round without copying it. So there is one: block `b` of layer `l` is its block
`l * num_blocks + b`, and a layer reads it through a table of its own.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.attend import MemoryAttend
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import KVCache, LayerAttend
from paxkv.kv_format import KVFormat
from paxkv.paged import Paged
from paxkv.split_paged import SplitPaged

_OF_A_LAYER: Sequence[str] = ("layer", "head", "channel")  # whose scales are kept once for a layer


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeepAttend:
    """`MemoryAttend` for any layer that a loop has come to, in a step of single tokens. Implements `Attend`."""

    step: MemoryAttend  # over the memory of one layer; row r has token r
    layers: int = dataclasses.field(metadata={"static": True})

    def of_layer(self, layer: Int32[Array, ""]) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        shallow = typing.cast(Paged, self.step.memory)
        blocks, memory = shallow.num_blocks, deepened(shallow, self.layers)
        state, row = self.step.state, jnp.arange(memory.rows, dtype=jnp.int32)

        def moved(ids: jax.Array) -> jax.Array:
            return jnp.where((ids >= 0) & (ids < blocks), ids + layer * blocks, memory.num_blocks)

        tables = tuple(dataclasses.replace(table, ids=moved(table.ids)) for table in state.tables)
        state = dataclasses.replace(state, tables=tables)
        slots = memory.slots(state, row, state.seqs.lengths - 1)
        return dataclasses.replace(self.step, state=state, slots=slots, memory=memory), 0


def deepened(memory: Paged, layers: int) -> Paged:
    """The memory with the blocks of so many layers.

    Raises:
      ValueError: layers would not lie alike on the devices that share the blocks.
    """
    if isinstance(memory, SplitPaged) and memory.dealing != "round_robin":
        raise ValueError(f"memory.dealing: expected 'round_robin' for layers in one pool, got {memory.dealing!r}")
    return dataclasses.replace(memory, num_blocks=layers * memory.num_blocks)


def init_deep_cache(layers: int, memory: Paged, kv_heads: int, head_dim: int, kv_format: KVFormat) -> KVCache:
    """An empty cache of one entry, in which all layers lie, on all devices together.

    Raises:
      ValueError: the format keeps something once for a layer, or does not fit the model.
    """
    tensors = (kv_format.k, kv_format.v)
    if kv_format.precise_layers or kv_format.precise_tokens or any(t.granularity in _OF_A_LAYER for t in tensors):
        raise ValueError(
            "kv_format: expected one without scales of layers, heads or channels and without precise layers and "
            f"tokens, where all layers lie in one pool, got {kv_format.name}; use bf16 or e4m3_token_head"
        )
    slots = layers * memory.num_blocks * memory.block_size
    return init_kv_cache(1, slots, kv_heads, head_dim, kv_format, block_size=memory.block_size, rows=memory.rows)
