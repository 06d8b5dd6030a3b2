"""GGUF files: config and tokenizer in the metadata, weights quantised in blocks of a row."""

import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize

from models.config import DecoderConfig, Dtype, RopeScaling
from models.decoder import Decoder
from models.formats.layout import Index
from models.formats.tensors import Shardings, Stored, Table, assemble
from models.rope import rope_frequencies

MAGIC = b"GGUF"
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

_EVERY: Table = {
    "token_embd.weight": ("embedding", "v d -> v d"),
    "output_norm.weight": ("norm.scale", "d -> d"),
    "output.weight": ("output", "v d -> v d"),
    "blk.{i}.attn_norm.weight": ("layers.{i}.attention_norm.scale", "d -> d"),
    "blk.{i}.attn_q.weight": ("layers.{i}.attention.q_proj", "(n h) d -> d n h"),
    "blk.{i}.attn_k.weight": ("layers.{i}.attention.k_proj", "(m h) d -> d m h"),
    "blk.{i}.attn_v.weight": ("layers.{i}.attention.v_proj", "(m h) d -> d m h"),
    "blk.{i}.attn_output.weight": ("layers.{i}.attention.o_proj", "d (n h) -> n h d"),
    "blk.{i}.ffn_norm.weight": ("layers.{i}.ffn_norm.scale", "d -> d"),
    "blk.{i}.ffn_gate.weight": ("layers.{i}.ffn.gate_proj", "f d -> d f"),
    "blk.{i}.ffn_up.weight": ("layers.{i}.ffn.up_proj", "f d -> d f"),
    "blk.{i}.ffn_down.weight": ("layers.{i}.ffn.down_proj", "d f -> f d"),
}
TABLES: Mapping[str, Table] = types.MappingProxyType(
    {
        "llama": {
            **_EVERY,
            # The two of a RoPE pair are neighbours.
            "blk.{i}.attn_q.weight": ("layers.{i}.attention.q_proj", "(n i p) d -> d n (p i)"),
            "blk.{i}.attn_k.weight": ("layers.{i}.attention.k_proj", "(m i p) d -> d m (p i)"),
        },
        "qwen2": {
            **_EVERY,
            "blk.{i}.attn_q.bias": ("layers.{i}.attention.q_bias", "(n h) -> n h"),
            "blk.{i}.attn_k.bias": ("layers.{i}.attention.k_bias", "(m h) -> m h"),
            "blk.{i}.attn_v.bias": ("layers.{i}.attention.v_bias", "(m h) -> m h"),
        },
        "qwen3": {
            **_EVERY,
            "blk.{i}.attn_q_norm.weight": ("layers.{i}.attention.q_norm.scale", "h -> h"),
            "blk.{i}.attn_k_norm.weight": ("layers.{i}.attention.k_norm.scale", "h -> h"),
        },
    }
)

_SLOWER = "rope_freqs.weight"

# Our names of what the metadata of every architecture states.
_SIZES = {
    "width": "embedding_length",
    "layers": "block_count",
    "q_heads": "attention.head_count",
    "ffn": "feed_forward_length",
    "max_len": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}
_IMPLIED: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
)


