"""A server over eight devices gives the tokens of a server on one, whatever is split over them."""

import collections
import dataclasses
import functools

import jax
import jax.extend
import numpy as np
import pytest

from models.decoder import Decode
from models.split import device_config, place_weights, split_of
from paxkv import sharded_engine
from paxkv.calibration import Calibration
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import scheme
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import make_requests
from paxkv.sharded_engine import ShardedEngine, deal
from paxkv.sharding import MeshShape, Rules, head_parts, make_mesh
from paxkv.split_paged import SplitPaged, split_blocks
from paxkv.windows import Group
from tests.models.families import TINY, random_params
from tests.paxkv.oracles.jitted import quickly

CONFIG = dataclasses.replace(TINY, q_heads=8, kv_heads=4, vocab=32, ffn=32)
MEMORY = Paged(rows=4, max_len=64, block_size=4, num_blocks=40)
PROMPTS, OUTPUTS = [30, 7, 18, 3, 25, 12], [20, 9, 25, 30, 12, 8]


def workload(samples=1):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, CONFIG.vocab, (len(PROMPTS), max(PROMPTS)))
    prompts[[2, 4], :14] = prompts[0, :14]
    arrivals = np.arange(len(PROMPTS)) * 0.3
    return make_requests(prompts, np.array(PROMPTS), np.array(OUTPUTS), arrivals, seed=1, samples=samples)


def one_long(samples):
    prompt = np.arange(200)[None] % CONFIG.vocab
    return make_requests(prompt, np.array([200]), np.array([50]), np.array([0.0]), seed=0, samples=samples)


def new_cache(config, memory, fmt, blocks):
    shape = (config.layers, config.kv_heads, config.head_dim)
    amax = Calibration(*(np.full(shape, 4, np.float32) for _ in range(2)), 1, rotated=False)
    slots = blocks * memory.block_size
    return init_kv_cache(
        shape[0], slots, *shape[1:], fmt, block_size=memory.block_size, rows=memory.rows, calibration=amax
    )


COUNTED = ("preempted", "hit_tokens", "copied_blocks", "new_tokens", "admitted")


def run_to_end(advance, state):
    """The last state, and totals over all steps."""
    totals = dict.fromkeys(COUNTED, 0)
    while not all_ended(state):
        state, records = advance(state)
        totals = {name: total + int(np.sum(getattr(records, name))) for name, total in totals.items()}
    return state, totals


@functools.cache
def on_one(config, memory, kv_format, samples=1, asked=workload):
    fmt, requests = scheme(kv_format), asked(samples)
    engine = Engine(memory, Decode(config), 16, kv_format=fmt)
    params = random_params(config)
    state = init_engine(engine, requests, new_cache(config, memory, fmt, memory.num_blocks))
    advance = run_steps.lower(engine, params, requests, state, 8).compile(compiler_options=quickly())
    state, totals = run_to_end(lambda state: advance(params, requests, state), state)
    return output_tokens(requests, state), np.asarray(state.outputs.margins), totals


def started(shape, config, memory, kv_format, samples=1, *, asked=workload, dealing="round_robin", **options):
    mesh = make_mesh(shape, config.q_heads, config.kv_heads, **options)
    part, fmt = device_config(config, mesh), scheme(kv_format)
    if shape.kv > 1:
        memory = split_blocks(memory, shape.kv, dealing)
    # What is freed is NaN, so that reading it would show.
    engine = Engine(memory, Decode(part, split_of(mesh)), 16, kv_format=fmt, on_free="poison")
    sharded = ShardedEngine(engine, mesh)
    params = place_weights(random_params(config), mesh)
    cache = sharded_engine.init_cache(sharded, lambda: new_cache(config, memory, fmt, memory.num_blocks))
    dealt = deal(asked(samples), shape.data)
    return sharded, params, *sharded_engine.init(sharded, dealt, cache)


def on_many(shape, config, memory, kv_format, samples=1, **options):
    """Tokens of all requests, the replicas' last state, and totals over all steps."""
    sharded, params, requests, state = started(shape, config, memory, kv_format, samples, **options)
    advance = sharded_engine.run_steps.lower(sharded, params, requests, state, 8).compile(compiler_options=quickly())
    state, totals = run_to_end(lambda state: advance(params, requests, state), state)
    dealt = deal(options.get("asked", workload)(samples), shape.data)
    return sharded_engine.outputs(dealt, state), state, totals


