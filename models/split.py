"""A decoder whose weights lie across devices: tensor parallelism, as each device computes it inside `jax.shard_map`.

Every device holds some heads, some of the inner width of the feed-forward blocks and some of the vocabulary, and runs
the same decoder of a smaller config. What must be summed over devices is summed in three places: behind the output
projection of attention, behind the feed-forward block, and for the embedding; the logits are gathered. (Shoeybi et al.
2019, arXiv 1909.08053.)
"""

import dataclasses
import types
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from models.config import DecoderConfig
from paxkv.sharding import RULES, Rules, partition, parts, put


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of a mesh the parts of a decoder lie; none where each device has the whole."""

    heads: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


WHOLE = Split()
"""A decoder on one device."""

_AXES: Mapping[str, tuple[str | None, ...]] = types.MappingProxyType(
    {
        "embedding": ("vocab", None),
        "output": ("vocab", None),
        "q_proj": (None, "q_heads", None),
        "k_proj": (None, "kv_heads", None),
        "v_proj": (None, "kv_heads", None),
        "o_proj": ("q_heads", None, None),
        "q_bias": ("q_heads", None),
        "k_bias": ("kv_heads", None),
        "v_bias": ("kv_heads", None),
        "gate_proj": (None, "ffn"),
        "up_proj": (None, "ffn"),
        "down_proj": ("ffn", None),
        "scale": (None,),
    }
)


def split_of(mesh: Mesh, rules: Rules = RULES) -> Split:
    """How `rules` split a decoder over the mesh; axes of one device are left out, so that nothing is summed in vain."""
    heads, ffn, vocab = (
        tuple(name for name in rules[axis] if mesh.shape[name] > 1) for axis in ("q_heads", "ffn", "vocab")
    )
    return Split(heads, ffn, vocab)


def device_config(config: DecoderConfig, mesh: Mesh | Mapping[str, int], rules: Rules = RULES) -> DecoderConfig:
    """The decoder that one device holds.

    Raises:
      ValueError: a size cannot be shared out evenly.
    """
    sizes = {"q_heads": config.q_heads, "kv_heads": config.kv_heads, "ffn": config.ffn, "vocab": config.vocab}
    for axis, size in sizes.items():
        if size % parts(axis, mesh, rules):
            raise ValueError(
                f"{axis}: expected a multiple of the {parts(axis, mesh, rules)} parts of the mesh, got {size}; use "
                "another mesh" + ("" if "heads" in axis else f", or rules that split {axis} less")
            )
    return dataclasses.replace(config, **{axis: size // parts(axis, mesh, rules) for axis, size in sizes.items()})


def weight_spec(name: str, rules: Rules = RULES) -> PartitionSpec:
    """Where a weight lies, by its path in the model, such as `layers.0.attention.q_proj`."""
    return partition(_AXES[name.rpartition(".")[2]], rules)


def weight_specs(params: PyTree, rules: Rules = RULES) -> PyTree:
    """The same for all weights of a model."""

    def of(path: tuple, weight: object) -> PartitionSpec:
        del weight
        return weight_spec(jax.tree_util.keystr(path, simple=True, separator="."), rules)

    return jax.tree_util.tree_map_with_path(of, params)


def place_weights(params: PyTree, mesh: Mesh, rules: Rules = RULES) -> PyTree:
    """A model's weights, each where it belongs. To load a large model so from its files, see `load_model`."""
    return jax.tree.map(lambda w, spec: put(w, NamedSharding(mesh, spec)), params, weight_specs(params, rules))


def add_up(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The sum over devices of what each has computed with its part of a weight."""
    return jax.lax.psum(x, axes) if axes else x


def look_up(
    table: Float[Array, "vocab width"], tokens: Int32[Array, " tokens"], axes: tuple[str, ...]
) -> Float[Array, "tokens width"]:
    """Rows of an embedding of which each device has some; NaN for an id that none of them has."""
    rows = table.shape[0]
    if not axes:
        return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    own = tokens - jax.lax.axis_index(axes) * rows
    found = table.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    known = (tokens >= 0) & (tokens < rows * jax.lax.axis_size(axes))
    return jnp.where(known[:, None], add_up(found, axes), jnp.nan)


def gather_logits(logits: Float[Array, "rows part"], axes: tuple[str, ...]) -> Float[Array, "rows vocab"]:
    """The logits of the whole vocabulary, on every device."""
    return jax.lax.all_gather(logits, axes, axis=1, tiled=True) if axes else logits
