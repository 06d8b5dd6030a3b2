"""The jitted block manager against the plain-Python one, in all there is to see, after random operations."""

import random

import hypothesis.stateful as stateful
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.paxkv.oracles.twins import MEMORIES, Driver, Twins, drive

pytestmark = pytest.mark.slow

CHOICES = st.randoms(use_true_random=False)


def machine(memory):
    """A state machine whose rules are what the driver does, and whose chances are hypothesis' choices."""

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.driver = Driver(Twins(memory))

        @stateful.rule(rng=CHOICES)
        def admit(self, rng: random.Random):
            self.driver.admit(rng)

        @stateful.rule(rng=CHOICES)
        def grow(self, rng: random.Random):
            self.driver.grow(rng)

        @stateful.rule(rng=CHOICES)
        def decode(self, rng: random.Random):
            self.driver.grow(rng, most=1)

        @stateful.rule(rng=CHOICES)
        def release(self, rng: random.Random):
            self.driver.release(rng)

        @stateful.rule()
        def background(self):
            self.driver.twins.both("background", plain="free_out_of_view")

        @stateful.rule(rng=CHOICES)
        def misuse(self, rng: random.Random):
            self.driver.misuse(rng)

        @stateful.precondition(lambda self: memory.cache)
        @stateful.rule(rng=CHOICES, everything=st.booleans())
        def publish(self, rng: random.Random, everything: bool):
            self.driver.publish(rng, everything=everything)

        @stateful.precondition(lambda self: memory.cache)
        @stateful.rule(rng=CHOICES)
        def between(self, rng: random.Random):
            self.driver.between(rng)

        @stateful.rule(rng=CHOICES)
        def fork(self, rng: random.Random):
            self.driver.fork(rng)

        @stateful.rule(rng=CHOICES)
        def reorder(self, rng: random.Random):
            self.driver.reorder(rng)

        @stateful.precondition(lambda self: self.driver.plain.copies)
        @stateful.rule()
        def copied(self):
            self.driver.twins.both("copied")

    return Machine


@pytest.mark.parametrize("name", MEMORIES)
def test_manager_agrees_with_the_oracle(name):
    stateful.run_state_machine_as_test(
        machine(MEMORIES[name]),
        settings=settings(
            max_examples=4,
            stateful_step_count=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", MEMORIES)
def test_manager_agrees_with_the_oracle_for_long(name):
    drive(Twins(MEMORIES[name]), seed=0, steps=300)
