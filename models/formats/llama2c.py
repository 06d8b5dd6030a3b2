"""Binaries of llama2.c: seven sizes, then all weights in float32, layer after layer of one kind."""

import os
import struct

import numpy as np

from models.config import DecoderConfig, Dtype
from models.decoder import Decoder
from models.formats.layout import Index, axis_sizes, stored_shape
from models.formats.tensors import Shardings, Stored, Table, assemble

_HEADER = struct.Struct("<7i")
_PER_LAYER = "{i}"

# In the order of the file. The two of a RoPE pair are neighbours.
TABLE: Table = {
    "token_embedding_table": ("embedding", "v d -> v d"),
    "rms_att_weight.{i}": ("layers.{i}.attention_norm.scale", "d -> d"),
    "wq.{i}": ("layers.{i}.attention.q_proj", "(n i p) d -> d n (p i)"),
    "wk.{i}": ("layers.{i}.attention.k_proj", "(m i p) d -> d m (p i)"),
    "wv.{i}": ("layers.{i}.attention.v_proj", "(m h) d -> d m h"),
    "wo.{i}": ("layers.{i}.attention.o_proj", "d (n h) -> n h d"),
    "rms_ffn_weight.{i}": ("layers.{i}.ffn_norm.scale", "d -> d"),
    "w1.{i}": ("layers.{i}.ffn.gate_proj", "f d -> d f"),
    "w2.{i}": ("layers.{i}.ffn.down_proj", "d f -> f d"),
    "w3.{i}": ("layers.{i}.ffn.up_proj", "f d -> d f"),
    "rms_final_weight": ("norm.scale", "d -> d"),
    "wcls": ("output", "v d -> v d"),  # behind two tables of frequencies, which nothing reads
}


def read_header(path: str | os.PathLike[str], dtype: Dtype = "float32") -> DecoderConfig:
    """The config in the file's header.

    Raises:
      ValueError: The header is not that of a model.
    """
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        raise ValueError(f"{path}: expected a header of {_HEADER.size} bytes, got {len(header)}")
    width, ffn, layers, q_heads, kv_heads, vocab, max_len = _HEADER.unpack(header)
    try:
        if q_heads < 1 or width % q_heads:
            raise ValueError(f"heads must divide dim, got {q_heads} and {width}")
        return DecoderConfig(
            vocab=abs(vocab),  # below 0: the head is not tied
            width=width,
            layers=layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=width // q_heads,
            ffn=ffn,
            max_len=max_len,
            tied_embeddings=vocab > 0,
            dtype=dtype,
            param_dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a llama2.c header: dim, hidden, layers, heads, KV heads, vocabulary, context; {error}"
        ) from error


def load_llama2c(
    path: str | os.PathLike[str], *, dtype: Dtype | None = None, shardings: Shardings | None = None
) -> Decoder:
    """The model of a llama2.c binary of the first format, the one without a version.

    Args:
      path: of the file.
      dtype: of weights and activations; None for float32.
      shardings: where each weight goes, by its path in our model; None for all on the default device.

    Raises:
      ValueError: The header is not that of a model, or the file is not as long as its header says.
    """
    config = read_header(path, dtype or "float32")
    places, floats = _positions(config)
    expected, size = _HEADER.size + 4 * floats, os.path.getsize(path)
    if size != expected:
        raise ValueError(f"{path}: expected {expected:,} bytes, as its header says, got {size:,}")
    data = np.memmap(path, "<f4", "r", offset=_HEADER.size)
    found = {
        name: _stored(data[start : start + np.prod(shape)].reshape(shape)) for name, (start, shape) in places.items()
    }
    return assemble(str(path), config, TABLE, found, shardings)


def _positions(config: DecoderConfig) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Where each tensor begins, its shape, and how many floats there are in all."""
    sizes, found, start = axis_sizes(config), {}, 0
    for name, (_, layout) in TABLE.items():
        if name == "wcls":
            start += config.max_len * config.head_dim
            if config.tied_embeddings:
                continue
        shape = stored_shape(layout, sizes)
        for i in range(config.layers if _PER_LAYER in name else 1):
            found[name.format(i=i)] = (start, shape)
            start += int(np.prod(shape))
    return found, start


def _stored(tensor: np.ndarray) -> Stored:
    def read(index: Index) -> np.ndarray:
        return tensor[index]

    return Stored(tensor.shape, read)