SHARING = {"cache": PrefixCache(), "forks": True}
WINDOWED = dataclasses.replace(CONFIG, window=9)
ODD = dataclasses.replace(CONFIG, q_heads=6, kv_heads=3, vocab=30, ffn=36)
TIGHT = {"num_blocks": 24}  # less than all that run at once come to need
FREED = {"num_blocks": 8, "groups": (Group(4, window=9, layers=(0, 1)),), "max_chunk": 16}  # behind the window
CASES = {
    "heads": (MeshShape(1, 8, 1), CONFIG, TIGHT, "f32", 1, {"replicate_kv_heads": True}),
    "sharing": (MeshShape(1, 8, 1), CONFIG, SHARING, "f32", 2, {"replicate_kv_heads": True}),
    "preemption": (MeshShape(1, 1, 8), CONFIG, TIGHT, "f32", 1, {}),
    "sharing_fp8": (MeshShape(2, 2, 2), CONFIG, SHARING, "e4m3_token_head", 2, {}),
    "window": (MeshShape(1, 2, 4), WINDOWED, FREED, "f32", 1, {"dealing": "by_shard"}),
    "replicas": (MeshShape(8, 1, 1), CONFIG, {}, "e4m3_layer", 1, {}),
    "odd_heads": (MeshShape(1, 3, 2), ODD, TIGHT, "int8_block_head", 1, {}),
    "window_by_blocks": (MeshShape(1, 1, 8), WINDOWED, TIGHT | SHARING, "f32", 2, {}),
    "fp8_by_heads": (MeshShape(1, 4, 1), CONFIG, TIGHT, "e4m3_head", 1, {}),
}
SOAK = ("sharing", "odd_heads", "replicas", "window_by_blocks", "fp8_by_heads")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak if n in SOAK else ()) for n in CASES])
def test_tokens_are_those_of_one_device(name):
    shape, config, changes, kv_format, samples, options = CASES[name]
    memory = dataclasses.replace(MEMORY, **changes)
    if memory.cache is not None:
        memory = dataclasses.replace(memory, cache=PrefixCache(kv_format=scheme(kv_format).name))
    tokens, state, totals = on_many(shape, config, memory, kv_format, samples, **options)
    expected, margins, totals_of_one = on_one(config, memory, kv_format, samples)
    assert tokens == expected
    if shape.data == 1:
        np.testing.assert_allclose(state.outputs.margins[0], margins, atol=1e-5 * margins.max())
        assert totals == totals_of_one  # every decision was the same
        if "num_blocks" in changes:
            assert totals["preempted"] > 0
        if "forks" in changes:
            assert min(totals["hit_tokens"], totals["copied_blocks"]) > 0


@pytest.mark.parametrize("dealing", ["round_robin", pytest.param("by_shard", marks=pytest.mark.soak)])
def test_a_sequence_is_longer_than_what_a_device_holds(dealing):
    """Eight devices hold eight times the blocks of one, and one sequence reads all of them."""
    alone = Paged(rows=1, max_len=256, block_size=4, num_blocks=64)
    expected, margins, _ = on_one(CONFIG, alone, "f32", asked=one_long)
    tokens, state, _ = on_many(MeshShape(1, 1, 8), CONFIG, alone, "f32", asked=one_long, dealing=dealing)
    held = {shard.device: shard.data.shape for shard in state.cache.layers[0].k.data.addressable_shards}
    assert len(held) == 8
    assert set(held.values()) == {(1, 8 * 4, CONFIG.kv_heads, CONFIG.head_dim)}  # of 249 tokens stored
    assert tokens == expected
    np.testing.assert_allclose(state.outputs.margins[0], margins, atol=1e-5 * margins.max())


def test_bytes_of_a_device_are_its_share():
    whole = new_cache(CONFIG, MEMORY, scheme("e4m3_token_head"), MEMORY.num_blocks)
    for shape, share in (
        (MeshShape(1, 4, 1), 4),
        (MeshShape(1, 8, 1), 4),
        (MeshShape(1, 1, 8), 8),
        (MeshShape(2, 2, 2), 4),
    ):
        sharded, _, _, state = started(shape, CONFIG, MEMORY, "e4m3_token_head", replicate_kv_heads=True)
        for array, one in zip(
            jax.tree.leaves(state.cache.layers[0].k), jax.tree.leaves(whole.layers[0].k), strict=True
        ):
            for shard in array.addressable_shards:
                assert shard.data.nbytes * share == one.nbytes
        held = jax.eval_shape(lambda: new_cache(CONFIG, MEMORY, scheme("e4m3_token_head"), MEMORY.num_blocks))
        assert jax.tree.structure(held) == jax.tree.structure(state.cache)
        assert sharded.replicas == shape.data


