"""What published models multiply with: parameters, heads and vocabularies, beside the keys and values they store."""

import dataclasses
import types
from collections.abc import Mapping

from paxkv.model_shapes import model_shape
from paxkv.sizes import require_bool, require_int


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A decoder as a whole, over all devices. Its keys and values are a `KVShape`.

    Raises:
        ValueError: a field is out of range.
    """

    parameters: int  # all, those of a tied table once
    width: int  # of the residual stream
    q_heads: int
    vocab: int
    tied_embeddings: bool = False  # the table of embeddings is the output projection as well

    def __post_init__(self) -> None:
        for name in ("parameters", "width", "q_heads", "vocab"):
            require_int(name, getattr(self, name))
        require_bool("tied_embeddings", self.tied_embeddings)
        if self.layer_parameters < 1:
            raise ValueError(
                f"parameters must be more than those of embeddings and output projection of {self.vocab} x "
                f"{self.width}, got {self.parameters}"
            )

    @property
    def output_parameters(self) -> int:
        """Of the output projection, by which a row is multiplied only if its next token is drawn."""
        return self.vocab * self.width

    @property
    def layer_parameters(self) -> int:
        """By which every token is multiplied: all but output projection and embeddings, of which it reads a row."""
        tables = 1 if self.tied_embeddings else 2
        return self.parameters - tables * self.output_parameters


MODEL_SIZES: Mapping[str, ModelSize] = types.MappingProxyType(
    {
        "Llama-2-13B": ModelSize(13_015_864_320, width=5120, q_heads=40, vocab=32_000),
        "Llama-2-70B": ModelSize(68_976_648_192, width=8192, q_heads=64, vocab=32_000),
        "Llama-3-8B": ModelSize(8_030_261_248, width=4096, q_heads=32, vocab=128_256),
        "Llama-3-70B": ModelSize(70_553_706_496, width=8192, q_heads=64, vocab=128_256),
        "OPT-13B": ModelSize(12_853_473_280, width=5120, q_heads=40, vocab=50_272, tied_embeddings=True),
        "OPT-66B": ModelSize(65_719_701_504, width=9216, q_heads=72, vocab=50_272, tied_embeddings=True),
        "OPT-175B": ModelSize(174_604_468_224, width=12_288, q_heads=96, vocab=50_272, tied_embeddings=True),
        "Yi-6B": ModelSize(6_061_035_520, width=4096, q_heads=32, vocab=64_000),
        "Yi-34B": ModelSize(34_388_917_248, width=7168, q_heads=56, vocab=64_000),
    }
)
"""Of the models of `model_shapes.MODEL_SHAPES`, as their published configurations say."""


def model_size(name: str) -> ModelSize:
    """Size of a published model.

    Raises:
        ValueError: no such model is known.
    """
    model_shape(name)
    return MODEL_SIZES[name]
