"""Many simulations with few compiled programs: what points of a sweep differ in becomes values of one program.

Values are policies, how much of the memory may be used and is kept back, and all numbers of the requests: lengths,
arrivals, seeds. Whatever shapes, branches or costs are made of is not, so that points which differ in it have programs
of their own: the kind of memory, its rows and block size, the cost model, preemption by swapping, how many requests.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.policy import Choices, Policy, choices
from paxkv.requests import Requests, Status
from paxkv.simulate import Halt, Simulated, Simulation, Simulator, init_simulation, require_sound, run, take_records

Tree = TypeVar("Tree")


class Point(NamedTuple):
    """One simulation: a server and what is asked of it."""

    simulator: Simulator
    requests: Requests


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
) -> Iterator[Simulated]:
    """Host side: what `simulate` gives for each point, bit for bit, from as few compiled programs as possible.

    Args:
      points: in any order. Those that share a program are computed together, when the first of them is due.
      devices: to which they are dealt; all that JAX has if None.
      on_dispatch: called with the number of requests that have ended since it was called last.

    Yields:
      The simulation of each point, in their order.

    Raises:
      ValueError: a point's requests ask for what a simulator cannot give, or, when that point is due, its modelled
        clock ran out.
      RuntimeError: when it is due, requests of a point are left, and nothing will ever happen to them.
      MemoryFaultError: when it is due, a point's memory has recorded a fault.
    """
    programs: dict[Hashable, list[int]] = {}
    for place, point in enumerate(points):
        programs.setdefault(program_of(point), []).append(place)
    found: dict[int, Callable[[], Simulated]] = {}
    for place, point in enumerate(points):
        if place not in found:
            alike = programs[program_of(point)]
            together = _simulate([points[other] for other in alike], devices or jax.devices(), on_dispatch)
            found |= dict(zip(alike, together, strict=True))
        yield found.pop(place)()


def program_of(point: Point) -> Hashable:
    """Equal for points that share a compiled program."""
    simulator, requests = point
    alike = dataclasses.replace(
        simulator,
        memory=simulator.memory.with_units(1),
        policy=Policy(preemption=simulator.policy.preemption),
    )
    leaves, structure = jax.tree.flatten(requests)
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
    memories = [point.simulator.memory for point in points]
    largest = memories[0].with_units(max(memory.num_units for memory in memories))
    simulator = dataclasses.replace(points[0].simulator, memory=largest)
    among = tuple(point.simulator.policy for point in points)
    mesh = point_mesh(devices[: len(points)])
    # Each device gets as many: what is missing is the last point again, of which nobody asks what came.
    dealt = [*points, *[points[-1]] * (-len(points) % mesh.size)]
    begun = [init_simulation(simulator, requests, own.memory.own_limits) for own, requests in dealt]
    chosen = [choices(own.policy, among) for own, _ in dealt]
    sharding = jax.NamedSharding(mesh, jax.P("points"))
    asked, simulations, choice = jax.device_put(
        (stack([requests for _, requests in dealt]), stack(begun), stack(chosen)), sharding
    )
    records, ended = [[] for _ in points], 0
    while True:
        simulations = run_points(simulator, mesh, asked, simulations, choice)
        now = jax.tree.map(np.asarray, simulations)
        for place, of_point in enumerate(records):
            of_point.append(take_records(_at(now.records, place), int(now.count[place])))
        before, ended = ended, int(np.sum(now.scheduler.progress.status[: len(points)] == Status.ENDED))
        on_dispatch(ended - before)
        if not np.any((now.count >= simulator.max_records) & (now.halt == Halt.NONE)):
            break

    def of_place(place: int) -> Simulated:
        own: Simulation = _at(now, place)
        require_sound(simulator, own)
        steps = jax.tree.map(lambda *arrays: np.concatenate(arrays), *records[place])
        return Simulated(steps, own.scheduler.progress, int(own.turns))

    return [lambda place=place: of_place(place) for place in range(len(points))]


def _at(trees: Tree, place: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[place], trees)