class _Reader(GGUFReader):
    """Refuses what reaches beyond the end of the file, where the base class would read less than was asked for."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        # Not a slice of the memory map, which takes far longer for each of tens of thousands of tokens.
        if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size:
            raise ValueError(f"it ends after {self.data.size} bytes, and at byte {offset} more was to come")
        found = np.frombuffer(self.data, dtype, int(count), int(offset))
        return found.view(found.dtype.newbyteorder(self.byte_order if override_order is None else override_order))


def open_gguf(path: str | os.PathLike[str]) -> GGUFReader:
    """The file, mapped into memory.

    Raises:
      ValueError: It is not a whole GGUF file.
    """
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise ValueError(f"{path}: expected a whole GGUF file: {error}") from error


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Keys and values of the file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def load_gguf(
    path: str | os.PathLike[str], *, dtype: Dtype | None = None, shardings: Shardings | None = None
) -> Decoder:
    """The model of a GGUF file; each weight is dequantised as it is loaded, in float32.

    Args:
      path: of the file.
      dtype: of weights and activations; None for float32.
      shardings: where each weight goes, by its path in our model; None for all on the default device.

    Raises:
      ValueError: The file is broken, of an unknown architecture or quantisation, or its tensors do not fit it.
    """
    reader = open_gguf(path)
    words, tensors = metadata(reader), {tensor.name: tensor for tensor in reader.tensors}
    unknown = [f"{t.name} ({t.tensor_type.name})" for t in tensors.values() if t.tensor_type.name not in QUANTISATIONS]
    if unknown:
        raise ValueError(f"{path}: expected tensors of type {', '.join(QUANTISATIONS)}, got {', '.join(unknown)}")
    config = _config(str(path), words, tied="output.weight" not in tensors, dtype=dtype or "float32")
    if _SLOWER in tensors:
        config = dataclasses.replace(config, rope_scaling=_llama3_scaling(str(path), config, tensors[_SLOWER]))
    found = {name: _stored(tensor) for name, tensor in tensors.items()}
    table = TABLES[words["general.architecture"]]
    return assemble(str(path), config, table, found, shardings, ignored=[_SLOWER])


def _config(path: str, words: Mapping[str, Any], *, tied: bool, dtype: Dtype) -> DecoderConfig:
    kind = words.get("general.architecture")
    if kind not in TABLES:
        raise ValueError(f"{path}: general.architecture: expected one of {', '.join(TABLES)}, got {kind!r}")
    missing = [f"{kind}.{key}" for key in _SIZES.values() if f"{kind}.{key}" not in words]
    if "tokenizer.ggml.tokens" not in words and f"{kind}.vocab_size" not in words:
        missing.append(f"{kind}.vocab_size")
    if missing:
        raise ValueError(f"{path}: metadata is missing: {', '.join(missing)}")
    scaling = words.get(f"{kind}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{path}: {kind}.rope.scaling.type: expected none or linear, got {scaling!r}")
    slower = words.get(f"{kind}.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    found = {ours: words[f"{kind}.{theirs}"] for ours, theirs in _SIZES.items()}
    try:
        head_dim = words.get(f"{kind}.attention.key_length", found["width"] // found["q_heads"])
        return DecoderConfig(
            # Numbers are float32 in the file; these are the decimals that were meant.
            **{**found, "norm_eps": _decimal(found["norm_eps"])},
            vocab=words.get(f"{kind}.vocab_size") or len(words["tokenizer.ggml.tokens"]),
            kv_heads=words.get(f"{kind}.attention.head_count_kv", found["q_heads"]),
            head_dim=head_dim,
            rope_theta=_decimal(words.get(f"{kind}.rope.freq_base", 10_000.0)),
            rope_scaling=RopeScaling("linear", _decimal(slower)) if slower != 1 else None,
            window=words.get(f"{kind}.attention.sliding_window"),
            tied_embeddings=tied,
            dtype=dtype,
            param_dtype=dtype,
            **_IMPLIED[str(kind)],
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: metadata: {error}") from error


def _llama3_scaling(path: str, config: DecoderConfig, tensor: ReaderTensor) -> RopeScaling | None:
    """Llama 3.1's scaling, of which such a file states what each frequency is divided by and not the rule.

    Raises:
      ValueError: The rule gives other divisors.
    """
    divisors = np.asarray(tensor.data, np.float32).reshape(-1)
    scaling = RopeScaling("llama3", _decimal(float(divisors.max(initial=1))))
    plain, slower = (rope_frequencies(config.head_dim, config.rope_theta, s) for s in (None, scaling))
    if divisors.shape != plain.shape or not np.allclose(divisors, plain / slower, rtol=1e-4):
        raise ValueError(
            f"{path}: {_SLOWER}: expected the divisors of Llama 3.1's rule for {plain.size} frequencies, with factor "
            f"{scaling.factor}, got others"
        )
    return scaling if scaling.factor != 1 else None


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32."""
    return float(str(np.float32(value)))


def _stored(tensor: ReaderTensor) -> Stored:
    kind = GGMLQuantizationType(tensor.tensor_type)

    def read(index: Index) -> np.ndarray:
        # Blocks lie along rows, so that rows can be read alone and columns cannot.
        rows, inner = (index[:1], index[1:]) if len(index) > 1 else ((), index)
        part = dequantize(np.asarray(tensor.data[rows]), kind)
        return part[(slice(None),) * len(rows) + inner]

    return Stored(tuple(reversed(tensor.shape.tolist())), read)
