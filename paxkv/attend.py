"""Attention of one step over a memory: what the model calls, in every layer."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from paxkv.kv_cache import AttentionSpec, LayerAttend, LayerCache
from paxkv.kv_format import KVFormat
from paxkv.kv_store import Places, queries, store
from paxkv.memory import KVMemory


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryAttend:
    """Stores a step's keys and values where the memory says, then attends over all that is stored.

    Implements `Attend` and `LayerAttend`: layers of one format do the same, each in its own arrays.
    """

    state: Any  # of the memory, after it made room for the step's tokens
    slots: jax.Array  # i32[tokens]; where each token goes, num_slots for none
    cu_lens: jax.Array  # i32[rows + 1]; where each row's tokens begin, and where the last one's end
    memory: KVMemory[Any] = dataclasses.field(metadata={"static": True})
    kv_format: KVFormat = dataclasses.field(metadata={"static": True})
    max_q_len: int = dataclasses.field(metadata={"static": True})  # most tokens of a row
    backend: Any = dataclasses.field(default=None, metadata={"static": True})

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        """See `Attend`."""
        return dataclasses.replace(self, kv_format=self.kv_format.of_layer(layer)), layer

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
        places = Places(
            self.slots, self.memory.rows, block_size_of(self.memory), self.backend, self._first_places(cache)
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
        token = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
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
    }
    if found := [name for name, there in shares.items() if there]:
        raise ValueError(
            f"kv_format: expected precise_tokens=0 with {' and '.join(found)}, as they are kept for each row and do "
            f"not go along with its blocks, got {kv_format.precise_tokens}"
        )


def block_size_of(memory: KVMemory[Any]) -> int:
    """Slots that share what is kept of a block; 1 in a memory without blocks."""
    return getattr(memory, "block_size", 1)
