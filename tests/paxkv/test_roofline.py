"""The roofline, term by term against figures worked out by hand, and as a whole against exact fractions."""

import dataclasses
import itertools
import math
import random
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.targets import TARGETS, Target
from paxkv.cost_model import CostModel, StepCost, StepWork
from paxkv.durations import TICK_PARTS
from paxkv.model_shapes import MODEL_SHAPES, KVShape, model_shape
from paxkv.model_sizes import MODEL_SIZES, ModelSize, model_size
from paxkv.roofline import MOST_WORK, Efficiencies, Roofline, make_roofline

IDEAL = Efficiencies(
    **{field.name: 1.0 for field in dataclasses.fields(Efficiencies)}
    | {"table_entry_ns": 0.0, "link_latency_us": 0.0, "copy_launch_us": 0.0, "step_overhead_us": 10.0}
)
MS = 100 * TICK_PARTS
# A tera of everything, so that what a step does and what it takes are the same digits.
DEVICE = Target("d", "gpu", "d", 10**12, 1e12, {"bfloat16": 1e12, "int8": 2e12}, link_bytes_per_s=1e12, clock_hz=1e9)
SHAPE = KVShape(layers=5, kv_heads=4, head_dim=10, element_bytes=2)
SIZE = ModelSize(parameters=3 * 10**9, width=1000, q_heads=8, vocab=500_000)  # 2e9 of layers, 5e8 of the output


def work(**counts):
    return StepWork(**{name: jnp.int32(counts.get(name, 0)) for name in StepWork._fields})


def made(shape=SHAPE, block_size=None, target=DEVICE, **changes):
    efficiencies = dataclasses.replace(IDEAL, **changes)
    return make_roofline(SIZE, shape, target, block_size=block_size, efficiencies=efficiencies)


def ms(cost, **counts):
    """Of a step beyond its constant, in ms."""
    return (int(cost.ticks(work(**counts))) - 1) / 100


def test_each_term_is_what_it_is_worked_out_to_be():
    cost = made()
    assert cost.step == TICK_PARTS  # 10 us
    assert cost.weights == 5 * MS  # 2.5e9 weights of 2 bytes at 1e12 B/s
    assert cost.token == 4 * MS  # 2 * 2e9 FLOPs at 1e12 FLOP/s
    assert cost.sample == MS
    assert cost.kv_token == 8 * TICK_PARTS // 10**5  # 5 layers, K and V of 4 heads, 20 B each: 800 B take 0.8 ns
    assert cost.pair == 16 * TICK_PARTS // 10**5  # 4 * 5 * 8 * 10 FLOPs take 1.6 ns
    assert (cost.exchange_token, cost.table_token, cost.swap_block_ns) == (0, 0, 0)
    assert cost.map_call_ns == 1000


