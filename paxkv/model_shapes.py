"""What a token's keys and values look like, and how many bytes they take; shapes of published models."""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from fractions import Fraction

from paxkv.sizes import require_int


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Keys and values of a model, as one device of a tensor-parallel group stores them.

    Keys and values have the same shape and element type. All bytes are those of one device; with
    `tensor_parallel=1` that is the whole model. Scales that exist once per tensor or head, however many
    tokens there are, are no part of a block and cost nothing here.

    Raises:
        ValueError: a field is out of range, a head does not fill whole bytes, or the devices cannot share the
            KV heads out evenly.
    """

    layers: int
    kv_heads: int  # of the whole model
    head_dim: int
    element_bytes: int | Fraction = 2  # Fraction(1, 2) for 4-bit elements, packed along head_dim
    scale_bytes_per_token_head: int = 0  # in K and in V each: 4 for an f32 scale per token and head
    scale_bytes_per_block_head: int = 0  # in K and in V each: 4 for an f32 scale per block and head
    tensor_parallel: int = 1  # devices that share the KV heads
    replicate_kv_heads: bool = False  # allow more devices than KV heads: several then hold the same head

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tensor_parallel"):
            require_int(name, getattr(self, name))
        for name in ("scale_bytes_per_token_head", "scale_bytes_per_block_head"):
            require_int(name, getattr(self, name), minimum=0)
        if not isinstance(self.element_bytes, Fraction):
            require_int("element_bytes", self.element_bytes)
        if self.element_bytes <= 0 or (self.element_bytes * self.head_dim) % 1 != 0:
            raise ValueError(
                f"element_bytes must be positive and fill whole bytes over a head, got {self.element_bytes} "
                f"with head_dim {self.head_dim}; use 2 (bf16), 1 (fp8, int8) or Fraction(1, 2) (int4)"
            )
        if self.kv_heads % self.tensor_parallel != 0 and not self._replicates():
            raise ValueError(
                f"tensor_parallel must divide kv_heads, got {self.tensor_parallel} devices for "
                f"{self.kv_heads} heads; choose a divisor, or a multiple with replicate_kv_heads=True"
            )

    @property
    def kv_heads_per_device(self) -> int:
        """KV heads that one device stores."""
        return 1 if self._replicates() else self.kv_heads // self.tensor_parallel

    @property
    def tensor_token_bytes(self) -> int:
        """Bytes of one token in one tensor: the keys, or the values, of one layer."""
        head_bytes = int(self.head_dim * self.element_bytes) + self.scale_bytes_per_token_head
        return self.kv_heads_per_device * head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values, without scales that are kept per block."""
        return 2 * self.layers * self.tensor_token_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all layers, with all its scales."""
        require_int("block_size", block_size)
        scale_bytes = 2 * self.layers * self.kv_heads_per_device * self.scale_bytes_per_block_head
        return block_size * self.token_bytes + scale_bytes

    def _replicates(self) -> bool:
        return (
            self.replicate_kv_heads
            and self.tensor_parallel > self.kv_heads
            and self.tensor_parallel % self.kv_heads == 0
        )


# Layers, KV heads and head_dim as the models' published configurations state them, at 2 bytes per element.
MODEL_SHAPES: Mapping[str, KVShape] = types.MappingProxyType(
    {
        "Llama-2-13B": KVShape(layers=40, kv_heads=40, head_dim=128),
        "Llama-2-70B": KVShape(layers=80, kv_heads=8, head_dim=128),
        "Llama-3-8B": KVShape(layers=32, kv_heads=8, head_dim=128),
        "Llama-3-70B": KVShape(layers=80, kv_heads=8, head_dim=128),
        "OPT-13B": KVShape(layers=40, kv_heads=40, head_dim=128),
        "OPT-66B": KVShape(layers=64, kv_heads=72, head_dim=128),
        "OPT-175B": KVShape(layers=96, kv_heads=96, head_dim=128),
        "Yi-6B": KVShape(layers=32, kv_heads=4, head_dim=128),
        "Yi-34B": KVShape(layers=60, kv_heads=8, head_dim=128),
    }
)


def model_shape(name: str) -> KVShape:
    """Shape of a published model; `dataclasses.replace` it for another element type or tensor parallelism.

    Raises:
        ValueError: no such model is known.
    """
    if name not in MODEL_SHAPES:
        close = difflib.get_close_matches(name, MODEL_SHAPES, n=1)
        advice = f"did you mean {close[0]!r}?" if close else "give layers, kv_heads and head_dim instead"
        raise ValueError(f"model must be one of {', '.join(MODEL_SHAPES)}, got {name!r}; {advice}")
    return MODEL_SHAPES[name]
