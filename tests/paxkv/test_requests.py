import jax
import numpy as np
import pytest

from paxkv.requests import TICK_US, final_lengths, init_progress, make_requests

PROMPTS = np.arange(12, dtype=np.int32).reshape(3, 4)


def make(**changes):
    values = {
        "prompts": PROMPTS,
        "prompt_lens": np.array([4, 1, 3]),
        "output_lens": np.array([5, 0, 9]),
        "arrival_ms": np.array([0.0, 0.5, 0.5]),
        "seed": 7,
    } | changes
    return make_requests(**values)


def test_a_workload_lies_on_the_device_as_it_was_given():
    requests = make(temperature=0.5, stop_token=3)
    assert requests.count == 3
    assert requests.prompts.tolist() == PROMPTS.tolist()
    assert requests.prompt_lens.tolist() == [4, 1, 3]
    assert requests.output_lens.tolist() == [5, 0, 9]
    assert requests.arrivals.tolist() == [0, 50, 50]
    assert TICK_US == 10
    assert requests.temperatures.tolist() == [0.5] * 3
    assert requests.stop_token == 3
    for i in range(3):
        expected = jax.random.fold_in(jax.random.key(7), i)
        assert (jax.random.key_data(requests.keys[i]) == jax.random.key_data(expected)).all()


def test_requests_end_with_their_output_or_at_the_longest_sequence_and_never_store_the_last_token():
    assert final_lengths(make(), 10).tolist() == [8, 0, 9]


def test_no_request_arrives_before_its_time():
    times = np.array([0.0, 0.001, 0.01, 12.34, 12.3401])
    ticks = make_requests(np.ones((5, 1), int), np.ones(5, int), np.ones(5, int), times, seed=0).arrivals
    assert ticks.tolist() == [0, 1, 1, 1234, 1235]


def test_nobody_has_started():
    progress = init_progress(2)
    assert progress.status.tolist() == progress.reason.tolist() == progress.generated.tolist() == [0, 0]
    assert progress.admitted_at.tolist() == progress.first_token_at.tolist() == progress.ended_at.tolist() == [-1, -1]
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(progress)}
    assert len(pointers) == len(jax.tree.leaves(progress)), "a donated state must not hold a buffer twice"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_lens": np.array([], int)}, "requests: expected at least one"),
        ({"output_lens": np.array([1, 2])}, "output_lens: expected 3 entries"),
        ({"arrival_ms": np.zeros(4)}, "arrival_ms: expected 3 entries"),
        ({"prompts": PROMPTS[:2]}, "prompts: expected 3 entries"),
        ({"prompts": PROMPTS[:, 0]}, "prompt_lens: expected 1 to"),
        ({"prompts": PROMPTS.astype(np.float32)}, "prompts: expected integers"),
        ({"prompt_lens": np.array([0, 1, 1])}, "prompt_lens: expected 1 to 4.*got 0 to 1"),
        ({"prompt_lens": np.array([5, 1, 1])}, "prompt_lens: expected 1 to 4.*got 1 to 5"),
        ({"prompt_lens": np.array([1.5, 1, 1])}, "prompt_lens: expected integers"),
        ({"output_lens": np.array([1, -1, 1])}, "output_lens: expected 0 or more.*got -1"),
        ({"output_lens": np.array([1, 2**31 - 1, 1])}, "output_lens: expected .* less than 2"),
        ({"temperature": -0.1}, "temperature: expected"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"arrival_ms": np.array([1.0, 0.5, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([-1.0, 0.5, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([0.0, np.nan, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([0.0, 1.0, 2**30 / 100])}, "arrival_ms: expected ascending"),
    ],
)
def test_a_malformed_workload_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
