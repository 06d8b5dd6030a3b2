"""Publishing what a caller got wrong: it is a fault, and nothing is published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from tests.paxkv.oracles.blocks import Prompt
from tests.paxkv.oracles.jitted import JittedManager, ints

MEMORY = Paged(rows=3, max_len=8, block_size=2, num_blocks=9, cache=PrefixCache())


@pytest.fixture
def manager():
    """Rows of six, four and no tokens, none of them published."""
    manager = JittedManager(MEMORY)
    for row, count in enumerate((6, 4)):
        assert manager.admit(Prompt(tuple(range(10 * row, 10 * row + count))), count) == (row, Outcome.OK)
    assert manager.append([6, 4, 0]) == Outcome.OK
    return manager


def contents(state) -> int:
    return int(jnp.sum(state.contents.records[:, 0] != 0))


@pytest.mark.parametrize(
    ("operation", "width", "cu_lens", "culprit"),
    [
        pytest.param("publish", 24, [1, 5, 9, 9], 0, id="the first row does not begin at 0"),
        pytest.param("publish", 24, [-1, 5, 9, 9], 0, id="the first row begins before 0"),
        pytest.param("publish", 24, [0, 4, 2, 2], 1, id="less than nothing"),
        pytest.param("publish", 24, [0, 4, 9, 9], 1, id="more than was stored"),
        pytest.param("publish", 24, [0, 4, 8, 9], 2, id="tokens of a free row"),
        pytest.param("publish", 24, [0, 9, 9, 9], 0, id="more than the static bound and than was stored"),
        pytest.param("publish_one", 3, [0, 2, 3, 3], 0, id="more than the static bound"),
        pytest.param("publish", 6, [0, 4, 8, 8], 1, id="more than there are"),
    ],
)
def test_tokens_that_are_not_those_stored_last_are_a_fault(manager, operation, width, cu_lens, culprit):
    compiled = manager.operations
    if width == 6:
        publish = jax.jit(
            lambda *given: MEMORY.publish(*given, 8), compiler_options={"xla_backend_optimization_level": 0}
        )
    else:
        publish = lambda *given: compiled(operation, *given)  # noqa: E731
    state = publish(manager.state, jnp.arange(width, dtype=jnp.int32), ints(cu_lens))
    assert (int(state.seqs.faults.word), int(state.seqs.faults.row)) == (1 << Outcome.OUT_OF_RANGE, culprit)
    assert contents(state) == 0
    np.testing.assert_array_equal(state.chains.hashed, [0, 0, 0])


def test_as_many_tokens_as_were_stored_are_none(manager):
    state = manager.operations("publish", manager.state, jnp.arange(24, dtype=jnp.int32), ints([0, 6, 10, 10]))
    assert int(state.seqs.faults.word) == 0
    assert contents(state) == 5
