"""How long a step takes on given hardware: as fast as its memory delivers or its units multiply, whichever is slower.

    products with weights     max(reading all weights once, multiplying every token and every drawn row)
    + attention               max(reading stored keys and values, multiplying pairs of query and key)
    + exchanges               two all-reduces a layer among the devices that share the heads
    + tables, mapping calls waited for, blocks over PCIe, and a constant for launches and the scheduler

Peaks are those of `pallas_kernels.targets`; what a server reaches of them is a named factor of `Efficiencies`. All
figures are modelled: they compare memories and policies on one device, and are no forecast of a deployment.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Literal

import jax
from jaxtyping import Array, Int32

from pallas_kernels.targets import Target
from paxkv.cost_model import MAX_COST_NS, NS, StepWork
from paxkv.durations import TICK_PARTS, charge, longer, rounded_up, total
from paxkv.model_shapes import KVShape
from paxkv.model_sizes import ModelSize
from paxkv.requests import TICK_US
from paxkv.sizes import require_int

WeightDtype = Literal["bfloat16", "float8_e4m3fn", "int8"]
_WEIGHT_BYTES: dict[str, int] = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}

MOST_WORK = {
    "tokens": 2**20,
    "samples": 2**20,
    "kv_tokens": 2**28,
    "pairs": 2**31 - 1,
    "sync_map_calls": 2**20,
    "swapped_blocks": 2**16,
}
"""The largest step whose time is sure to be exact: rates that would take such a step past int32 are refused."""


@dataclasses.dataclass(frozen=True)
class Efficiencies:
    """What a server reaches of a device's peaks, and what it pays besides. Shares are of 1.

    Where no measurement is named, the figure is an assumption; `experiments calibrate` fits a model to a measured run.

    Attributes:
      linear_flops: share of peak FLOP/s in products with weights. 0.76: all of a model during large-batch processing of
        input tokens (PaLM 540B on TPU v4, arXiv 2211.05102, abstract).
      attention_flops: share of bfloat16's peak in attention. 0.5: FlashAttention-2 on an A100 reaches 50 to 73 %
        (arXiv 2307.08691, abstract).
      weight_bandwidth: share of memory bandwidth in reading weights. 0.84: large copies on an A100, 1,309 of 1,555 GB/s
        (documentation of GPUInspector.jl).
      kv_bandwidth: share of memory bandwidth in reading keys and values, before `paged_decode`. As of weights.
      paged_decode: factor on reading keys and values through a block table. 1: FlashAttention-2's decode is as fast
        over blocks (arXiv 2405.04437, section 7); PagedAttention's own kernel took 1.20 to 1.26 (arXiv 2309.06180,
        section 7.1).
      paged_prefill: factor on multiplying pairs through a block table. 1 up to 8 Ki tokens; up to 1.37
        (FlashAttention-2) and 1.42 (FlashInfer) in longer prompts (arXiv 2405.04437).
      table_entry_ns: what the host takes for an entry of a block table in each step. 0: here tables stay on the device;
        elsewhere they took up to 30 % of a decode step (arXiv 2405.04437).
      link_bandwidth: share of what a device can send in an all-reduce. 0.75: assumed; large ones of eight A100s come
        to some 230 of 300 GB/s.
      link_latency_us: of an all-reduce, however small. 10: assumed.
      pcie_gb_per_s: between host and device. 25: pinned memory of an A100 over PCIe 4.0 x16 gives 25.4 to 26.3 (CUDA's
        bandwidthTest).
      copy_launch_us: of each copy between host and device, of which a block takes one a layer for keys and one for
        values. 0: one transfer carries all. Separate calls of cudaMemcpyAsync, as PagedAttention makes them: 3.5 on an
        H100 for few bytes, though to a peer (figures of pull request 2195 of meta-pytorch/torchcomms).
      map_call_us: of mapping a page. 40: cuMemMap with cuMemSetAccess on 2 MiB (arXiv 2405.04437, section 6); 8.6 on
        64 KiB with its patched driver.
      step_overhead_us: of a step however little it does: launches, scheduler, sampling. 500: assumed.
    """

    linear_flops: float = 0.76
    attention_flops: float = 0.5
    weight_bandwidth: float = 0.84
    kv_bandwidth: float = 0.84
    paged_decode: float = 1.0
    paged_prefill: float = 1.0
    table_entry_ns: float = 0.0
    link_bandwidth: float = 0.75
    link_latency_us: float = 10.0
    pcie_gb_per_s: float = 25.0
    copy_launch_us: float = 0.0
    map_call_us: float = 40.0
    step_overhead_us: float = 500.0

    def __post_init__(self) -> None:
        """Refuses shares outside of (0, 1], factors of nothing, negative times, steps of no time and no PCIe."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            share = name.endswith(("_flops", "_bandwidth"))
            above = name in ("pcie_gb_per_s", "step_overhead_us") or name.startswith("paged_") or share
            if not 0 <= value < math.inf or (share and value > 1) or (above and value == 0):
                wanted = "above 0 and at most 1" if share else f"a finite number {'above' if above else 'from'} 0"
                raise ValueError(f"{name}: expected {wanted}, got {value}")


