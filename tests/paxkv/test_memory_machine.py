"""Each memory against its plain-Python oracle, in everything that can be seen, after random operations."""

import hypothesis.stateful as stateful
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, max_chunk


def machine(memory):
    """A state machine of mostly sensible operations, with some that no correct caller would ask for."""
    counts = st.lists(st.integers(-1, memory.max_len + 1), min_size=memory.rows, max_size=memory.rows)
    masks = st.lists(st.booleans(), min_size=memory.rows, max_size=memory.rows)
    lengths = st.integers(1, memory.max_len)

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.pair = Lockstep(memory)

        @stateful.rule(prompt=lengths, output=lengths, generated=st.integers(0, 3))
        def admit(self, prompt, output, generated):
            final = min(prompt + output, memory.max_len)
            prompt = min(prompt, final)
            self.pair.admit(min(prompt + generated, final), prompt, final)

        @stateful.rule(prompt=lengths, output=lengths)
        def admit_too_long(self, prompt, output):
            self.pair.admit(prompt, prompt, memory.max_len + output)

        @stateful.rule(wanted=counts)
        def append(self, wanted):
            most = max_chunk(memory)
            oracle = self.pair.oracle
            left = [oracle.limit(r) - oracle.length(r) if oracle.is_live(r) else 0 for r in range(memory.rows)]
            self.pair.append([max(0, min(count, room, most)) for count, room in zip(wanted, left, strict=True)])

        @stateful.rule(wanted=counts)
        def append_anything(self, wanted):
            self.pair.append(wanted)

        @stateful.rule()
        def decode(self):
            oracle = self.pair.oracle
            self.pair.append(
                [int(oracle.is_live(r) and oracle.length(r) < oracle.limit(r)) for r in range(memory.rows)]
            )

        @stateful.rule(mask=masks)
        def release(self, mask):
            self.pair.release([asked and self.pair.oracle.is_live(r) for r, asked in enumerate(mask)])

        @stateful.rule(mask=masks)
        def release_anything(self, mask):
            self.pair.release(mask)

        @stateful.rule()
        def background(self):
            self.pair.background()

    return Machine


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_agrees_with_its_oracle(name):
    stateful.run_state_machine_as_test(
        machine(MEMORIES[name]),
        settings=settings(
            max_examples=10,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
