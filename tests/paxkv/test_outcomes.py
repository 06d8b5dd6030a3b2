"""Faults stay until the host has read them, and say what happened and where."""

import jax.numpy as jnp
import pytest

from paxkv.outcomes import MemoryFaultError, Outcome, no_faults, raise_on_fault, record, select_outcome


def mask(*rows: int):
    return jnp.zeros(4, jnp.bool).at[jnp.asarray(rows, jnp.int32)].set(True) if rows else jnp.zeros(4, jnp.bool)


def test_a_clean_record_raises_nothing():
    raise_on_fault(no_faults(4))
    raise_on_fault(record(no_faults(4), Outcome.DOUBLE_FREE, mask()))


def test_faults_add_up_and_the_first_row_is_kept():
    faults = record(no_faults(4), Outcome.OUT_OF_BLOCKS, mask(2, 3))
    faults = record(faults, Outcome.DOUBLE_FREE, mask(1))
    faults = record(faults, Outcome.OUT_OF_RANGE, mask())
    assert int(faults.word) == (1 << Outcome.OUT_OF_BLOCKS) | (1 << Outcome.DOUBLE_FREE)
    assert int(faults.row) == 2


def test_the_same_fault_twice_is_one_fault():
    faults = record(record(no_faults(4), Outcome.DOUBLE_FREE, mask(0)), Outcome.DOUBLE_FREE, mask(3))
    assert (int(faults.word), int(faults.row)) == (1 << Outcome.DOUBLE_FREE, 0)


def test_the_exception_names_faults_row_and_owner():
    faults = record(no_faults(4), Outcome.OUT_OF_RANGE, mask(3))
    with pytest.raises(MemoryFaultError, match=r"OUT_OF_RANGE, first at row 3 \(held by request 17\)"):
        raise_on_fault(faults, owner="request 17")


@pytest.mark.parametrize(
    ("never", "later", "expected"),
    [
        (False, False, Outcome.OK),
        (False, True, Outcome.LATER),
        (True, False, Outcome.NEVER),
        (True, True, Outcome.NEVER),
    ],
)
def test_the_first_case_that_holds_is_the_outcome(never, later, expected):
    outcome = select_outcome((jnp.bool(never), Outcome.NEVER), (jnp.bool(later), Outcome.LATER))
    assert int(outcome) == expected
