"""What a token's keys and values look like, and how many bytes they take; shapes of published models."""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from paxkv.sizes import require_int


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Keys and values of a model, as one device of a tensor-parallel group stores them.

    All bytes are those of one device; with `tensor_parallel=1` that is the whole model. Values are stored as keys are
    unless the `v_` fields say otherwise. Scales that exist once per tensor or head, however many tokens there are, are
    no part of a block and cost nothing here.

    Raises:
        ValueError: a field is out of range, a head does not fill whole bytes, or the devices cannot share the
            KV heads out evenly.
    """

    layers: int
    kv_heads: int  # of the whole model
    head_dim: int
    element_bytes: int | Fraction = 2  # Fraction(1, 2) for 4-bit elements, packed along head_dim
    scale_bytes_per_token_head: int = 0  # 4 for an f32 scale per token and head
    scale_bytes_per_block_head: int = 0  # 4 for an f32 scale per block and head
    v_element_bytes: int | Fraction | None = None  # None: as of keys; likewise the two below
    v_scale_bytes_per_token_head: int | None = None
    v_scale_bytes_per_block_head: int | None = None
    precise_layers: int = 0  # of the layers, those that keep keys and values without scales
    precise_tokens: int = 0  # of every sequence, the first that are also kept so, beside the blocks
    precise_element_bytes: int = 2  # of those layers and tokens
    tensor_parallel: int = 1  # devices that share the KV heads
    replicate_kv_heads: bool = False  # allow more devices than KV heads: several then hold the same head

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tensor_parallel"):
            require_int(name, getattr(self, name))
        for name in ("scale_bytes_per_token_head", "scale_bytes_per_block_head"):
            for of_tensor in (name, f"v_{name}"):
                require_int(of_tensor, self._size(of_tensor), minimum=0)
        require_int("precise_layers", self.precise_layers, minimum=0)
        require_int("precise_tokens", self.precise_tokens, minimum=0)
        require_int("precise_element_bytes", self.precise_element_bytes)
        if self.precise_layers > self.layers:
            raise ValueError(f"precise_layers must be at most layers = {self.layers}, got {self.precise_layers}")
        for name in ("element_bytes", "v_element_bytes"):
            size = self._size(name)
            if not isinstance(size, Fraction):
                require_int(name, size)
            if size <= 0 or (size * self.head_dim) % 1 != 0:
                raise ValueError(
                    f"{name} must be positive and fill whole bytes over a head, got {size} "
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
    def uniform(self) -> bool:
        """Whether the keys and the values of every layer take the same bytes."""
        kinds = {self._head_bytes("")} | {self._head_bytes("v_")}
        if self.precise_layers:
            kinds |= {(self.head_dim * self.precise_element_bytes, 0)}
        return len(kinds) == 1 or self.precise_layers == self.layers

    @property
    def tensor_token_bytes(self) -> int:
        """Bytes of one token in one tensor: the keys, or the values, of one layer.

        Raises:
            ValueError: the tensors differ.
        """
        if not self.uniform:
            raise ValueError(
                "keys and values of all layers must take the same bytes where each is mapped by itself, got "
                f"{self._head_bytes('')} and {self._head_bytes('v_')} bytes a head and scale, and "
                f"{self.precise_layers} precise layers; store keys and values alike in every layer"
            )
        return self.token_bytes // (2 * self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values, without scales that are kept per block."""
        by_head = self._head_bytes("")[0] + self._head_bytes("v_")[0]
        precise = 2 * self.head_dim * self.precise_element_bytes
        layers = self.layers - self.precise_layers
        return self.kv_heads_per_device * (layers * by_head + self.precise_layers * precise)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's precise tokens, which lie beside the blocks, in all layers but the precise ones."""
        elements = 2 * self.kv_heads_per_device * self.head_dim * (self.layers - self.precise_layers)
        return self.precise_tokens * elements * self.precise_element_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all layers, with all its scales."""
        require_int("block_size", block_size)
        by_head = self._head_bytes("")[1] + self._head_bytes("v_")[1]
        scale_bytes = (self.layers - self.precise_layers) * self.kv_heads_per_device * by_head
        return block_size * self.token_bytes + scale_bytes

    def _head_bytes(self, prefix: Literal["", "v_"]) -> tuple[int, int]:
        """Bytes of a head of keys ("") or values ("v_"): of one token, and of the scale of a block."""
        element_bytes, of_token, of_block = (
            self._size(prefix + name)
            for name in ("element_bytes", "scale_bytes_per_token_head", "scale_bytes_per_block_head")
        )
        return int(self.head_dim * element_bytes + of_token), int(of_block)

    def _size(self, name: str) -> int | Fraction:
        """A field of sizes; those of values are those of keys unless they are given."""
        size = getattr(self, name)
        return getattr(self, name.removeprefix("v_")) if size is None else size

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
