"""One door for every format: what lies at a path says which it is."""

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp

from models.checkpoint import CONFIG, WEIGHTS, by_name, load_checkpoint
from models.config import Dtype
from models.decoder import Decode, Decoder, make_decode
from models.formats import gguf, hugging_face, llama2c
from models.formats.tensors import Shardings
from models.formats.tokenizers import (
    TOKENIZER,
    load_gguf_tokenizer,
    load_llama2c_json,
    load_llama2c_tokenizer,
    load_tokenizer_json,
)
from models.json_file import read_json
from models.tokenizer import Bytes, Tokenizer

_EXPECTED = (
    f"a folder with {CONFIG} and {hugging_face.WEIGHTS} or {hugging_face.INDEX} (Hugging Face), a folder with {CONFIG} "
    f"and {WEIGHTS}/ (ours), a GGUF file, or a llama2.c file whose name ends in .bin"
)
_LLAMA2C_JSON = "tokenizer_llama2c.json"
_IDS = "tokenizer_config.json"
_LISTED = 8  # names of a folder without a model


def recognise(path: str | os.PathLike[str]) -> str:
    """`checkpoint` (our own), `hugging_face`, `gguf` or `llama2c`, by what lies there; its contents are not checked.

    Raises:
      FileNotFoundError: Nothing is there.
      ValueError: It is none of these.
    """
    place = pathlib.Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{path}: expected {_EXPECTED}; nothing is there")
    if place.is_dir():
        names = {entry.name for entry in place.iterdir()}
        if CONFIG in names and WEIGHTS in names:
            return "checkpoint"
        if CONFIG in names and names & {hugging_face.WEIGHTS, hugging_face.INDEX}:
            return "hugging_face"
        listed = ", ".join(sorted(names)[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        raise ValueError(f"{path}: expected {_EXPECTED}; found a folder with {listed or 'nothing'}")
    with place.open("rb") as file:
        start = file.read(len(gguf.MAGIC))
    if start == gguf.MAGIC:
        return "gguf"
    if place.suffix == ".bin":
        return "llama2c"
    raise ValueError(f"{path}: expected {_EXPECTED}; found a file that begins with {start!r}")


def load_model(
    path: str | os.PathLike[str], *, dtype: Dtype | None = None, shardings: Shardings | None = None
) -> Decoder:
    """The model at `path`, in whatever of the known formats it lies there.

    Args:
      path: of a folder or a file.
      dtype: of weights and activations; None for what is stored, float32 where that is quantised.
      shardings: where each weight goes, by its path in our model, such as `layers.0.attention.q_proj`; None for all on
        the default device. Foreign formats are read one device's part of a weight at a time.

    Raises:
      FileNotFoundError: Nothing is there.
      ValueError: What is there is of no known format, or not a whole model of its format.
    """
    loaders = {
        "hugging_face": hugging_face.load_hugging_face,
        "gguf": gguf.load_gguf,
        "llama2c": llama2c.load_llama2c,
    }
    found = recognise(path)
    if found in loaders:
        return loaders[found](path, dtype=dtype, shardings=shardings)
    return _changed(load_checkpoint(path), dtype, shardings)


def _changed(model: Decoder, dtype: Dtype | None, shardings: Shardings | None) -> Decoder:
    decode, params = make_decode(model)
    if dtype is not None:
        decode = Decode(dataclasses.replace(decode.config, dtype=dtype, param_dtype=dtype))
        params = jax.tree.map(lambda weight: weight.astype(jnp.dtype(dtype)), params)
    if shardings is not None:
        placed = [jax.device_put(weight, shardings(name)) for name, weight in by_name(params).items()]
        params = jax.tree.structure(params).unflatten(placed)
    return decode.model(params)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that lies with the model at `path`; bytes, if there is none and the model reads bytes.

    Raises:
      FileNotFoundError: Nothing is there.
      ValueError: There is no tokenizer, or a broken one.
    """
    place, kind = pathlib.Path(path), recognise(path)
    if kind == "gguf":
        return load_gguf_tokenizer(place)
    if kind == "llama2c":
        vocab = llama2c.read_header(place).vocab
        names = ("tokenizer.bin", f"tok{vocab}.bin")
        for name in names:
            if (place.parent / name).exists():
                return load_llama2c_tokenizer(place.parent / name, vocab)
        raise ValueError(f"{path}: expected its tokenizer beside it, as {' or '.join(names)}")
    described = read_json(place / CONFIG)
    if (place / TOKENIZER).exists():
        # Our own config says nothing of ids.
        beside = read_json(place / _IDS) if kind == "checkpoint" and (place / _IDS).exists() else described
        return load_tokenizer_json(place, beside)
    if (place / _LLAMA2C_JSON).exists():
        return load_llama2c_json(place / _LLAMA2C_JSON)
    if Bytes().vocab in (described.get("vocab"), described.get("vocab_size")):
        return Bytes()
    raise ValueError(f"{path}: expected {TOKENIZER}, or {_LLAMA2C_JSON}, in the folder; neither is there")
