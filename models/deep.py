"""A decoder whose layers are one loop over stacked weights: a program as long as one layer's, however many there are.

It computes what `models.decoder` does and compiles in seconds, which suits programs that are only looked at. Serving
does better without the loop, as a compiler that sees all layers overlaps the end of one with the beginning of the next.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, PyTree

from models.config import DecoderConfig
from models.decoder import Decode, Decoder, Params, abstract_decoder
from models.layers import run_layer
from models.split import WHOLE, Split, weight_spec
from paxkv.kv_cache import Attend, KVCache, attend_layer
from paxkv.sharding import RULES, Rules


@dataclasses.dataclass(frozen=True)
class DeepDecode:
    """`Decode` over weights from `stack_layers` and a cache of one entry, in which all layers lie.

    Raises:
      ValueError: the layers differ in more than their weights.
    """

    config: DecoderConfig  # of the whole, or of a device's part
    split: Split = WHOLE

    def __post_init__(self) -> None:
        windows = {self.config.window_of(layer) for layer in range(self.config.layers)}
        if len(windows) > 1:
            raise ValueError(
                f"config: expected layers that all see equally far, got windows {sorted(map(str, windows))}"
            )

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float32[Array, "rows vocab"], KVCache]:
        """See `Decoder.__call__`; `attend` is a `DeepAttend`."""
        stacked = params["layers"]

        def with_layer(layer: Params) -> Decoder:
            one = dataclasses.replace(self.config, layers=1)
            return Decode(one, self.split).model({**params, "layers": {0: layer}})

        def run(carry: tuple, given: tuple) -> tuple[tuple, None]:
            x, cache = carry
            layer, weights = given
            of_layer = functools.partial(run_layer, with_layer(weights).layers[0], x, positions)
            return attend_layer(attend, layer, cache, of_layer), None

        ends = with_layer(jax.tree.map(lambda weights: weights[0], stacked))
        layers = jnp.arange(self.config.layers, dtype=jnp.int32)
        (x, cache), _ = jax.lax.scan(run, (ends.embed(tokens), cache), (layers, stacked))
        return ends.logits(x, select), cache


def stack_layers(params: Params) -> Params:
    """A model's weights, those of its layers on top of one another: `[layers, ...]`."""
    layers = [params["layers"][i] for i in range(len(params["layers"]))]
    return {**params, "layers": jax.tree.map(lambda *weights: jnp.stack(weights), *layers)}


def abstract_stacked(config: DecoderConfig, mesh: Mesh, rules: Rules = RULES) -> PyTree[jax.ShapeDtypeStruct]:
    """What `stack_layers` gives for a model, as shapes and dtypes and where they lie."""
    params = nnx.as_pure(nnx.state(abstract_decoder(dataclasses.replace(config, layers=1))))

    def of(path: tuple, weight: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape, spec = weight.shape, weight_spec(name, rules)
        if name.startswith("layers."):
            shape, spec = (config.layers, *shape), PartitionSpec(None, *spec)
        return jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(of, {**params, "layers": params["layers"][0]})
