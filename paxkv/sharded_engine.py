"""A server over a mesh of devices: replicas beside one another, each one engine that its devices run together.

Every device runs the same engine on its part of the weights, of the heads and of the blocks; the scheduler's decisions
are taken on all of them alike and cost no exchange. What is exchanged stands in the code that exchanges it: the
decoder's sums and `split_paged.merge_over`. Replicas know nothing of one another.

All arrays of the state carry the replicas as their first axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int32, PyTree

from paxkv.engine import Engine, EngineState, init_engine, output_tokens, step
from paxkv.kv_cache import KVCache, KVPool, LayerCache
from paxkv.requests import Requests
from paxkv.sharding import RULES, Rules, partition, put, to_host
from paxkv.split_paged import SplitPaged
from paxkv.steps import StepRecord


@dataclasses.dataclass(frozen=True)
class ShardedEngine:
    """An engine and the devices that run it.

    Attributes:
      engine: as each device runs it: its decoder is a device's part, its memory a replica's.
      mesh: of axes `paxkv.sharding.AXES`.
      rules: what is split over which of them.

    Raises:
      ValueError: the mesh splits blocks and the memory does not, or the other way round; or the scales of the format
        depend on what a device stores first.
    """

    engine: Engine
    mesh: Mesh
    rules: Rules = RULES

    def __post_init__(self) -> None:
        memory, parts = self.engine.memory, self.mesh.shape["kv"]
        if (memory.shards if isinstance(memory, SplitPaged) else 1) != parts:
            raise ValueError(
                f"engine.memory: expected SplitPaged of shards={parts}, as the mesh has {parts} devices along kv, got "
                f"{memory}"
            )
        fmt = self.engine.kv_format
        if self.mesh.size > self.replicas and "first_write" in (fmt.k.calibration, fmt.v.calibration):
            raise ValueError(
                "engine.kv_format: expected scales that do not depend on which device stores first, got "
                f"{fmt.name}; use static or dynamic ones"
            )

    @property
    def replicas(self) -> int:
        """Servers beside one another."""
        return self.mesh.shape["data"]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """Requests dealt to replicas, and which of all requests each one is."""

    requests: Requests  # every array with an axis of replicas in front
    ids: Int32[np.ndarray, "replicas requests"]  # -1 for one that only fills up and asks for nothing


def deal(requests: Requests, replicas: int) -> Dealt:
    """Deals requests out in turn, as a router that knows nothing of them does; samples of one prompt stay together."""
    heads = np.arange(requests.count, dtype=np.int32).reshape(-1, requests.samples)
    per_replica = -(-len(heads) // replicas)
    padded = np.concatenate([heads, np.full((per_replica * replicas - len(heads), requests.samples), -1, np.int32)])
    ids = padded.reshape(per_replica, replicas, requests.samples).swapaxes(0, 1).reshape(replicas, -1)
    last = jnp.asarray(np.where(ids < 0, requests.count - 1, ids))
    mine = jax.tree.map(lambda array: array[last], requests)
    place = np.arange(ids.shape[1], dtype=np.int32)
    asked = jnp.asarray(ids >= 0)
    leaders = jnp.broadcast_to(jnp.asarray(place // requests.samples * requests.samples), ids.shape)
    dealt = dataclasses.replace(
        mine,
        prompt_lens=jnp.where(asked, mine.prompt_lens, 1),
        output_lens=jnp.where(asked, mine.output_lens, 0),
        leaders=leaders,
    )
    return Dealt(dealt, ids)


def init_cache(sharded: ShardedEngine, make: Callable[[], KVCache]) -> KVCache:
    """A cache of all replicas, each part of it made on its device.

    Args:
      sharded: whose.
      make: gives the empty cache of one replica, with all its heads and all its slots.
    """
    stacked, shardings = _placed(sharded, make)
    return jax.jit(stacked, out_shardings=shardings)()


def abstract_cache(sharded: ShardedEngine, make: Callable[[], KVCache]) -> KVCache:
    """What `init_cache` gives, as shapes and dtypes and where they lie."""
    stacked, shardings = _placed(sharded, make)

    def of(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(of, jax.eval_shape(stacked), shardings)


def _placed(sharded: ShardedEngine, make: Callable[[], KVCache]) -> tuple[Callable[[], KVCache], KVCache]:
    """What makes the cache of all replicas, and where its arrays lie."""
    mesh = sharded.mesh

    def stacked() -> KVCache:
        cache = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (sharded.replicas, *x.shape)), make())
        counts = jnp.zeros((sharded.replicas, mesh.shape["model"] * mesh.shape["kv"]), jnp.int32)
        layers = (layer and dataclasses.replace(layer, clipped=counts) for layer in cache.layers)
        return KVCache(tuple(layers))

    specs = cache_specs(jax.eval_shape(stacked), sharded.rules)
    return stacked, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def cache_specs(cache: KVCache, rules: Rules = RULES, *, split_slots: bool = True) -> KVCache:
    """Where the arrays of a cache lie; replicas are their first axis.

    Without `split_slots` every device of a replica has all slots, and counts nothing.
    """
    slots = "slots" if split_slots else None

    def of_pool(pool: KVPool) -> KVPool:
        axes = {
            "data": ("replicas", slots, "kv_heads", None),
            "factor": ("replicas", "kv_heads", None),
            "scales": ("replicas", slots, "kv_heads"),
            "first": ("replicas", None, None, "kv_heads", None),
        }
        arrays = {name: getattr(pool, name) for name in axes}
        specs = {n: None if a is None else partition(axes[n][: a.ndim], rules) for n, a in arrays.items()}
        return dataclasses.replace(pool, **specs)

    def of_layer(layer: LayerCache) -> LayerCache:
        counts = partition(("replicas", "counts" if split_slots else None), rules)
        return dataclasses.replace(layer, k=of_pool(layer.k), v=of_pool(layer.v), clipped=counts)

    return KVCache(tuple(layer and of_layer(layer) for layer in cache.layers))


def init(sharded: ShardedEngine, dealt: Dealt, cache: KVCache) -> tuple[Requests, EngineState]:
    """The requests where they are served, and replicas that have not started. Takes over `cache`."""
    by_replica = partition(("replicas",), sharded.rules)
    requests = jax.tree.map(lambda x: put(x, NamedSharding(sharded.mesh, by_replica)), dealt.requests)
    max_output = max(1, int(np.max(np.asarray(dealt.requests.output_lens))))

    @jax.jit(donate_argnums=1)
    def begin(requests: Requests, cache: KVCache) -> EngineState:
        def on_device(requests: Requests, cache: KVCache) -> EngineState:
            return as_replica(
                init_engine(sharded.engine, one_replica(requests), one_replica(cache), max_output=max_output)
            )

        of_cache = specs_of(cache)
        host = of_cache if sharded.engine.policy.swaps(sharded.engine.memory) else None
        out = cast(Any, EngineState)(by_replica, of_cache, host, by_replica, by_replica)
        return on_devices(sharded, on_device, (specs_of(requests), of_cache), out)(requests, cache)

    return requests, begin(requests, cache)


@jax.jit(static_argnames=("sharded", "num_steps"), donate_argnames="state")
def run_steps(
    sharded: ShardedEngine, params: Any, requests: Requests, state: EngineState, num_steps: int
) -> tuple[EngineState, StepRecord]:
    """Runs `num_steps` steps of every replica on its devices. Donates `state`.

    Args:
      sharded: the servers.
      params: weights of the model, placed by the rules of `sharded`.
      requests: of all replicas, as `init` gave them.
      state: of all replicas.
      num_steps: how many. Static.

    Returns:
      The state, and records whose arrays are `[replicas, num_steps]`.
    """

    def on_device(params: Any, requests: Requests, state: EngineState) -> tuple[EngineState, StepRecord]:
        one = one_replica(requests)
        after, records = jax.lax.scan(
            lambda carry, _: step(sharded.engine, params, one, carry), one_replica(state), length=num_steps
        )
        return as_replica(after), as_replica(records)

    ins = tuple(specs_of(argument) for argument in (params, requests, state))
    outs = (ins[2], partition(("replicas",), sharded.rules))
    return on_devices(sharded, on_device, ins, outs)(params, requests, state)


def outputs(dealt: Dealt, state: EngineState) -> list[list[int]]:
    """Host side: what each of all requests has generated so far. Waits for the devices."""
    found: dict[int, list[int]] = {}
    seen = to_host(without_cache(state))
    for replica, ids in enumerate(dealt.ids):
        requests, own = (jax.tree.map(lambda x, r=replica: x[r], tree) for tree in (dealt.requests, seen))
        found |= dict(zip(ids.tolist(), output_tokens(requests, own), strict=True))
    return [found[request] for request in range(max(found) + 1)]


def without_cache(state: EngineState) -> EngineState:
    """What the host looks at of a state."""
    return dataclasses.replace(state, cache=KVCache(()), host_cache=None)


def one_replica(tree: PyTree) -> Any:
    """A replica's own, without the axis of replicas."""
    return jax.tree.map(lambda x: x[0], tree)


def as_replica(tree: PyTree) -> Any:
    """What is a replica's own, as the only one of an axis of replicas."""
    return jax.tree.map(lambda x: x[None], tree)


def specs_of(tree: PyTree) -> Any:
    """Where arrays lie, which inside of jit their types say."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def on_devices(
    sharded: ShardedEngine, run: Callable[..., Any], in_specs: tuple[PyTree, ...], out_specs: PyTree
) -> Callable[..., Any]:
    """`run` on every device, with its part of the arguments."""
    # Devices that hold the same compute the same, which the checker cannot know of ids that come from a loop.
    return jax.shard_map(run, mesh=sharded.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
