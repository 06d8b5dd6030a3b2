"""Folders as Hugging Face's transformers reads and writes them: `config.json` and safetensors, in one file or more."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import Dtype
from models.decoder import Decoder
from models.formats.hugging_face_config import config_from_json, config_to_json
from models.formats.layout import Index
from models.formats.tensors import Shardings, Stored, Table, assemble, disassemble
from models.json_file import read_json
from models.whole_folder import whole_folder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BIGGEST_FILE = 4 * 2**30  # bytes of weights; more go into several files

_EVERY: Table = {
    "model.embed_tokens.weight": ("embedding", "v d -> v d"),
    "model.norm.weight": ("norm.scale", "d -> d"),
    "lm_head.weight": ("output", "v d -> v d"),
    "model.layers.{i}.input_layernorm.weight": ("layers.{i}.attention_norm.scale", "d -> d"),
    "model.layers.{i}.self_attn.q_proj.weight": ("layers.{i}.attention.q_proj", "(n h) d -> d n h"),
    "model.layers.{i}.self_attn.k_proj.weight": ("layers.{i}.attention.k_proj", "(m h) d -> d m h"),
    "model.layers.{i}.self_attn.v_proj.weight": ("layers.{i}.attention.v_proj", "(m h) d -> d m h"),
    "model.layers.{i}.self_attn.o_proj.weight": ("layers.{i}.attention.o_proj", "d (n h) -> n h d"),
    "model.layers.{i}.mlp.gate_proj.weight": ("layers.{i}.ffn.gate_proj", "f d -> d f"),
    "model.layers.{i}.mlp.up_proj.weight": ("layers.{i}.ffn.up_proj", "f d -> d f"),
    "model.layers.{i}.mlp.down_proj.weight": ("layers.{i}.ffn.down_proj", "d f -> f d"),
}
_TWO_NORMS: Table = {
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.ffn_norm.scale", "d -> d"),
}
_FOUR_NORMS: Table = {  # where the name that the others give to the second norm is that of the first post norm
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.attention_post_norm.scale", "d -> d"),
    "model.layers.{i}.pre_feedforward_layernorm.weight": ("layers.{i}.ffn_norm.scale", "d -> d"),
    "model.layers.{i}.post_feedforward_layernorm.weight": ("layers.{i}.ffn_post_norm.scale", "d -> d"),
}
_BIAS: Table = {
    "model.layers.{i}.self_attn.q_proj.bias": ("layers.{i}.attention.q_bias", "(n h) -> n h"),
    "model.layers.{i}.self_attn.k_proj.bias": ("layers.{i}.attention.k_bias", "(m h) -> m h"),
    "model.layers.{i}.self_attn.v_proj.bias": ("layers.{i}.attention.v_bias", "(m h) -> m h"),
}
_HEAD_NORMS: Table = {
    "model.layers.{i}.self_attn.q_norm.weight": ("layers.{i}.attention.q_norm.scale", "h -> h"),
    "model.layers.{i}.self_attn.k_norm.weight": ("layers.{i}.attention.k_norm.scale", "h -> h"),
}
TABLES: Mapping[str, Table] = types.MappingProxyType(
    {
        "LlamaForCausalLM": {**_EVERY, **_TWO_NORMS},
        "MistralForCausalLM": {**_EVERY, **_TWO_NORMS},
        "Qwen2ForCausalLM": {**_EVERY, **_TWO_NORMS, **_BIAS},
        "Qwen3ForCausalLM": {**_EVERY, **_TWO_NORMS, **_HEAD_NORMS},
        "Gemma2ForCausalLM": {**_EVERY, **_FOUR_NORMS},
        "Gemma3ForCausalLM": {**_EVERY, **_FOUR_NORMS, **_HEAD_NORMS},
    }
)
# Constants that old files carry among the weights.
_IGNORED = "model.layers.{i}.self_attn.rotary_emb.inv_freq"


def load_hugging_face(
    path: str | os.PathLike[str], *, dtype: Dtype | None = None, shardings: Shardings | None = None
) -> Decoder:
    """The model of a folder with `config.json` and `model.safetensors`, or its index of several files.

    Args:
      path: of the folder.
      dtype: of weights and activations; None for what `config.json` says.
      shardings: where each weight goes, by its path in our model; None for all on the default device.

    Raises:
      ValueError: Files are broken or missing, or config and weights do not fit each other or our decoder.
    """
    folder = pathlib.Path(path)
    described = read_json(folder / CONFIG)
    try:
        config = config_from_json(described)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    ignored = (_IGNORED.format(i=i) for i in range(config.layers))
    with _open_tensors(folder) as found:
        table = TABLES[described["architectures"][0]]
        return assemble(str(folder), config, table, found, shardings, ignored=ignored)


def save_hugging_face(
    path: str | os.PathLike[str],
    model: Decoder,
    files: Mapping[str, str] | None = None,
    *,
    words: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    biggest_file: int = _BIGGEST_FILE,
) -> None:
    """Writes a folder that `load_hugging_face` and transformers read; it appears at once, under its final name.

    Args:
      path: of the folder.
      model: what to write.
      files: further text files, such as `tokenizer.json`.
      words: further entries of `config.json`, such as `eos_token_id`.
      overwrite: whether to replace what is there.
      biggest_file: bytes of weights in a file; more go into several files and an index.

    Raises:
      FileExistsError: `path` is taken and `overwrite` is false.
      ValueError: No architecture of theirs describes the model.
    """
    described = config_to_json(model.config)
    weights = disassemble(model, TABLES[described["architectures"][0]])
    with whole_folder(path, overwrite=overwrite) as folder:
        (folder / CONFIG).write_text(json.dumps({**described, **(words or {})}, indent=2) + "\n")
        shards = _shards(weights, biggest_file)
        for name, shard in shards.items():
            save_file(shard, folder / name, metadata={"format": "pt"})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
                "weight_map": {name: file for file, shard in shards.items() for name in shard},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, text in (files or {}).items():
            (folder / name).write_text(text)


def _shards(weights: Mapping[str, np.ndarray], biggest_file: int) -> dict[str, dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and sum(w.nbytes for w in shards[-1].values()) + weight.nbytes > biggest_file:
            shards.append({})
        shards[-1][name] = weight
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}.safetensors": shard for n, shard in enumerate(shards, 1)}


@contextlib.contextmanager
def _open_tensors(folder: pathlib.Path) -> Iterator[dict[str, Stored]]:
    """The tensors of all files, which stay open, and are read piece by piece, within the context."""
    with contextlib.ExitStack() as stack:
        try:
            files = {name: stack.enter_context(safe_open(folder / name, "np")) for name in _files(folder)}
            keys = [(key, file) for file in files.values() for key in file.keys()]  # noqa: SIM118
            slices = {key: file.get_slice(key) for key, file in keys}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder}: expected whole safetensors files, got {error}") from error
        if len(slices) < len(keys):
            times = collections.Counter(key for key, _ in keys)
            twice = [key for key, count in times.items() if count > 1]
            raise ValueError(f"{folder}: expected each tensor in one file, got several of {', '.join(sorted(twice))}")
        yield {key: _stored(key, part) for key, part in slices.items()}


def _files(folder: pathlib.Path) -> list[str]:
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{folder / INDEX}: expected weight_map, the file of each tensor, got {files!r}")
    names = sorted(set(files.values()))
    outside = [name for name in names if pathlib.PurePath(name).name != name]
    if outside:
        raise ValueError(f"{folder / INDEX}: expected files beside it, got {', '.join(outside)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder / INDEX}: expected the files that it lists; missing: {', '.join(missing)}")
    return names


def _stored(name: str, part: Any) -> Stored:
    if part.get_dtype() not in ("F32", "F16", "BF16"):
        raise ValueError(f"{name}: expected F32, F16 or BF16, got {part.get_dtype()}")

    def read(index: Index) -> np.ndarray:
        return part[index]

    return Stored(tuple(part.get_shape()), read)
