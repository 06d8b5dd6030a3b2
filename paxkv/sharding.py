"""How devices share a server: a mesh of replicas, KV heads and KV blocks, and which axes of arrays lie on which.

Three numbers say it all: `data` replicas of the server, each serving requests of its own; within a replica `model`
devices that share heads and weights; and `kv` devices that share the blocks, for more memory than KV heads can be split
over, and for sequences longer than the memory of one device.

Heads are split as far as they go. The `model` devices are a grid: `model` parts of the KV heads, `group` parts of the
query heads that read one KV head, which is then stored on each of them, and `copy` devices that do the same attention.
Weights without heads are split over all.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from paxkv.sizes import require_int

AXES = ("data", "model", "group", "copy", "kv")

_FIXED: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "replicas": ("data",),
        "kv_heads": ("model",),
        "q_heads": ("model", "group"),
        "slots": ("kv",),
        "counts": ("model", "kv"),  # one for each part of a cache
    }
)
_CHOICES: Mapping[str, tuple[str, ...]] = types.MappingProxyType({"model": ("model", "group", "copy"), "kv": ("kv",)})


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which axes of the mesh each logical axis of an array is split over: `rules["q_heads"]`.

    Attributes:
      ffn: `model`, `kv`, both or none, for the inner width of feed-forward blocks.
      vocab: the same for the vocabulary.

    Raises:
      ValueError: an axis is none of these.
    """

    ffn: tuple[str, ...] = ("model", "kv")
    vocab: tuple[str, ...] = ("model", "kv")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            axes = getattr(self, field.name)
            if not set(axes) <= _CHOICES.keys() or len(set(axes)) < len(axes):
                raise ValueError(f"{field.name}: expected model, kv, both or none, got {list(axes)}")

    def __getitem__(self, axis: str) -> tuple[str, ...]:
        """The axes of the mesh; empty for an array that every device has whole."""
        return _FIXED[axis] if axis in _FIXED else tuple(a for name in getattr(self, axis) for a in _CHOICES[name])


RULES = Rules()
"""Everything is split that can be."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """So many replicas of a server, of so many parts of the heads, of so many parts of the blocks.

    Raises:
      ValueError: a number is not positive.
    """

    data: int = 1
    model: int = 1
    kv: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_int(field.name, getattr(self, field.name))

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model * self.kv

    @property
    def name(self) -> str:
        """In short: `d1m8k1`."""
        return f"d{self.data}m{self.model}k{self.kv}"


def make_mesh(
    shape: MeshShape,
    q_heads: int,
    kv_heads: int,
    *,
    replicate_kv_heads: bool = False,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The mesh for a model with these heads, with axes `AXES`.

    Args:
      shape: how many parts of what.
      q_heads: of the model.
      kv_heads: of the model; `shape.model` must divide it, or be a multiple of it with `replicate_kv_heads`.
      replicate_kv_heads: whether several devices may store the same KV head.
      devices: to take the first of; those of the default backend if None.

    Raises:
      ValueError: the heads cannot be shared out, or there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.size:
        raise ValueError(
            f"mesh: expected at most {len(devices)} devices, which is what there is, got {shape.size}; take a smaller "
            "mesh, or more devices"
        )
    sizes = (shape.data, *head_parts(shape.model, q_heads, kv_heads, replicate_kv_heads), shape.kv)
    return jax.make_mesh(sizes, AXES, (AxisType.Explicit,) * len(AXES), devices=devices[: shape.size])


def head_parts(model: int, q_heads: int, kv_heads: int, replicate_kv_heads: bool) -> tuple[int, int, int]:
    """Parts of the KV heads, parts of the query heads of each, and devices that do the same, `model` in all.

    Raises:
      ValueError: see `make_mesh`.
    """
    if kv_heads % model == 0:
        return model, 1, 1
    if model % kv_heads or not replicate_kv_heads:
        raise ValueError(
            f"mesh.model: expected a divisor of the {kv_heads} KV heads, or a multiple of them with "
            f"replicate_kv_heads=True, got {model}"
        )
    group = math.gcd(model // kv_heads, q_heads // kv_heads)
    return kv_heads, group, model // kv_heads // group


def put(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, each part on its device; devices may be other processes'."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def to_host(tree: PyTree) -> Any:
    """All of some arrays, whatever process has which part of them; every process has to ask."""
    if not all(x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(tree)):
        tree = _whole(tree)
    return jax.device_get(tree)  # all at once, not one after another


def everywhere(tree: PyTree[Int32[Array, "replicas ..."]]) -> Any:
    """Within jit: the same arrays, whole on every device, so that every process can read them.

    They travel as one array: each exchange between processes costs more than all that a host wants to know.
    """
    leaves, treedef = jax.tree.flatten(tree)
    by_replica = NamedSharding(jax.typeof(leaves[0]).sharding.mesh, partition(("replicas", None)))
    parts = [jnp.reshape(x, (x.shape[0], -1), out_sharding=by_replica) for x in leaves]
    ends = np.cumsum([part.shape[1] for part in parts])
    columns = jnp.split(_replicated(jnp.concatenate(parts, axis=1)), ends[:-1].tolist(), axis=1)
    return treedef.unflatten([column.reshape(x.shape) for column, x in zip(columns, leaves, strict=True)])


def _replicated(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, partition(())))


_whole = jax.jit(lambda tree: jax.tree.map(_replicated, tree))


def partition(axes: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """Where an array with these logical axes lies; None is an axis that is not split."""
    return PartitionSpec(*(None if axis is None else rules[axis] or None for axis in axes))


def parts(axis: str, mesh: Mesh | Mapping[str, int], rules: Rules = RULES) -> int:
    """Into how many parts a logical axis is split."""
    sizes = mesh if isinstance(mesh, Mapping) else mesh.shape
    return math.prod(sizes[name] for name in rules[axis])