TYPICAL = Efficiencies()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Roofline:
    """A cost model with the rates of hardware; `make_roofline` makes one. All but the last two are in parts of a tick.

    Raises:
        ValueError: a rate is negative, or a step of `MOST_WORK` would take longer than int32 can say.
    """

    step: int  # however little it does
    weights: int  # to read them
    token: int  # to multiply it with the layers' weights
    sample: int  # to multiply a row with the output projection
    kv_token: int  # to read its keys and values in all layers, and its share of block tables
    pair: int  # to multiply a query with a key, and weigh a value, in all heads and layers
    exchange_token: int  # to exchange a token's activations
    table_token: int  # on the host, a stored token's share of a table entry
    map_call_ns: int
    swap_block_ns: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_int(field.name, getattr(self, field.name), minimum=1 if field.name == "step" else 0)
        for name in ("map_call_ns", "swap_block_ns"):
            if getattr(self, name) > MAX_COST_NS:
                raise ValueError(f"{name} must be at most {MAX_COST_NS}, an hour, got {getattr(self, name)}")
        rates = {"tokens": self.token + self.exchange_token, "samples": self.sample, "pairs": self.pair}
        rates |= {"kv_tokens": self.kv_token + self.table_token}
        rates |= {"sync_map_calls": self.map_call_ns * NS, "swapped_blocks": self.swap_block_ns * NS}
        charges = {name: rate * MOST_WORK[name] for name, rate in rates.items()}
        constant = self.step + self.weights
        if constant + sum(charges.values()) >= 2**31 * TICK_PARTS:
            name = max(charges, key=lambda name: charges[name])
            hours = float(2**31 * TICK_US / 3.6e9)
            raise ValueError(
                f"a step of {MOST_WORK} must take less than the {hours:.1f} hours that int32 ticks can say, got "
                f"{charges[name] / TICK_PARTS * TICK_US / 1e6:,.0f} s for {name} alone; use faster hardware, more "
                "devices or a smaller model"
            )

    def ticks(self, work: StepWork) -> Int32[Array, "*steps"]:
        """See `CostModel`. The terms at the top of this module, summed exactly, then rounded up."""
        linear = longer(charge(self.weights), charge(0, (self.token, work.tokens), (self.sample, work.samples)))
        attention = longer(charge(0, (self.kv_token, work.kv_tokens)), charge(0, (self.pair, work.pairs)))
        others = charge(
            self.step,
            (self.exchange_token, work.tokens),
            (self.table_token, work.kv_tokens),
            (self.map_call_ns * NS, work.sync_map_calls),
            (self.swap_block_ns * NS, work.swapped_blocks),
        )
        return rounded_up(total(linear, attention, others))


