"""Attention of one step over a memory: what the model calls, in every layer."""

import dataclasses
import typing
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.kv_write import kv_write
from paxkv.kv_cache import AttentionSpec, KVPool, LayerAttend, LayerCache
from paxkv.memory import KVMemory


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryAttend:
    """Stores a step's keys and values where the memory says, then attends over all that is stored.

    Implements `Attend` and `LayerAttend`: all layers do the same, each in its own arrays.
    """

    state: Any  # of the memory, after it made room for the step's tokens
    slots: jax.Array  # i32[tokens]; where each token goes, num_slots for none
    cu_lens: jax.Array  # i32[rows + 1]; where each row's tokens begin, and where the last one's end
    memory: KVMemory[Any] = dataclasses.field(metadata={"static": True})
    max_q_len: int = dataclasses.field(metadata={"static": True})  # most tokens of a row
    backend: Any = dataclasses.field(default=None, metadata={"static": True})

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
        if cache is None:
            raise ValueError(
                "cache: expected keys and values of this layer, as the attention reads what is stored, got None"
            )
        stored = kv_write(cache.k.data, cache.v.data, k, v, self.slots, backend=self.backend)
        cache = LayerCache(KVPool(stored.k), KVPool(stored.v), cache.clipped + stored.clipped)
        out = self.memory.attend(
            self.state, q, cache.k, cache.v, self.cu_lens, spec, max_q_len=self.max_q_len, backend=self.backend
        )
        return out, cache
