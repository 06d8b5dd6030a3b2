"""Points of a sweep against each of them simulated by itself."""

import dataclasses

import jax
import numpy as np
import pytest

from paxkv import simulate_points as simulate_points_module
from paxkv.cost_model import StepCost
from paxkv.policy import FIRST_COME, choices
from paxkv.requests import make_requests
from paxkv.simulate import Simulator, init_simulation, simulate
from paxkv.simulate_points import Point, point_mesh, program_of, run_points, simulate_points
from tests.paxkv.test_simulate import BUDGET, COST, MEMORIES, POLICIES, leaves, on_device, random_workload

# By kind, of another size and with another watermark than the first; and the policy that serves there.
SMALLER = {
    "paged": (dataclasses.replace(MEMORIES["paged"], num_blocks=15, watermark_blocks=2), POLICIES[1]),
    "vattention": (dataclasses.replace(MEMORIES["vattention"], num_groups=8, watermark_groups=1), POLICIES[2]),
    "reserved": (dataclasses.replace(MEMORIES["reserved"], num_slots=90), POLICIES[1]),
}


def point(memory, policy, seed, max_records):
    requests = random_workload(seed)
    for request in requests:
        request.delivered = 0
    return Point(Simulator(memory, BUDGET, COST, policy, max_stride=6, max_records=max_records), on_device(requests))


@pytest.mark.parametrize("name", SMALLER)
def test_points_that_share_a_program_are_what_they_are_alone(name):
    smaller, policy = SMALLER[name]
    # Of the first, and of it under other arrivals and lengths, the memory is the larger one.
    asked = [(MEMORIES[name], FIRST_COME, 8), (smaller, policy, 9), (MEMORIES[name], FIRST_COME, 10)]
    points = [point(*each, max_records=30) for each in asked]  # which several dispatches fill
    assert len({program_of(each) for each in points}) == 1
    ended = []
    together = [found() for found in simulate_points(points, jax.devices()[:1], ended.append)]
    alone = [simulate(*point(*each, max_records=512)) for each in asked]
    assert [leaves(each) for each in together] == [leaves(each) for each in alone]
    assert [each.turns for each in together] == [each.turns for each in alone]
    assert len({str(leaves(each)) for each in together}) == 3
    assert len(ended) > 1
    assert sum(ended) == sum(each.requests.count for each in points)


def test_points_of_several_programs_come_in_their_order():
    one = make_requests(None, np.array([3, 9]), np.array([5, 2]), np.zeros(2), seed=0)
    other = make_requests(None, np.array([3]), np.array([4]), np.zeros(1), seed=0)
    server = Simulator(MEMORIES["paged"], BUDGET, COST, max_stride=1, max_records=40)
    points = [Point(server, one), Point(server, other), Point(server, one)]
    assert [program_of(each) == program_of(points[0]) for each in points] == [True, False, True]
    generated = [found().progress.generated.tolist() for found in simulate_points(points, jax.devices()[:1])]
    assert generated == [[5, 2], [4], [5, 2]]


def test_more_points_than_are_computed_together_come_in_their_order(monkeypatch):
    monkeypatch.setattr(simulate_points_module, "MOST_TOGETHER", 2)
    server = Simulator(MEMORIES["paged"], BUDGET, COST, max_stride=1, max_records=40)
    asked = [make_requests(None, np.array([3]), np.array([n]), np.zeros(1), seed=0) for n in (5, 2, 4, 3)]
    found = simulate_points([Point(server, requests) for requests in asked], jax.devices()[:2])
    assert [each().progress.generated.tolist() for each in found] == [[5], [2], [4], [3]]


@pytest.mark.parametrize(
    "changes", [{"token_budget": 10}, {"cost": StepCost()}, {"max_stride": 2}, {"memory": MEMORIES["reserved"]}]
)
def test_what_a_program_is_made_of_makes_another_one(changes):
    requests = on_device(random_workload(3))
    server = Simulator(MEMORIES["paged"], BUDGET, COST)
    assert program_of(Point(server, requests)) != program_of(Point(dataclasses.replace(server, **changes), requests))


def test_a_point_that_cannot_go_on_is_told_to_who_asks_for_it_alone():
    short = make_requests(None, np.array([3]), np.array([3]), np.zeros(1), seed=0)
    long = make_requests(None, np.array([3]), np.array([30]), np.zeros(1), seed=0)
    hours = Simulator(MEMORIES["paged"], BUDGET, StepCost(step_ns=3600 * 10**9), max_stride=1, max_records=40)
    points = [Point(hours, each) for each in (short, long, short)]
    first, stopped, last = simulate_points(points, jax.devices()[:1])
    assert first().progress.generated.tolist() == last().progress.generated.tolist() == [3]
    with pytest.raises(ValueError, match="the modelled clock passed 21474 s"):
        stopped()


def test_points_without_an_axis_of_points_are_refused():
    one = make_requests(None, np.array([3]), np.array([2]), np.zeros(1), seed=0)
    server = Simulator(MEMORIES["paged"], BUDGET, COST)
    with pytest.raises(ValueError, match="choice: expected a leading axis of points, a multiple of 1 devices"):
        run_points(server, point_mesh(jax.devices()[:1]), one, init_simulation(server, one), choices(FIRST_COME))
