"""A decode step whose layers are one loop gives what the step with a layer after another gives, and copies no pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.collectives import read_collectives, totals
from experiments.sharded_step import batch_of, decode_step, deep_arguments, expected_exchanges
from models.decoder import Decode
from models.deep import DeepDecode, stack_layers
from models.split import device_config, place_weights, split_of
from paxkv import sharded_engine
from paxkv.deep_attend import deepened, init_deep_cache
from paxkv.engine import Engine
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import KVCache, LayerCache
from paxkv.kv_format import scheme
from paxkv.paged import Paged
from paxkv.sharded_engine import ShardedEngine
from paxkv.sharding import MeshShape, make_mesh
from paxkv.split_paged import split_blocks
from tests.models.families import TINY, random_params
from tests.paxkv.oracles.jitted import quickly

CONFIG = dataclasses.replace(TINY, layers=3, q_heads=8, kv_heads=4, vocab=32, ffn=32, tied_embeddings=False)
MEMORY = Paged(rows=4, max_len=32, block_size=4, num_blocks=24)
LENGTHS = np.array([9, 1, 16, 20], np.int32)  # stored before the first step; within a block, and at the end of one


def server(shape, memory=MEMORY, kv_format="f32"):
    mesh = make_mesh(shape, CONFIG.q_heads, CONFIG.kv_heads)
    memory = split_blocks(memory, shape.kv) if shape.kv > 1 else memory
    decode = Decode(device_config(CONFIG, mesh), split_of(mesh))
    return ShardedEngine(Engine(memory, decode, 16, kv_format=scheme(kv_format)), mesh)


def placed(arrays, abstract):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), arrays, abstract)


def one_pool(layers, shards):
    """The pools of all layers as one: on every device, its part of one layer after that of another."""

    def join(*arrays):
        parts = [array.reshape(shards, -1, *array.shape[1:]) for array in arrays]
        return jnp.concatenate(parts, axis=1).reshape(-1, *arrays[0].shape[1:])

    k, v = (jax.tree.map(join, *(getattr(layer, name) for layer in layers)) for name in ("k", "v"))
    return LayerCache(k, v, jnp.zeros(1, jnp.int32))


def filled(layers, memory, kv_format):
    """A cache in which every slot holds something, so that reading a wrong one shows; and the same in one pool."""
    slots = memory.num_blocks * memory.block_size
    sizes = (layers, slots, CONFIG.kv_heads, CONFIG.head_dim)
    cache = init_kv_cache(*sizes, kv_format, block_size=memory.block_size, rows=memory.rows)
    leaves, tree = jax.tree.flatten(cache)
    rng = np.random.default_rng(0)
    # Positive, as scales are.
    arrays = [jnp.asarray(rng.uniform(0.1, 2, x.shape)).astype(x.dtype) if x.ndim > 1 else x for x in leaves]
    cache = jax.tree.unflatten(tree, arrays)
    deep = KVCache((one_pool(cache.layers, getattr(memory, "shards", 1)),))
    empty = init_deep_cache(layers, memory, CONFIG.kv_heads, CONFIG.head_dim, kv_format)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), deep) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)
    return cache, deep


@pytest.mark.parametrize(
    ("shape", "kv_format"),
    [(MeshShape(1, 4, 1), "f32"), (MeshShape(1, 2, 4), "f32"), (MeshShape(1, 1, 8), "e4m3_token_head")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_loop_over_the_layers_gives_the_same_tokens_and_the_same_cache(shape, kv_format):
    sharded = server(shape, kv_format=kv_format)
    memory, params = sharded.engine.memory, random_params(CONFIG)
    tables = np.random.default_rng(1).permutation(24).reshape(4, 6).astype(np.int32)
    tables = np.concatenate([tables, np.full((4, 2), 24, np.int32)], axis=1)
    abstract = deep_arguments(sharded, CONFIG)
    one, deep = (
        sharded_engine.init_cache(sharded, lambda c=c: c) for c in filled(CONFIG.layers, memory, scheme(kv_format))
    )
    weights = {False: place_weights(params, sharded.mesh), True: placed(stack_layers(params), abstract[0])}
    caches = {False: one, True: deep}
    steps = {}
    tokens = {which: jnp.array([3, 1, 4, 1], jnp.int32) for which in caches}
    for step in range(4):
        lengths = jnp.asarray(LENGTHS + step + 1)
        for which in caches:
            given = (weights[which], caches[which], jnp.asarray(tables), lengths, tokens[which])
            if which not in steps:
                lowered = jax.jit(decode_step(sharded, deep=which), donate_argnums=1).lower(*given)
                steps[which] = lowered.compile(compiler_options=quickly())
            tokens[which], caches[which] = steps[which](*given)
        assert tokens[True].tolist() == tokens[False].tolist()
    one, deep = (jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[0]), caches[which]) for which in (False, True))
    expected = one_pool(one.layers, shape.kv)
    got = dataclasses.replace(deep.layers[0], clipped=expected.clipped)
    for array, like in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(array, np.float32), np.asarray(like, np.float32), rtol=1e-5)


@pytest.mark.parametrize("shape", [MeshShape(1, 2, 1), MeshShape(1, 2, 4)], ids=lambda shape: shape.name)
def test_no_pool_is_copied_and_nothing_exchanged_but_sums_and_the_merge(shape):
    sharded = server(shape, dataclasses.replace(MEMORY, num_blocks=16_384))
    arguments = deep_arguments(sharded, CONFIG)
    compiled = jax.jit(decode_step(sharded, deep=True), donate_argnums=1).lower(*arguments).compile()
    pools = jax.tree.leaves(arguments[1])
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in pools)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= held
    assert analysis.temp_size_in_bytes < held / 8
    # In the loop once, and counted for every layer.
    assert totals(read_collectives(compiled.as_text())) == expected_exchanges(sharded)


def test_what_a_loop_cannot_do_is_refused():
    with pytest.raises(ValueError, match="config: expected layers that all see equally far"):
        DeepDecode(dataclasses.replace(CONFIG, window=4, full_every=2))
    with pytest.raises(ValueError, match=r"memory\.dealing: expected 'round_robin'"):
        deepened(split_blocks(MEMORY, 2, "by_shard"), 3)
    with pytest.raises(ValueError, match="kv_format: expected one without scales of layers"):
        init_deep_cache(3, MEMORY, 4, 8, scheme("e4m3_layer"))


def test_a_batch_of_shapes_is_that_of_the_step():
    abstract = deep_arguments(server(MeshShape(1, 2, 1)), CONFIG)[2:]
    assert [(x.shape, x.dtype) for x in abstract] == [(x.shape, x.dtype) for x in batch_of(MEMORY)]
