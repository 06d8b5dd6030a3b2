"""From the tensors of a file to a decoder: every name and shape is checked before the first weight is read."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.checkpoint import by_name
from models.config import DecoderConfig
from models.decoder import Decode, Decoder, abstract_decoder, make_decode
from models.formats.layout import Index, Read, axis_sizes, read_part, stored_shape, to_stored

# A file's name of a weight -> the weight's path in our model, and how its axes lie. `{i}` is a layer.
Table = Mapping[str, tuple[str, str]]

# Where each weight goes, by its path in our model.
Shardings = Callable[[str], jax.sharding.Sharding]

_ROWS_AT_ONCE = 1024  # of two tensors that are compared


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file, not read yet."""

    shape: tuple[int, ...]
    read: Read  # the part at an index; whatever the file stores, these are numbers


def assemble(
    source: str,
    config: DecoderConfig,
    table: Table,
    found: Mapping[str, Stored],
    shardings: Shardings | None = None,
    *,
    ignored: Iterable[str] = (),
) -> Decoder:
    """Reads a model's weights, one tensor or one device's part of it at a time, and puts each where it goes.

    Args:
      source: what is read, for errors.
      config: of the model; weights are stored in its `param_dtype`.
      table: where each tensor of the file goes.
      found: the tensors of the file.
      shardings: where each weight goes; None for all on the default device.
      ignored: tensors that may be there and mean nothing.

    Raises:
      ValueError: Tensors are missing, surplus or of another shape, all of them named; or the head of a model with tied
        embeddings is there and differs.
    """
    if config.layers > len(found):  # before a list of so many is made
        raise ValueError(f"{source}: expected weights of {config.layers} layers, got {len(found)} tensors in all")
    sizes, places, abstract = axis_sizes(config), _places(config, table), _abstract(config)
    weights = by_name(abstract)
    needed = dict(places[path] for path in weights)
    tied_head = {places["output"][0]} & found.keys() if config.tied_embeddings and "output" in places else set()
    wrong = [
        f"{name}: expected {stored_shape(layout, sizes)}, "
        + (f"got {found[name].shape}" if name in found else "it is missing")
        for name, layout in needed.items()
        if name not in found or found[name].shape != stored_shape(layout, sizes)
    ]
    known = needed.keys() | set(ignored) | tied_head
    wrong += [f"{name}: expected none of that name, got {found[name].shape}" for name in sorted(found.keys() - known)]
    if wrong:
        raise ValueError(f"{source}: {len(wrong)} tensors are not as its config asks for:\n  " + "\n  ".join(wrong))
    for name in tied_head:
        _require_equal(source, name, found[name], found[places["embedding"][0]])

    def load(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        name, layout = places[path]

        def read(index: Index) -> np.ndarray:
            part = read_part(layout, sizes, found[name].read, index)
            # A copy in any case: an array must not change, or vanish, with the file.
            return np.array(part, like.dtype, order="C")

        if shardings is None:
            return jnp.asarray(read(tuple(slice(None) for _ in like.shape)))
        return _put(like, shardings(path), read)

    loaded = [load(path, like) for path, like in weights.items()]
    return Decode(config).model(jax.tree.structure(abstract).unflatten(loaded))


def disassemble(model: Decoder, table: Table) -> dict[str, np.ndarray]:
    """The weights of a model under a file's names and as a file has them."""
    sizes, places = axis_sizes(model.config), _places(model.config, table)
    return {
        places[path][0]: np.ascontiguousarray(to_stored(places[path][1], sizes, np.asarray(weight)))
        for path, weight in by_name(make_decode(model)[1]).items()
    }


def _places(config: DecoderConfig, table: Table) -> dict[str, tuple[str, str]]:
    """For each weight that a model of so many layers can have, by its path: its name in the file, and its layout."""
    return {
        path.format(i=i): (name.format(i=i), layout)
        for name, (path, layout) in table.items()
        for i in range(config.layers)
    }


def _abstract(config: DecoderConfig) -> Any:
    return nnx.as_pure(nnx.state(abstract_decoder(config)))


def _put(like: Any, sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """Reads each device's part; devices that hold the same part are served by one reading."""
    last: dict[str, np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        index = index or ()  # of a scalar
        if str(index) not in last:
            last.clear()
            last[str(index)] = read(index)
        return last[str(index)]

    return jax.make_array_from_callback(like.shape, sharding, part)  # pyright: ignore[reportArgumentType]


def _require_equal(source: str, name: str, head: Stored, embedding: Stored) -> None:
    for row in range(0, embedding.shape[0], _ROWS_AT_ONCE):
        index = (slice(row, min(row + _ROWS_AT_ONCE, embedding.shape[0])), slice(0, embedding.shape[1]))
        if head.shape != embedding.shape or not np.array_equal(head.read(index), embedding.read(index)):
            raise ValueError(
                f"{source}: {name}: expected the embedding's values, as the config says that the two are tied, "
                "got others; a model with a head of its own says so in its config"
            )
