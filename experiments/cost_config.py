"""The knobs of the modelled clock, and the one function that makes a cost model of them."""

import dataclasses
import difflib
from typing import Literal

from pallas_kernels.targets import TARGETS
from paxkv.cost_model import CostModel, StepCost
from paxkv.model_shapes import KVShape, model_shape
from paxkv.model_sizes import model_size
from paxkv.roofline import Efficiencies, WeightDtype, make_roofline


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """How long steps take. A knob that its kind does not have must keep its default.

    Attributes:
      kind: `affine`, so many nanoseconds for each thing that a step does, or `roofline`, what hardware allows.
      step_ns: affine: of a step however little it does.
      token_ns: affine: of each token that is computed.
      kv_token_ns: affine: of each stored token that attention reads.
      map_call_ns: affine: of each call into the virtual-memory driver that a step waits for.
      swap_block_ns: affine: of each block that goes to the host or comes back.
      model: roofline: a published model, such as Llama-2-70B.
      hardware: roofline: a device, such as a100_80gb, h100 or v6e; of a TPU with two cores, a core.
      tensor_parallel: roofline: devices that share the model.
      weight_dtype: roofline: bfloat16, float8_e4m3fn or int8, where the hardware multiplies it.
      efficiencies: roofline: what the server reaches of the hardware's peaks, and what it pays besides.
    """

    kind: Literal["affine", "roofline"] = "affine"
    step_ns: int = StepCost.step_ns
    token_ns: int = StepCost.token_ns
    kv_token_ns: int = StepCost.kv_token_ns
    map_call_ns: int = StepCost.map_call_ns
    swap_block_ns: int = StepCost.swap_block_ns
    model: str = ""
    hardware: str = ""
    tensor_parallel: int = 1
    weight_dtype: WeightDtype = "bfloat16"
    efficiencies: Efficiencies = dataclasses.field(default_factory=Efficiencies)


_AFFINE = ("step_ns", "token_ns", "kv_token_ns", "map_call_ns", "swap_block_ns")


def make_cost(config: CostConfig, shape: KVShape | None = None, block_size: int | None = None) -> CostModel:
    """The cost model that a config describes.

    Args:
      config: the knobs.
      shape: of the model's keys and values as they are stored, of all devices together; those of the model at 2 bytes
        an element if None. An affine model needs none.
      block_size: tokens of a block; None for memory without block tables.

    Raises:
      ValueError: a knob is out of range or belongs to the other kind, no such model or hardware is known, or `shape`
        is of another model.
    """
    default = CostConfig()
    for field in dataclasses.fields(config):
        foreign = (field.name in _AFFINE) != (config.kind == "affine") and field.name != "kind"
        if foreign and getattr(config, field.name) != getattr(default, field.name):
            raise ValueError(
                f"cost.{field.name}: expected its default for a cost of kind {config.kind!r}, which has no such knob, "
                f"got {getattr(config, field.name)!r}"
            )
    if config.kind == "affine":
        return StepCost(**{name: getattr(config, name) for name in _AFFINE})
    if config.hardware not in TARGETS:
        near = difflib.get_close_matches(config.hardware, TARGETS, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"cost.hardware: expected one of {', '.join(TARGETS)}, got {config.hardware!r}{advice}")
    published = model_shape(config.model)
    shape = published if shape is None else shape
    if (shape.layers, shape.kv_heads, shape.head_dim) != (published.layers, published.kv_heads, published.head_dim):
        raise ValueError(
            f"cost.model: expected the model that is served, of {_words(shape)}, got {config.model!r}, of "
            f"{_words(published)}; give both the same"
        )
    return make_roofline(
        model_size(config.model),
        dataclasses.replace(shape, tensor_parallel=config.tensor_parallel, replicate_kv_heads=True),
        TARGETS[config.hardware],
        block_size=block_size,
        weight_dtype=config.weight_dtype,
        efficiencies=config.efficiencies,
    )


def _words(shape: KVShape) -> str:
    return f"{shape.layers} layers, {shape.kv_heads} KV heads and head_dim {shape.head_dim}"
