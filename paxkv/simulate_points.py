"""Many simulations with few compiled programs: what points of a sweep differ in becomes values of one program.

Values are policies, how much of the memory may be used and is kept back, and all numbers of the requests: lengths,
arrivals, seeds. Whatever shapes, branches or costs are made of is not, so that points which differ in it have programs
of their own: the kind of memory, its rows and block size, the cost model, preemption by swapping, how many requests.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from paxkv.policy import Choices, Policy, choices
from paxkv.requests import Requests, Status
from paxkv.simulate import (
    Halt,
    Simulated,
    Simulation,
    Simulator,
    init_simulation,
    require_sound,
    run,
    simulate,
    take_records,
)

Tree = TypeVar("Tree")
MOST_TOGETHER = 64
"""Points that are on the devices at once, where the records of one take some megabytes."""


class Point(NamedTuple):
    """One simulation: a server and what is asked of it."""

    simulator: Simulator
    requests: Requests
    transcripts: Int32[Array, "requests width"] | None = None
    """As for `simulate`, where memory shares what is equal. Such points are not dealt to devices: tokens are large."""


@jax.jit(static_argnames=("simulator", "mesh"), donate_argnames="simulations")
def run_points(
    simulator: Simulator, mesh: jax.sharding.Mesh, requests: Requests, simulations: Simulation, choice: Choices
) -> Simulation:
    """Runs several points as `run` does one, dealt to devices, one after another on each: one compiled program.

    Not a batch: what branches or loops over a batch has to select from the whole state at each turn.

    Args:
      simulator: the server.
      mesh: devices along one axis, as many as divide the number of points.
      requests: of each point, with a leading axis of points; so are all that follow.
      simulations: where each stands.
      choice: the policy of each.

    Raises:
      ValueError: the devices do not divide the points.
    """
    if choice.order.ndim != 1 or choice.order.size % mesh.size:
        shape = list(choice.order.shape)
        raise ValueError(f"choice: expected a leading axis of points, a multiple of {mesh.size} devices, got {shape}")
    axis = jax.P(mesh.axis_names[0])

    def here(points: tuple) -> Simulation:
        def one(point: tuple) -> Simulation:
            requests, simulation, choice = point
            return run(simulator, requests, simulation, choice=choice)

        return jax.lax.map(one, points)

    points = jax.reshard((requests, simulations, choice), jax.NamedSharding(mesh, axis))
    return jax.shard_map(here, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)(points)


def simulate_points(
    points: Sequence[Point],
    devices: Sequence[Any] | None = None,
    on_dispatch: Callable[[int], Any] = lambda newly_ended: None,
) -> Iterator[Callable[[], Simulated]]:
    """Host side: what `simulate` gives for each point, bit for bit, from as few compiled programs as possible.

    Args:
      points: in any order. Those that share a program are computed together, up to `MOST_TOGETHER`, when the first of
        them is due.
      devices: to which they are dealt; all that JAX has if None.
      on_dispatch: called with the number of requests that have ended since it was called last.

    Yields:
      Of each point, in their order, what is called for its simulation, or raises what `simulate` would raise of it, so
      that others lose nothing by it.

    Raises:
      ValueError: a point's requests ask for what a simulator cannot give.
    """
    programs: dict[Hashable, list[int]] = {}
    for place, point in enumerate(points):
        programs.setdefault(program_of(point), []).append(place)
    found: dict[int, Callable[[], Simulated]] = {}
    for place, point in enumerate(points):
        if place not in found:
            alike = [other for other in programs[program_of(point)] if other >= place][:MOST_TOGETHER]
            together = _simulate([points[other] for other in alike], devices or jax.devices(), on_dispatch)
            found |= dict(zip(alike, together, strict=True))
        yield found.pop(place)


def program_of(point: Point) -> Hashable:
    """Equal for points that share a compiled program."""
    simulator = point.simulator
    alike = dataclasses.replace(
        simulator,
        # The size of its hash table may decide whether a cache has room for one more block.
        memory=simulator.memory if simulator.memory.publishes else simulator.memory.with_units(1),
        policy=Policy(preemption=simulator.policy.preemption),
    )
    leaves, structure = jax.tree.flatten((point.requests, point.transcripts))
    return alike, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree with a leading axis of points."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def point_mesh(devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The mesh of devices to which `run_points` deals points."""
    return jax.sharding.Mesh(np.array(devices), ("points",), axis_types=(jax.sharding.AxisType.Explicit,))


def _simulate(
    points: Sequence[Point], devices: Sequence[Any], on_dispatch: Callable[[int], Any]
) -> list[Callable[[], Simulated]]:
    """What came of points that share a program; whoever asks for one is told what went wrong with it."""
    memory, among = points[0].simulator.memory, tuple(point.simulator.policy for point in points)
    if not memory.publishes:
        memory = memory.with_units(max(point.simulator.memory.num_units for point in points))
    simulator = dataclasses.replace(points[0].simulator, memory=memory, policy=among[0])

    def alone(point: Point) -> Simulated:
        limits, choice = point.simulator.memory.own_limits, choices(point.simulator.policy, among)
        return simulate(simulator, point.requests, limits, point.transcripts, choice, on_dispatch)

    if points[0].transcripts is not None:
        return [functools.partial(alone, point) for point in points]
    mesh = point_mesh(devices[: len(points)])
    # Each device gets as many: what is missing is the last point again, of which nobody asks what came. Dealt in turn,
    # as neighbours take about as long, and the ends of a sweep do not.
    whole = [*points, *[points[-1]] * (-len(points) % mesh.size)]
    places = np.arange(len(whole)).reshape(-1, mesh.size).T.reshape(-1)
    dealt = [whole[place] for place in places]
    begun = [init_simulation(simulator, own.requests, own.simulator.memory.own_limits) for own in dealt]
    chosen = [choices(own.simulator.policy, among) for own in dealt]
    sharding = jax.NamedSharding(mesh, jax.P("points"))
    asked, simulations, choice = jax.device_put(
        (stack([own.requests for own in dealt]), stack(begun), stack(chosen)), sharding
    )
    records, ended, asked_for = [[] for _ in dealt], 0, places < len(points)
    while True:
        simulations = run_points(simulator, mesh, asked, simulations, choice)
        now = jax.tree.map(np.asarray, simulations)
        for slot, of_slot in enumerate(records):
            of_slot.append(take_records(_at(now.records, slot), int(now.count[slot])))
        before, ended = ended, int(np.sum(now.scheduler.progress.status[asked_for] == Status.ENDED))
        on_dispatch(ended - before)
        if not np.any((now.count >= simulator.max_records) & (now.halt == Halt.NONE)):
            break

    def in_slot(slot: int) -> Simulated:
        own: Simulation = _at(now, slot)
        require_sound(simulator, own)
        steps = jax.tree.map(lambda *arrays: np.concatenate(arrays), *records[slot])
        return Simulated(steps, own.scheduler.progress, int(own.turns))

    return [functools.partial(in_slot, int(slot)) for slot in np.argsort(places)[: len(points)]]


def _at(trees: Tree, place: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[place], trees)
