"""Requests whose prompts are read by one server and answered by another: the same tokens, and nothing moves in vain."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paxkv import sharded_engine
from paxkv.disaggregated import check_pair, deliver, send
from paxkv.engine import all_ended
from paxkv.kv_cache import block_bytes
from paxkv.kv_format import scheme
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import make_requests
from paxkv.sharded_engine import deal
from paxkv.sharding import MeshShape
from tests.models.test_sharded import CONFIG, PROMPTS, new_cache, on_one, started, workload
from tests.paxkv.oracles.jitted import quickly

OUTPUT = 9
WIDTH = 32  # of prompts
FORMAT = "e4m3_token_head"
MEMORY = Paged(rows=4, max_len=64, block_size=4, num_blocks=48, cache=PrefixCache(kv_format=scheme(FORMAT).name))


def asked(outputs, first=None):
    """The prompts of the workload, perhaps with the token behind each, all there from the start."""
    base = workload()
    prompts, lengths = np.asarray(base.prompts), np.asarray(base.prompt_lens)
    prompts = np.pad(prompts, ((0, 0), (0, WIDTH - prompts.shape[1])))
    if first is not None:
        prompts[np.arange(len(lengths)), lengths] = first
        lengths = lengths + 1
    return make_requests(prompts, lengths, np.full(len(lengths), outputs), np.zeros(len(lengths)), seed=0)


def answers_of_one(samples):
    return asked(OUTPUT)


def serve(server, on_end=lambda state, request: None):
    sharded, params, requests, state = server
    advance = sharded_engine.run_steps.lower(sharded, params, requests, state, 1).compile(compiler_options=quickly())
    ended, hits = set(), 0
    while not all_ended(state):
        state, records = advance(params, requests, state)
        hits += int(np.sum(records.hit_tokens))
        status = np.asarray(state.scheduler.progress.status)[0]
        for request in sorted(set(np.flatnonzero(status == 2).tolist()) - ended):
            on_end(state, request)
            ended.add(request)
    return state, hits


@functools.cache
def prefilled(shape):
    """A server that has read all prompts: itself, the blocks of each prompt, and the first tokens of the answers."""
    devices = jax.devices()[: shape.size]
    server, parcels = started(shape, CONFIG, MEMORY, FORMAT, asked=lambda samples: asked(1), devices=devices), {}

    def pack(state, request):
        parcels[request] = send(server[0], state, asked(1).prompts[request], PROMPTS[request])

    state, _ = serve(server, pack)
    firsts = [tokens[0] for tokens in sharded_engine.outputs(deal(asked(1), 1), state)]
    return server[0], parcels, firsts


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MeshShape(1, 2, 1), MeshShape(1, 1, 2)),
        pytest.param(MeshShape(1, 1, 4), MeshShape(1, 4, 1), marks=pytest.mark.soak),
    ],
    ids=lambda shape: shape.name,
)
def test_tokens_are_those_of_one_server_and_only_what_is_missing_moves(first, second):
    expected, _, _ = on_one(CONFIG, MEMORY, FORMAT, asked=answers_of_one)
    source, parcels, firsts = prefilled(first)
    assert [parcels[r].blocks for r in range(len(PROMPTS))] == [length // 4 for length in PROMPTS]

    behind = lambda samples: asked(OUTPUT - 1, firsts)  # noqa: E731
    answers = started(second, CONFIG, MEMORY, FORMAT, asked=behind, devices=jax.devices()[4:][: second.size])
    check_pair(source, answers[0])
    sharded, params, requests, state = answers
    size = block_bytes(new_cache(CONFIG, MEMORY, scheme(FORMAT), MEMORY.num_blocks), 4)
    stored = set()
    for request, parcel in sorted(parcels.items()):
        state, delivery = deliver(sharded, state, parcel)
        prompt = np.asarray(asked(1).prompts)[request]
        blocks = {tuple(prompt[: 4 * (i + 1)]) for i in range(PROMPTS[request] // 4)}
        assert delivery.there == len(blocks & stored)
        assert delivery.moved == len(blocks - stored)
        assert delivery.bytes == delivery.moved * size
        assert not delivery.refused
        stored |= blocks
        state, again = deliver(sharded, state, parcel)
        assert (again.moved, again.bytes, again.there) == (0, 0, len(blocks))
    state, hits = serve((sharded, params, requests, state))
    tokens = sharded_engine.outputs(deal(asked(OUTPUT - 1, firsts), 1), state)
    assert [[one, *others] for one, others in zip(firsts, tokens, strict=True)] == expected
    assert hits == sum(length // 4 * 4 for length in PROMPTS)  # nothing that moved was computed again


def test_what_does_not_fit_is_refused_and_changes_nothing():
    parcel = prefilled(MeshShape(1, 2, 1))[1][0]
    small = dataclasses.replace(MEMORY, num_blocks=parcel.blocks - 1)
    sharded, _, _, state = started(MeshShape(1, 1, 1), CONFIG, small, FORMAT, asked=lambda samples: asked(1))
    before = jax.device_get(state.scheduler.memory)
    state, delivery = deliver(sharded, state, parcel)
    assert (delivery.refused, delivery.moved, delivery.bytes) == (True, 0, 0)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.scheduler.memory)))


@pytest.mark.parametrize(
    ("change", "kv_format", "message"),
    [
        ({"cache": None}, "f32", "expected a PrefixCache"),
        ({"block_size": 8}, FORMAT, "expected blocks of 4 tokens in e4m3_token_head"),
    ],
)
def test_servers_between_which_nothing_can_move_are_refused(change, kv_format, message):
    source = started(MeshShape(1, 1, 1), CONFIG, MEMORY, FORMAT)[0]
    other = started(MeshShape(1, 1, 1), CONFIG, dataclasses.replace(MEMORY, **change), kv_format)[0]
    with pytest.raises(ValueError, match=message):
        check_pair(source, other)
