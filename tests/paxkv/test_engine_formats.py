"""The engine over quantised caches: sharing, copying and swapping move scales with what they scale."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.calibration import Calibration
from paxkv.engine import Engine, all_ended, init_engine, output_tokens, run_steps
from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import KVFormat, TensorFormat, scheme
from paxkv.paged import Paged
from paxkv.policy import Policy
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import make_requests
from tests.paxkv import fake_model
from tests.paxkv.oracles.jitted import quickly

MAX_LEN, LAYERS = 32, 2
SHARING = Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=14, cache=PrefixCache(), forks=True, host_blocks=20)
ALONE = Paged(rows=16, max_len=MAX_LEN, block_size=8, num_blocks=64)
LENGTHS, OUTPUTS = [18, 15, 5, 12, 20, 3, 13, 15], [9, 12, 12, 7, 8, 12, 3, 12]
# Scales that do not depend on which tokens were stored together.
FORMATS = {
    "e4m3_token_head": scheme("e4m3_token_head"),
    "int4_token_head": scheme("int4_token_head"),
    "int8_head": scheme("int8_head"),
    "mixed": KVFormat(
        k=TensorFormat("int8", "token_head", "pow2"),
        v=TensorFormat("e5m2", "layer"),
        precise="f16",
        precise_layers=(1,),
        rotate=True,
    ),
}


@functools.cache
def model():
    return fake_model.as_params(fake_model.make_tables(29, LAYERS, MAX_LEN))


def workload():
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, fake_model.VOCAB, (len(LENGTHS), max(LENGTHS)))
    prompts[[1, 4, 6, 7], :13] = prompts[0, :13]
    arrivals = np.arange(len(LENGTHS)) * 0.4
    return make_requests(prompts, np.array(LENGTHS), np.array(OUTPUTS), arrivals, seed=3, samples=2, temperature=0.7)


def serve(memory, fmt, budget=16):
    """Tokens of all samples, over a cache in which nothing may be read before it was written; and what was shared."""
    requests = workload()
    shape = (LAYERS, fake_model.KV_HEADS, fake_model.HEAD_DIM)
    calibration = Calibration(*(np.full(shape, 6, np.float32) for _ in range(2)), 1, rotated=fmt.rotate)
    cache = init_kv_cache(
        LAYERS, memory.num_slots, *shape[1:], fmt, block_size=memory.block_size, calibration=calibration
    )
    if memory.cache is not None:
        with pytest.raises(ValueError, match="kv_format: expected 'f32', under which the memory's prefix cache"):
            Engine(memory, fake_model.decode, budget, kv_format=fmt)
        memory = dataclasses.replace(memory, cache=PrefixCache(kv_format=fmt.name))
    policy = Policy(preemption="swap" if memory.host_blocks else "recompute")
    engine = Engine(memory, fake_model.decode, budget, policy=policy, kv_format=fmt)
    state = init_engine(engine, requests, cache)
    advance = run_steps.lower(engine, model(), requests, state, 16).compile(compiler_options=quickly())
    totals = dict.fromkeys(("hit_tokens", "copied_blocks", "swapped_in_blocks"), 0)
    while not all_ended(state):
        state, record = advance(model(), requests, state)
        totals = {name: total + int(jnp.sum(getattr(record, name))) for name, total in totals.items()}
    return output_tokens(requests, state), totals, state.cache


@functools.cache
def alone(name):
    return serve(ALONE, FORMATS[name])[0]


@pytest.mark.parametrize(
    "name",
    ["e4m3_token_head", *(pytest.param(name, marks=pytest.mark.soak) for name in FORMATS if name != "e4m3_token_head")],
)
def test_sharing_copying_and_swapping_change_no_token(name):
    tokens, totals, _ = serve(SHARING, FORMATS[name])
    assert tokens == alone(name)
    assert min(totals.values()) > 0, totals
