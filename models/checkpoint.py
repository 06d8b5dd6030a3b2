"""A model on disk: `config.json` beside the weights in orbax's format.

Weights are saved as NumPy arrays under the names of their places in the model, so a checkpoint says nothing of the
devices, the machine or the folder it was written on, and can be loaded anywhere.
"""

import hashlib
import json
import os
import pathlib
import shutil
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

CONFIG = "config.json"
RECORD = "training.json"  # how the weights came about
CARD = "README.md"
WEIGHTS = "weights"


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuses a path that is taken.

    Raises:
      FileExistsError: Something is there and `overwrite` is false.
    """
    if pathlib.Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another path, or set overwrite to replace it")


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
    final = pathlib.Path(path).resolve()
    check_free(final, overwrite)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _, params = make_decode(model)
    weights = {name: np.asarray(array) for name, array in _by_name(params).items()}
    ocp.save(str(partial / WEIGHTS), weights)
    # orbax writes the folder's full path into this file; only that the file is there means anything.
    (partial / WEIGHTS / "commit_success.txt").write_text("committed\n")
    (partial / CONFIG).write_text(json.dumps(model.config.as_dict(), indent=2) + "\n")
    for name, text in (files or {}).items():
        (partial / name).write_text(text)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def load_checkpoint(path: str | os.PathLike[str]) -> Decoder:
    """The model at `path`, on the default device. Writes nothing.

    Raises:
      FileNotFoundError: There is no checkpoint at `path`.
      ValueError: The weights are not those its config asks for.
    """
    folder = pathlib.Path(path).resolve()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: {CONFIG} is missing")
    config = DecoderConfig.of_dict(json.loads((folder / CONFIG).read_text()))
    abstract = nnx.as_pure(nnx.state(abstract_decoder(config)))
    expected = _by_name(abstract)
    found = ocp.load(str(folder / WEIGHTS))
    shapes = {name: array.shape for name, array in found.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        want = expected[name].shape if name in expected else None
        if shapes.get(name) != want:
            raise ValueError(f"{path}: weight {name} should have shape {want}, found {shapes.get(name)}")
    params = jax.tree.structure(abstract).unflatten(jnp.asarray(found[name]) for name in expected)
    return Decode(config).model(params)


def model_sha256(model: Decoder) -> str:
    """Hash of a model's config and weights, whatever files they came from: of name, type, shape and bytes of each."""
    _, params = make_decode(model)
    digest = hashlib.sha256(json.dumps(model.config.as_dict(), sort_keys=True).encode())
    for name, array in sorted(_by_name(params).items()):
        weights = np.asarray(array)
        digest.update(f"\n{name} {weights.dtype.str} {weights.shape}\n".encode())
        digest.update(weights.tobytes())
    return digest.hexdigest()


def load_record(path: str | os.PathLike[str]) -> dict:
    """How the checkpoint at `path` was trained: config, command, text, versions, results."""
    return json.loads((pathlib.Path(path) / RECORD).read_text())


def _by_name(weights: PyTree) -> dict[str, Any]:
    """Every weight under its path in the model, such as `layers.0.attention.q_proj`, in the order of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
