"""Attention of one step over a memory: what the model calls, in every layer."""

import dataclasses
import itertools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from paxkv.kv_cache import AttentionSpec, LayerAttend, LayerCache
from paxkv.kv_format import KVFormat
from paxkv.kv_store import Places, queries, store
from paxkv.memory import KVMemory
from paxkv.ragged import Ragged
from paxkv.windows import place_of


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryAttend:
    """Stores a step's keys and values where the memory says, then attends over all that is stored.

    Implements `Attend`, and once it is `of_layer`, `LayerAttend`: layers of one format and one window do the same, each
    with its own arrays.
    """

    state: Any  # of the memory, after it made room for the step's tokens
    slots: tuple[jax.Array, ...]  # of each group of layers: see `slots_by_group`
    cu_lens: jax.Array  # i32[rows + 1]; where each row's tokens begin, and where the last one's end
    memory: KVMemory[Any] = dataclasses.field(metadata={"static": True})
    kv_format: KVFormat = dataclasses.field(metadata={"static": True})
    max_q_len: int = dataclasses.field(metadata={"static": True})  # most tokens of a row
    backend: Any = dataclasses.field(default=None, metadata={"static": True})
    kept: int | None = dataclasses.field(default=None, metadata={"static": True})  # tokens that a window leaves stored

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        group, place = place_of(self.memory.layer_groups, layer)
        of_layer = dataclasses.replace(
            self,
            state=self.memory.of_group(self.state, group),
            slots=(self.slots[group],),
            kv_format=self.kv_format.of_layer(layer),
            kept=self.memory.layer_groups[group].window,
        )
        return of_layer, place

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """See `LayerAttend`."""
        if cache is None:
            raise ValueError("cache: expected keys and values of this layer, which attention reads back, got None")
        if self.kept is not None and (spec.window is None or spec.window > self.kept):
            raise ValueError(
                f"spec.window: expected at most {self.kept}, which is what the memory's group of this layer keeps, got "
                f"{spec.window}"
            )
        places = Places(
            self.slots[0], self.memory.rows, block_size_of(self.memory), self.backend, self._first_places(cache)
        )
        cache = store(self.kv_format, cache, k, v, places)
        out = self.memory.attend(
            self.state,
            queries(self.kv_format, cache.k, q),
            cache.k,
            cache.v,
            self.cu_lens,
            spec,
            max_q_len=self.max_q_len,
            backend=self.backend,
        )
        return out, cache

    def _first_places(self, cache: LayerCache) -> Int32[Array, " tokens"] | None:
        """Where tokens go that are kept as they are: `rows * precise_tokens` for all others."""
        precise = self.kv_format.precise_tokens
        if not precise or cache.k.first is None:
            return None
        rows = self.memory.rows
        token = jnp.arange(self.slots[0].shape[0], dtype=jnp.int32)
        row = jnp.searchsorted(self.cu_lens[1:], token, side="right").astype(jnp.int32)
        owner = jnp.minimum(row, rows - 1)
        position = self.memory.seqs(self.state).lengths[owner] - (self.cu_lens[owner + 1] - token)
        kept = (row < rows) & (position >= 0) & (position < precise)
        return jnp.where(kept, owner * precise + position, rows * precise)


def check_rows(kv_format: KVFormat, memory: KVMemory[Any]) -> None:
    """Refuses a format that keeps the rows' first tokens by themselves, where other rows would need them.

    Raises:
      ValueError: rows of the memory share what they store, or store it elsewhere for a while.
    """
    if not kv_format.precise_tokens:
        return
    shares = {
        "a prefix cache": getattr(memory, "cache", None) is not None,
        "forks": memory.can_fork,
        "swap space": bool(getattr(memory, "host_blocks", 0)),
        "blocks across devices": getattr(memory, "shards", 1) > 1,
    }
    if found := [name for name, there in shares.items() if there]:
        raise ValueError(
            f"kv_format: expected precise_tokens=0 with {' and '.join(found)}, as they are kept for each row and do "
            f"not go along with its blocks, got {kv_format.precise_tokens}"
        )


def block_size_of(memory: KVMemory[Any]) -> int:
    """Slots that share what is kept of a block; 1 in a memory without blocks."""
    return getattr(memory, "block_size", 1)


def slots_by_group(memory: KVMemory[Any], state: Any, batch: Ragged) -> tuple[Int32[Array, " tokens"], ...]:
    """Where each token of a batch goes in the layers of each group; num_slots for none."""
    views = (memory.of_group(state, group) for group in range(len(memory.layer_groups)))
    return tuple(memory.slots(view, batch.row, batch.position) for view in views)


def check_groups(kv_format: KVFormat, memory: KVMemory[Any]) -> None:
    """Refuses groups of layers that a model cannot attend over.

    Layers of different groups store in one entry of the KV cache, so they must store alike; and what an entry has but
    once, a factor or the rows' first tokens, would have to be that of several layers.

    Raises:
      ValueError: groups do not name their layers, or name one twice; they have blocks of several sizes, or chunks; or
        the format does not let layers share.
    """
    groups = memory.layer_groups
    named = [layer for group in groups for layer in group.layers]
    if (len(groups) > 1 and not all(group.layers for group in groups)) or sorted(named) != list(range(len(named))):
        raise ValueError(
            "memory.groups: expected each layer of the model in one of them, as `windows.group_layers` makes them, got "
            f"{[group.layers for group in groups]}"
        )
    if len({group.block_size for group in groups}) > 1 or any(group.chunk is not None for group in groups):
        raise ValueError(
            f"memory.groups: expected groups with blocks of one size, and windows instead of chunks, got {groups}"
        )
    for sharing in itertools.zip_longest(*(group.layers for group in groups)):
        layers = [layer for layer in sharing if layer is not None]
        formats = {kv_format.of_layer(layer) for layer in layers}
        if len(formats) > 1:
            raise ValueError(
                f"kv_format.precise_layers: expected all or none of layers {layers}, which share an entry of the KV "
                f"cache under the memory's groups, got {list(kv_format.precise_layers)}"
            )
        fmt = formats.pop()
        once = {fmt.k.granularity, fmt.v.granularity} & {"layer", "head", "channel"} or fmt.precise_tokens
        if len(layers) > 1 and once:
            raise ValueError(
                "kv_format: expected precise_tokens=0, and no scales but those of blocks and tokens, as layers "
                f"{layers} share an entry of the KV cache under the memory's groups, got {kv_format.name!r}"
            )