def make_roofline(
    size: ModelSize,
    shape: KVShape,
    target: Target,
    *,
    block_size: int | None,
    weight_dtype: WeightDtype = "bfloat16",
    efficiencies: Efficiencies = TYPICAL,
) -> Roofline:
    """The cost of steps of a model whose layers are split over `shape.tensor_parallel` devices.

    Args:
      size: of the whole model.
      shape: of its keys and values, in the format in which they are stored, on one device.
      target: each of the devices; of a TPU with two cores, a core.
      block_size: tokens of a block; None for memory that is contiguous in a sequence and has no tables.
      weight_dtype: of weights, and of products with them.
      efficiencies: of the server.

    Raises:
      ValueError: the devices cannot share the query heads, the target does not multiply in `weight_dtype`, or a step
        could take longer than the clock can say.
    """
    devices, layers = shape.tensor_parallel, shape.layers
    if size.q_heads % devices:
        raise ValueError(f"tensor_parallel must divide the {size.q_heads} query heads, got {devices}")
    if weight_dtype not in _WEIGHT_BYTES or weight_dtype not in target.peak_flops:
        able = ", ".join(name for name in _WEIGHT_BYTES if name in target.peak_flops)
        raise ValueError(f"weight_dtype: expected one of {able}, which {target.name} multiplies, got {weight_dtype!r}")
    reached = {field.name: Fraction(getattr(efficiencies, field.name)) for field in dataclasses.fields(efficiencies)}
    bandwidth, link = Fraction(target.memory_bytes_per_s), Fraction(target.link_bytes_per_s)
    weight_flops = Fraction(target.peak_flops[weight_dtype]) * reached["linear_flops"]
    attention_flops = Fraction(target.peak_flops["bfloat16"]) * reached["attention_flops"]

    weights = size.layer_parameters + size.output_parameters
    weight_bytes = Fraction(weights * _WEIGHT_BYTES[weight_dtype], devices)
    pair_flops = Fraction(4 * layers * size.q_heads * shape.head_dim, devices)
    kv_bytes, table_bytes, decode, prefill = Fraction(shape.token_bytes), Fraction(0), 1, 1
    block_bytes = launches = 0
    if block_size is not None:
        block_bytes, launches = shape.block_bytes(block_size), 2 * layers
        kv_bytes = Fraction(block_bytes, block_size)
        table_bytes = Fraction(4 * layers, block_size)  # an i32 a block, which every layer reads anew
        decode, prefill = reached["paged_decode"], reached["paged_prefill"]
    # A ring moves what has to move: each device sends all but its own share of a sum, then of the result.
    sent_bytes = 2 * layers * Fraction(2 * (devices - 1), devices) * size.width * 2
    exchanges = 2 * layers if devices > 1 else 0

    return Roofline(
        step=_parts((reached["step_overhead_us"] + exchanges * reached["link_latency_us"]) / 10**6),
        weights=_parts(weight_bytes / (bandwidth * reached["weight_bandwidth"])),
        token=_parts(Fraction(2 * size.layer_parameters, devices) / weight_flops),
        sample=_parts(Fraction(2 * size.output_parameters, devices) / weight_flops),
        kv_token=_parts((kv_bytes * decode + table_bytes) / (bandwidth * reached["kv_bandwidth"])),
        pair=_parts(pair_flops * prefill / attention_flops),
        exchange_token=_parts(sent_bytes / (link * reached["link_bandwidth"])),
        table_token=_parts(reached["table_entry_ns"] / (block_size * 10**9)) if block_size is not None else 0,
        map_call_ns=math.ceil(reached["map_call_us"] * 1000),
        swap_block_ns=math.ceil(block_bytes / reached["pcie_gb_per_s"] + launches * reached["copy_launch_us"] * 1000),
    )


def _parts(seconds: Fraction) -> int:
    """A time in parts of a tick, rounded up."""
    return math.ceil(seconds * 10**6 * TICK_PARTS / TICK_US)