def test_efficiencies_divide_peaks_and_multiply_what_paging_costs():
    changes = {"linear_flops": 0.5, "attention_flops": 0.25, "weight_bandwidth": 0.5, "kv_bandwidth": 0.125}
    slow, fast = made(**changes), made()
    assert (slow.weights, slow.token, slow.sample) == (2 * fast.weights, 2 * fast.token, 2 * fast.sample)
    assert made(linear_flops=0.75).token == (16 * MS + 2) // 3  # rounded up
    assert (slow.kv_token, slow.pair) == (8 * fast.kv_token, 4 * fast.pair)
    paged = made(block_size=10, paged_decode=1.5, paged_prefill=1.25, table_entry_ns=50.0)
    # Of a stored token 1.2 ns of keys and values, and a tenth of 5 reads of 4 bytes: 0.002 ns.
    assert (paged.kv_token, paged.pair) == (1202 * TICK_PARTS // 10**7, 2 * TICK_PARTS // 10**4)
    assert paged.table_token == 5 * TICK_PARTS // 10**4
    assert paged.swap_block_ns == 8000  # 10 tokens of 800 B at 1 GB/s
    # A block of 5 layers is 10 copies, of keys and of values.
    assert made(block_size=10, copy_launch_us=3.5).swap_block_ns == 8000 + 10 * 3500
    assert made(copy_launch_us=3.5).swap_block_ns == 0  # nothing that goes to the host
    assert made(map_call_us=8.6).map_call_ns == 8600


def test_devices_share_weights_heads_and_products_and_exchange_activations_twice_a_layer():
    alone, shared = made(), made(dataclasses.replace(SHAPE, tensor_parallel=4), link_latency_us=10.0)
    for name in ("weights", "token", "sample", "kv_token", "pair"):
        assert getattr(shared, name) * 4 == getattr(alone, name), name
    # 10 all-reduces of 2 * 1000 B, of which each device sends 2 * 3/4: 30 kB; and their latencies.
    assert shared.exchange_token == 30 * TICK_PARTS // 10**4
    assert shared.step == alone.step + 10 * TICK_PARTS
    assert made(link_latency_us=10.0).step == alone.step  # with nobody
    replicated = made(dataclasses.replace(SHAPE, tensor_parallel=8, replicate_kv_heads=True))
    assert replicated.kv_token * 4 == alone.kv_token  # one head of four, not half of one
    assert replicated.pair * 8 == alone.pair


def test_smaller_weights_and_smaller_keys_and_values_take_less():
    halves = make_roofline(SIZE, SHAPE, DEVICE, block_size=None, weight_dtype="int8", efficiencies=IDEAL)
    assert (halves.weights * 2, halves.token * 2, halves.pair) == (made().weights, made().token, made().pair)
    eight_bit = dataclasses.replace(SHAPE, element_bytes=1, scale_bytes_per_token_head=2)
    assert made(eight_bit).kv_token * 20 == made().kv_token * 12


def test_a_step_takes_the_slower_of_memory_and_units_in_each_half():
    cost = made()
    assert ms(cost) == 5
    assert ms(cost, tokens=1, samples=1) == 5  # 5 ms of products beside 5 ms of reading weights
    assert ms(cost, tokens=2, samples=1) == 9
    assert ms(cost, kv_tokens=10**7, pairs=5 * 10**6 - 1000) == 5 + 8
    assert ms(cost, kv_tokens=10**7, pairs=10**7) == 5 + 16
    assert ms(cost, tokens=2, kv_tokens=10**7, sync_map_calls=2000) == 8 + 8 + 2
    assert ms(made(block_size=10), swapped_blocks=1000) == 5 + 8


def exact(cost, step):
    rates = dataclasses.asdict(cost)
    linear = max(rates["weights"], rates["token"] * step.tokens + rates["sample"] * step.samples)
    attention = max(rates["kv_token"] * step.kv_tokens, rates["pair"] * step.pairs)
    others = rates["exchange_token"] * step.tokens + rates["table_token"] * step.kv_tokens
    calls = 10**4 * (rates["map_call_ns"] * step.sync_map_calls + rates["swap_block_ns"] * step.swapped_blocks)
    return -(-(rates["step"] + linear + attention + others + calls) // TICK_PARTS)


def test_steps_take_the_same_one_by_one_and_as_a_vector_and_never_what_rounding_makes_of_it():
    rng = random.Random(3)
    paged = dataclasses.replace(model_shape("Llama-3-70B"), tensor_parallel=8)
    efficiencies = Efficiencies(table_entry_ns=77.7, paged_decode=1.23)
    costs = [
        make_roofline(model_size("Llama-3-70B"), paged, TARGETS["h100"], block_size=16, efficiencies=efficiencies),
        make_roofline(model_size("OPT-13B"), model_shape("OPT-13B"), TARGETS["a100_40gb"], block_size=None),
        Roofline(1, 99_999_999, 123_456_789, 10**9 + 7, 10_001, 9_999, 99_990_001, 3, 39_999, 1_234_567),
    ]
    step = jax.jit(lambda cost, work: cost.ticks(work), static_argnums=0)
    for cost in costs:
        assert isinstance(cost, CostModel)
        drawn = [
            StepWork(**{name: rng.randrange(min(2 ** rng.randint(1, 31), most)) for name, most in MOST_WORK.items()})
            for _ in range(150)
        ]
        drawn += [StepWork(**dict.fromkeys(MOST_WORK, 0)), StepWork(**MOST_WORK)]
        together = step(cost, StepWork(*(jnp.array(of, jnp.int32) for of in zip(*drawn, strict=True)))).tolist()
        assert together == [exact(cost, one) for one in drawn]
        assert [int(step(cost, StepWork(*map(jnp.int32, one)))) for one in drawn[:20]] == together[:20]


def test_more_work_never_takes_less():
    rng = random.Random(4)
    cost = make_roofline(model_size("Yi-34B"), model_shape("Yi-34B"), TARGETS["v6e"], block_size=16)
    for name in StepWork._fields:
        rest = {other: rng.randrange(1000) for other in StepWork._fields if other != name}
        counts = jnp.array(sorted(rng.randrange(MOST_WORK[name]) for _ in range(100)), jnp.int32)
        fixed = {other: jnp.full(100, count, jnp.int32) for other, count in rest.items()}
        ticks = cost.ticks(StepWork(**fixed, **{name: counts})).tolist()
        assert ticks == sorted(ticks)
        assert ticks[0] < ticks[-1], name


def test_a_decode_step_of_llama_3_70b_on_eight_h100s_takes_little_more_than_reading_the_weights():
    shape = dataclasses.replace(model_shape("Llama-3-70B"), tensor_parallel=8)
    args = model_size("Llama-3-70B"), shape, TARGETS["h100"]
    decode = work(tokens=8, samples=8, kv_tokens=8 * 1000, pairs=8 * 1000)
    # Without the table of embeddings 69.5e9 weights of 2 bytes, an eighth of them at 3.35 TB/s: 5.18 ms.
    at_peak = make_roofline(*args, block_size=16, efficiencies=dataclasses.replace(IDEAL, step_overhead_us=0.1))
    assert int(at_peak.ticks(decode)) / 100 == pytest.approx(5.18 + 0.1, abs=0.1)
    assert 8 < int(make_roofline(*args, block_size=16).ticks(decode)) / 100 < 9  # as measured servers come to 8 to 12
    prefill = work(tokens=8192, samples=1, kv_tokens=8192, pairs=8192 * 8193 // 2)
    # Products: 2 * 68.45e9 FLOPs a token, and 4 * 80 * 64 * 128 for each pair, on 7.9e15 FLOP/s. Exchanges: 160 times
    # 16 KiB a token, of which each device sends 7/4 at 450 GB/s.
    flops = 8192 * 2 * 68.45e9 + 4 * 80 * 64 * 128 * (8192 * 8193 / 2)
    seconds = flops / (8 * 989.4e12) + 8192 * 160 * 16384 * 1.75 / 450e9
    assert int(at_peak.ticks(prefill)) / 100 == pytest.approx(1000 * seconds, rel=0.002)


def test_every_published_model_has_a_cost_on_every_device():
    for (name, size), target, block_size in itertools.product(MODEL_SIZES.items(), TARGETS.values(), (None, 16, 256)):
        cost = make_roofline(size, model_shape(name), target, block_size=block_size)
        assert cost.token > cost.sample > cost.pair > 0


def test_the_sizes_are_those_that_the_architectures_add_up_to():
    assert MODEL_SIZES.keys() == MODEL_SHAPES.keys()
    hidden = {"Llama-2-13B": 13_824, "Llama-2-70B": 28_672, "Llama-3-8B": 14_336, "Llama-3-70B": 28_672}
    hidden |= {"Yi-6B": 11_008, "Yi-34B": 20_480}
    for name, size in MODEL_SIZES.items():
        shape, width = MODEL_SHAPES[name], size.width
        assert width == size.q_heads * shape.head_dim
        if name.startswith("OPT"):
            # Biases everywhere, two norms a layer and a last one, learned positions, one table.
            layer = 4 * width * width + 4 * width + 8 * width * width + 5 * width + 4 * width
            tables = (size.vocab + 2050) * width + 2 * width
        else:
            kv_width = shape.kv_heads * shape.head_dim
            layer = 2 * width * (width + kv_width) + 3 * width * hidden[name] + 2 * width
            tables = 2 * size.vocab * width + width
        assert size.parameters == shape.layers * layer + tables, name
    assert model_size("Yi-6B").layer_parameters == pytest.approx(model_size("Yi-6B").parameters - 2 * 64_000 * 4096)


def test_what_int32_ticks_cannot_say_is_refused():
    slow = dataclasses.replace(DEVICE, memory_bytes_per_s=1e6)
    with pytest.raises(ValueError, match=r"must take less than the 6\.0 hours .* for kv_tokens alone; use faster"):
        made(target=slow)
    with pytest.raises(ValueError, match="map_call_ns must be at most"):
        made(map_call_us=4e9)
    biggest = {"tokens": 0, "kv_tokens": 2**28, "pairs": 0, "samples": 0, "sync_map_calls": 0, "swapped_blocks": 0}
    edge = Roofline(1, 0, 0, 0, (2**31 * TICK_PARTS - 2) // 2**28, 0, 0, 0, 0, 0)
    assert int(edge.ticks(work(**biggest))) == math.ceil(Fraction(edge.kv_token * 2**28 + 1, TICK_PARTS))
    with pytest.raises(ValueError, match="must take less"):
        dataclasses.replace(edge, kv_token=edge.kv_token + 1)
    with pytest.raises(ValueError, match="must take less"):
        dataclasses.replace(edge, table_token=1)
    with pytest.raises(ValueError, match="must take less"):
        dataclasses.replace(edge, kv_token=0, exchange_token=2**11 * TICK_PARTS)
    left = 2**31 * TICK_PARTS - 1 - (edge.step + edge.kv_token * 2**28)
    dataclasses.replace(edge, weights=left)
    with pytest.raises(ValueError, match="must take less"):
        dataclasses.replace(edge, weights=left + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_flops": 0.0}, "linear_flops: expected above 0 and at most 1, got 0.0"),
        ({"kv_bandwidth": 1.01}, "kv_bandwidth: expected above 0 and at most 1"),
        ({"paged_decode": 0.0}, "paged_decode: expected a finite number above 0"),
        ({"pcie_gb_per_s": 0.0}, "pcie_gb_per_s: expected a finite number above 0"),
        ({"step_overhead_us": 0.0}, "step_overhead_us: expected a finite number above 0"),
        ({"map_call_us": math.inf}, "map_call_us: expected a finite number from 0"),
        ({"link_latency_us": math.nan}, "link_latency_us: expected a finite number from 0"),
    ],
)
def test_efficiencies_out_of_range_are_refused(change, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        Efficiencies(**change)


def test_devices_that_cannot_share_heads_or_multiply_a_dtype_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel must divide the 8 query heads, got 16"):
        made(dataclasses.replace(SHAPE, tensor_parallel=16, replicate_kv_heads=True))
    with pytest.raises(ValueError, match="weight_dtype: expected one of bfloat16, int8, which d multiplies"):
        make_roofline(SIZE, SHAPE, DEVICE, block_size=16, weight_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="parameters must be more than"):
        ModelSize(10**9, width=1000, q_heads=8, vocab=500_000)


def test_an_affine_cost_is_one_too():
    assert isinstance(StepCost(), CostModel)
