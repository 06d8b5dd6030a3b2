"""A model on disk: `config.json` beside the weights in orbax's format.

Weights are saved as NumPy arrays under the names of their places in the model, so a checkpoint says nothing of the
devices, the machine or the folder it was written on, and can be loaded anywhere.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from models.config import DecoderConfig
from models.decoder import Decode, Decoder, abstract_decoder, make_decode
from models.json_file import read_json
from models.whole_folder import whole_folder

CONFIG = "config.json"
RECORD = "training.json"  # how the weights came about
CARD = "README.md"
WEIGHTS = "weights"
WEIGHTS_SHA256 = "weights.sha256"  # of the arrays by name: orbax itself reads a flipped bit without a word


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Decoder,
    files: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes config, weights and further text `files`; all of it appears at once, under its final name.

    Raises:
      FileExistsError: `path` is taken and `overwrite` is false.
    """
    _, params = make_decode(model)
    weights = {name: np.asarray(array) for name, array in by_name(params).items()}
    with whole_folder(path, overwrite=overwrite) as folder:
        ocp.save(str(folder / WEIGHTS), weights)
        # orbax writes the folder's full path into this file; only that the file is there means anything.
        (folder / WEIGHTS / "commit_success.txt").write_text("committed\n")
        (folder / WEIGHTS_SHA256).write_text(arrays_sha256(weights) + "\n")
        (folder / CONFIG).write_text(json.dumps(model.config.as_dict(), indent=2) + "\n")
        for name, text in (files or {}).items():
            (folder / name).write_text(text)


def load_checkpoint(path: str | os.PathLike[str]) -> Decoder:
    """The model at `path`, on the default device. Writes nothing.

    Raises:
      FileNotFoundError: There is no checkpoint at `path`.
      ValueError: Config or weights are broken, or the weights are not those its config asks for.
    """
    folder = pathlib.Path(path).resolve()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: {CONFIG} is missing")
    described = read_json(folder / CONFIG)
    try:
        config = DecoderConfig.of_dict(described)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    found = _load_weights(folder / WEIGHTS)
    if config.layers > len(found):  # before so many are made
        raise ValueError(f"{path}: expected weights of {config.layers} layers, got {len(found)} weights in all")
    abstract = nnx.as_pure(nnx.state(abstract_decoder(config)))
    expected = by_name(abstract)
    shapes, wanted = ({name: array.shape for name, array in some.items()} for some in (found, expected))
    wrong = [
        f"weight {name} should have shape {wanted.get(name)}, found {shapes.get(name)}"
        for name in sorted(wanted.keys() | shapes.keys())
        if shapes.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(f"{path}: " + "; ".join(wrong))
    digest = folder / WEIGHTS_SHA256
    if digest.is_file() and digest.read_text().strip() != arrays_sha256(found):
        raise ValueError(f"{path}: {WEIGHTS}: expected arrays of the hash in {WEIGHTS_SHA256}, got others: damaged")
    params = jax.tree.structure(abstract).unflatten(jnp.asarray(found[name]) for name in expected)
    return Decode(config).model(params)


def _load_weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The weights by name, as orbax reads them."""
    try:
        found: Any = ocp.load(str(folder))
    except Exception as error:  # orbax raises whatever its storage does
        raise ValueError(f"{folder}: expected weights in orbax's format, whole: {error}") from error
    if not isinstance(found, dict) or not all(hasattr(array, "shape") for array in found.values()):
        raise ValueError(f"{folder}: expected weights by name in orbax's format, got something else")
    return found


def model_sha256(model: Decoder) -> str:
    """Hash of a model's config and weights, whatever files they came from."""
    _, params = make_decode(model)
    return arrays_sha256(by_name(params), preamble=json.dumps(model.config.as_dict(), sort_keys=True))


def arrays_sha256(arrays: Mapping[str, jax.Array | np.ndarray], preamble: str = "") -> str:
    """Hash of the preamble, then of name, type, shape and bytes of each array in the order of their names."""
    digest = hashlib.sha256(preamble.encode())
    for name, array in sorted(arrays.items()):
        values = np.asarray(array)
        digest.update(f"\n{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How the checkpoint at `path` was trained: config, command, text, versions, results.

    Raises:
      ValueError: The record is missing or broken.
    """
    return read_json(pathlib.Path(path) / RECORD)


def by_name(weights: PyTree) -> dict[str, Any]:
    """Every weight under its path in the model, such as `layers.0.attention.q_proj`, in the order of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