def test_a_step_is_compiled_once_and_copies_no_pool():
    memory = dataclasses.replace(MEMORY, num_blocks=32_768)
    sharded, params, requests, state = started(MeshShape(1, 2, 4), CONFIG, memory, "f32")
    compiled = sharded_engine.run_steps.lower(sharded, params, requests, state, 2).compile()
    device_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.cache))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= device_bytes
    assert analysis.temp_size_in_bytes < device_bytes / 4


@pytest.mark.parametrize("shape", [MeshShape(1, 4, 1), MeshShape(1, 1, 8), MeshShape(1, 2, 4)], ids=lambda s: s.name)
def test_only_sums_and_the_merge_are_exchanged(shape):
    """Per layer a sum behind attention and one behind the feed-forward block; with blocks split, the merge."""
    sharded, params, requests, state = started(shape, CONFIG, MEMORY, "f32")
    step = jax.make_jaxpr(lambda *a: sharded_engine.run_steps(sharded, *a, 1))(params, requests, state)
    found = collections.Counter(exchanges(step.jaxpr))
    expected = collections.Counter()
    heads = CONFIG.q_heads // shape.model
    for tokens in (MEMORY.rows, 16):  # a step of single tokens, and one of chunks
        stream = (tokens, CONFIG.width)
        expected["psum", stream] += 1 + CONFIG.layers  # the embedding, and behind feed-forward blocks
        if shape.model > 1:
            expected["psum", stream] += CONFIG.layers
        if shape.kv > 1:
            expected["all_gather", (tokens, heads)] += CONFIG.layers
            expected["psum", (tokens, heads, CONFIG.head_dim)] += CONFIG.layers
        expected["all_gather", (MEMORY.rows, CONFIG.vocab // (shape.model * shape.kv))] += 1
    assert found == expected


def exchanges(jaxpr):
    """Every collective of a program, as often as it stands there, with the shape of what is given to it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removesuffix("_invariant")
        if name in ("psum", "all_gather", "all_to_all", "ppermute", "pmax", "reduce_scatter"):
            yield name, equation.invars[0].aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from exchanges(inner)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_mesh(MeshShape(1, 3, 1), 8, 4), "mesh.model: expected a divisor of the 4 KV heads"),
        (lambda: make_mesh(MeshShape(1, 8, 1), 8, 4), "or a multiple of them with replicate_kv_heads=True, got 8"),
        (lambda: make_mesh(MeshShape(2, 4, 2), 8, 4), "mesh: expected at most 8 devices"),
        (lambda: MeshShape(0, 1, 1), "data"),
        (lambda: Rules(ffn=("data",)), "ffn: expected model, kv, both or none"),
        (lambda: device_config(CONFIG, make_mesh(MeshShape(1, 1, 5), 8, 4)), "ffn: expected a multiple of the 5 parts"),
        (lambda: SplitPaged(1, 8, 4, 6, shards=4), "num_blocks: expected a multiple of shards = 4, got 6"),
        (lambda: SplitPaged(1, 8, 4, 8, host_blocks=2, shards=4), "host_blocks: expected 0"),
        (lambda: started(MeshShape(1, 4, 1), CONFIG, MEMORY, "e4m3_head:first_write"), "which device stores first"),
        (lambda: started(MeshShape(1, 1, 8), CONFIG, MEMORY, "e4m3_head:first2"), "with blocks across devices"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_heads_that_are_fewer_than_devices_are_split_as_far_as_they_go():
    assert head_parts(8, 32, 8, False) == (8, 1, 1)
    assert head_parts(8, 8, 2, True) == (2, 4, 1)
    assert head_parts(8, 4, 2, True) == (2, 2, 2)  # two devices do the same attention
    assert head_parts(6, 9, 3, True) == (3, 1, 2)


def test_requests_are_dealt_in_turn_and_samples_stay_together():
    dealt = deal(workload(samples=2), 4)
    assert dealt.ids.tolist() == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, -1, -1], [6, 7, -1, -1]]
    assert np.asarray(dealt.requests.leaders).tolist() == [[0, 0, 2, 2]] * 4
    assert np.asarray(dealt.requests.output_lens)[2].tolist() == [OUTPUTS[2]] * 2 + [0, 0]
