"""The engine over groups of layers: what leaves a window is given back, and no token changes.

Blocks that nobody needs are filled with NaN, so that whoever reads beyond what a window keeps cannot stay unseen.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import checks
from paxkv.capacity import request_blocks
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import KVFormat, TensorFormat, scheme
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import make_requests
from paxkv.windows import Group, group_layers, num_places
from tests.paxkv import fake_model
from tests.paxkv.oracles.caches import filled_cache
from tests.paxkv.oracles.jitted import quickly

F32 = scheme("f32")
MAX_LEN, BUDGET, STEPS, SIZE = 40, 6, 16, 2
# Windows of layers. Of five layers two see all, and the last group of the others has an entry to spare.
MODELS = {"gemma": (4, 4, None, 4, None), "mistral": (5, 5), "one": (5,)}
LENGTHS, OUTPUTS = [18, 25, 5, 12, 31, 1], [20, 12, 16, 7, 8, 12]
NUM_BLOCKS = {"gemma": 55, "mistral": 14, "one": 8}
KNOBS = {
    "plain": {},
    "cache": {"cache": PrefixCache(publish="on_compute", duplicates="merge")},
    "schedule": {"cache": PrefixCache()},
    "swap": {"host_blocks": 60},
    "all": {"cache": PrefixCache(), "forks": True, "host_blocks": 80},
}


@functools.cache
def tables(model):
    return fake_model.make_tables(31, len(MODELS[model]), MAX_LEN)


@functools.cache
def params(model):
    return fake_model.as_params(tables(model))


def grouped(model, knobs="plain"):
    groups = group_layers(MODELS[model], SIZE)
    return Paged(4, MAX_LEN, SIZE, NUM_BLOCKS[model], groups=groups, max_chunk=BUDGET, **KNOBS[knobs])


def ungrouped(model):
    """One table for all layers, and equal bytes: fewer blocks, each of which holds all layers."""
    entries = num_places(group_layers(MODELS[model], SIZE), len(MODELS[model]))
    return Paged(4, MAX_LEN, SIZE, NUM_BLOCKS[model] * entries // len(MODELS[model]))


@functools.cache
def prompts():
    """Prompts 0, 1 and 4 begin alike."""
    tokens = np.random.default_rng(7).integers(0, fake_model.VOCAB, (len(LENGTHS), max(LENGTHS)))
    tokens[[1, 4], :14] = tokens[0, :14]
    return tokens


def workload(outputs=tuple(OUTPUTS), **options):
    arrivals = np.arange(len(LENGTHS)) * 0.3
    return make_requests(prompts(), np.array(LENGTHS), np.array(outputs), arrivals, seed=3, **options)


def begin(model, memory, requests, fmt):
    policy = Policy(preemption="swap" if memory.host_blocks else "recompute")
    decode = fake_model.Model(MODELS[model])
    engine = Engine(memory, decode, BUDGET, policy=policy, kv_format=fmt, on_free="poison")
    shape = (fake_model.KV_HEADS, fake_model.HEAD_DIM)
    entries = num_places(memory.layer_groups, len(MODELS[model]))
    if fmt == F32:
        cache = filled_cache(entries, (memory.num_slots, *shape), jnp.nan)
    else:
        cache = init_kv_cache(entries, memory.num_slots, *shape, fmt, block_size=SIZE)
    return engine, init_engine(engine, requests, cache)


@functools.cache
def compiled(model, memory, fmt=F32, samples=1):
    requests = workload(samples=samples)
    engine, state = begin(model, memory, requests, fmt)
    return run_steps.lower(engine, params(model), requests, state, STEPS).compile(compiler_options=quickly())


def serve(model, memory, requests=None, fmt=F32):
    """What every request got, and the records of all steps. Invariants hold between dispatches."""
    requests = workload() if requests is None else requests
    _, state = begin(model, memory, requests, fmt)
    records = []
    while not all_ended(state):
        state, record = compiled(model, memory, fmt, requests.samples)(params(model), requests, state)
        records.append(jax.tree.map(np.asarray, record))
        checks.require_invariants(memory, state.scheduler.memory)
        assert len(records) < 20, "livelock"
    return output_tokens(requests, state), jax.tree.map(lambda *parts: np.concatenate(parts), *records)


@functools.cache
def expected(model):
    found = []
    for i, (length, count) in enumerate(zip(LENGTHS, OUTPUTS, strict=True)):
        prompt, most = prompts()[i, :length].tolist(), min(count, MAX_LEN - length)
        tokens, margins = fake_model.reference_output(
            tables(model), prompt, most, lambda index, logits: np.argmax(logits), MODELS[model]
        )
        assert min(margins) > 1e-3
        found.append(tokens)
    return found


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        pytest.param(model, knobs, marks=() if (model, knobs) == ("gemma", "plain") else pytest.mark.soak)
        for model in ("gemma", "mistral")
        for knobs in KNOBS
    ],
)
def test_greedy_tokens_are_those_of_a_float64_model_without_a_cache(model, knobs):
    memory = grouped(model, knobs)
    tokens, records = serve(model, memory)
    assert tokens == expected(model)
    assert records.new_tokens.max() > 1
    short = model == "gemma"  # where all layers have a window, nobody outgrows what he was admitted with
    assert (records.preempted.sum() > 0) == short
    swaps = short and memory.host_blocks > 0
    assert (records.hit_tokens.sum() > 0) == (swaps or memory.cache is not None)
    assert (records.swapped_in_blocks.sum() > 0) == swaps


@pytest.mark.soak
def test_without_groups_the_tokens_are_the_same_and_fewer_requests_run_in_equal_bytes():
    tokens, records = serve("gemma", grouped("gemma"))
    others, whole = serve("gemma", ungrouped("gemma"))
    assert tokens == others == expected("gemma")
    running, fewer = (found.running[found.waiting > 0].mean() for found in (records, whole))
    assert running > fewer


@pytest.mark.soak
@pytest.mark.parametrize("samples", [1, 3])
def test_quantised_blocks_take_their_scales_along_whatever_group_has_them(samples):
    """Scales of tokens do not depend on who was computed with whom."""
    fmt = scheme("e4m3_token_head")
    memory = dataclasses.replace(grouped("gemma", "all"), num_blocks=90, cache=PrefixCache(kv_format=fmt.name))
    alone = dataclasses.replace(ungrouped("gemma"), num_blocks=100)
    requests = workload(samples=samples, temperature=0.7)
    tokens, records = serve("gemma", memory, requests, fmt)
    assert tokens == serve("gemma", alone, requests, fmt)[0]
    assert (records.copied_blocks.sum() > 0) == (samples > 1)


# ---- what is held --------------------------------------------------------------------------------------------------


def most_held(group, prompt, total):
    """Most blocks of a group while a prompt comes in chunks of the budget, then token by token: counted."""
    stored, most = 0, 0
    while stored < total:
        new = min(BUDGET, prompt - stored) if stored < prompt else 1
        seen_from = 0 if group.window is None else max(0, stored - group.window + 1)
        most = max(most, -(-(stored + new) // SIZE) - seen_from // SIZE)
        stored += new
    return most


def test_a_request_holds_as_many_blocks_as_arithmetic_says():
    """Of 37 tokens 19 blocks where everything is seen, and 5 under each of two windows; 57 if all layers kept all."""
    memory = grouped("gemma")
    _, records = serve("gemma", memory, workload([20, *[0] * 5]))
    length = LENGTHS[0] + 20 - 1  # the last token is never stored
    counted = [most_held(group, LENGTHS[0], length) for group in memory.groups]
    assert counted == [19, 5, 5]
    peak = records.usage.allocated.max() // SIZE
    assert peak <= sum(counted)
    assert peak == 19 + 3 + 3  # prompts hold more of a window, and less of what sees everything
    assert sum(counted) <= request_blocks(memory.groups, length, BUDGET) == 19 + 6 + 6


# ---- mistakes ------------------------------------------------------------------------------------------------------


class Early(Group):
    """Takes a window for left while its last token can still be seen."""

    def out_of_view(self, stored):
        return super().out_of_view(stored) + self.block_size


class Hasty(Paged):
    """Lets others have a block while its owner still reads it."""

    def background(self, state):
        early = dataclasses.replace(self, groups=tuple(Early(g.block_size, g.window) for g in self.groups))
        return dataclasses.replace(Paged.background(early, state), tables=state.tables)


for mistake in (Early, Hasty):
    jax.tree_util.register_static(mistake)


def served(memory):
    """The tokens of the first request, which is alone."""
    requests = workload([20, *[0] * 5])
    _, state = begin("one", memory, requests, F32)
    state, _ = compiled("one", memory)(params("one"), requests, state)
    return output_tokens(requests, state)[0]


@pytest.mark.parametrize(
    "mistake", [pytest.param(None, marks=pytest.mark.soak), pytest.param("early", marks=pytest.mark.soak), "hasty"]
)
def test_a_block_that_goes_one_token_too_early_is_seen(mistake):
    memory = grouped("one")
    if mistake == "early":
        memory = dataclasses.replace(memory, groups=(Early(SIZE, 5, layers=(0,)),))
    if mistake == "hasty":
        memory = Hasty(**{f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)})
    right = expected("one")[0][: STEPS - LENGTHS[0] // BUDGET]
    assert (served(memory)[: len(right)] == right) == (mistake is None)


# ---- refusals ------------------------------------------------------------------------------------------------------

TWO = (Group(SIZE, layers=(1,)), Group(SIZE, 4, layers=(0,)))


@pytest.mark.parametrize(
    ("memory", "engine", "message"),
    [
        ({"groups": (Group(SIZE), Group(SIZE, 4))}, {}, r"memory.groups: expected each layer of the model in one"),
        (
            {"groups": (Group(SIZE, layers=(1,)), Group(SIZE, 4))},
            {},
            r"memory.groups: expected each layer.*\[\(1,\), \(\)\]",
        ),
        ({"groups": (Group(SIZE, layers=(1,)), Group(SIZE, 4, layers=(1,)))}, {}, r"each layer of the model in one"),
        ({"groups": (Group(SIZE, layers=(0,)), Group(SIZE, 4, layers=(2,)))}, {}, r"each layer of the model in one"),
        ({"groups": (Group(SIZE, chunk=4),)}, {}, r"memory.groups: expected groups with blocks of one size"),
        ({"groups": (TWO[0], Group(4, 4, layers=(0,)))}, {}, r"memory.groups: expected groups with blocks of one size"),
        ({"groups": TWO, "max_chunk": 5}, {}, "token_budget: expected at most memory.max_chunk = 5.*got 6"),
        (
            {"groups": TWO},
            {"kv_format": KVFormat(precise_layers=(1,), k=TensorFormat("e4m3"))},
            r"kv_format.precise_layers: expected all or none of layers \[1, 0\], which share.*got \[1\]",
        ),
        ({"groups": TWO}, {"kv_format": scheme("e4m3_token_head:first2")}, "got 'e4m3_token_head:first2'"),
        (
            {"groups": TWO},
            {"kv_format": scheme("int8_head_v")},
            r"kv_format: expected precise_tokens=0, and no scales.*\[1, 0\].*\+int8_head",
        ),
    ],
)
def test_groups_that_no_model_could_attend_over_are_refused(memory, engine, message):
    paged = Paged(4, MAX_LEN, SIZE, 10, **memory)
    with pytest.raises(ValueError, match=message):
        Engine(paged, fake_model.decode, BUDGET, **engine)


def test_layers_of_a_group_by_itself_may_store_as_each_likes():
    fmt = KVFormat(TensorFormat("int8", "head"), precise_layers=(1,))
    for groups in ((Group(SIZE, 5),), group_layers((5, 5, 5), SIZE)):
        Engine(Paged(4, MAX_LEN, SIZE, 10, groups=groups), fake_model.decode, BUDGET, kv_format=fmt)


def test_a_cache_with_an_entry_for_every_layer_is_refused():
    memory = grouped("gemma")
    engine = Engine(memory, fake_model.Model(MODELS["gemma"]), BUDGET)
    cache = filled_cache(5, (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM), 0)
    with pytest.raises(ValueError, match="cache: expected 2 entries, one for each layer of the memory's largest group"):
        init_engine(engine, workload(), cache)


@pytest.mark.parametrize(("windows", "layer", "got"), [((5, None), 1, "None"), ((6, 4), 0, "6")])
def test_a_layer_that_sees_more_than_its_group_keeps_is_refused(windows, layer, got):
    """As it is traced, before anything ran."""
    memory = grouped("mistral")
    engine = Engine(memory, fake_model.Model(windows), BUDGET)
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    state = init_engine(engine, workload(), filled_cache(2, shape, 0))
    with pytest.raises(ValueError, match=f"spec.window: expected at most 5.*got {got}") as caught:
        run_steps.lower(engine, params("mistral"), workload(), state, STEPS)
    assert caught.value.__notes__[0] == f"in layer {layer} of the model"


def test_a_layer_of_no_group_is_refused():
    memory = grouped("mistral")
    engine = Engine(memory, fake_model.Model((5, 5, 5)), BUDGET)
    shape = (memory.num_slots, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    state = init_engine(engine, workload(), filled_cache(2, shape, 0))
    three = fake_model.as_params(fake_model.make_tables(1, 3, MAX_LEN))
    with pytest.raises(ValueError, match="layer: expected one of those in the memory's groups, got 2"):
        run_steps.lower(engine, three, workload(), state, STEPS)
