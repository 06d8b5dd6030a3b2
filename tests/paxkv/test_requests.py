import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.requests import TICK_US, final_lengths, init_progress, make_requests

PROMPTS = np.arange(12, dtype=np.int32).reshape(3, 4)
UNCHECKED = inspect.unwrap(make_requests)  # as it is called where nobody checks types before it does
INTEGERS = ("prompt_lens", "output_lens", "adapters", "salts", "priorities")  # one for each prompt


def make(**changes):
    values = {
        "prompts": PROMPTS,
        "prompt_lens": np.array([4, 1, 3]),
        "output_lens": np.array([5, 0, 9]),
        "arrival_ms": np.array([0.0, 0.5, 0.5]),
        "seed": 7,
    } | changes
    return UNCHECKED(**values)


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


def test_labels_are_kept_to_the_last_bit_and_each_sequence_of_a_prompt_has_them():
    labels = {"adapters": [0, 7, 2**31 - 1], "salts": [-(2**31), -1, 0], "priorities": np.array([3, 2, 1], np.uint64)}
    requests = make(samples=2, **labels)
    for name, values in labels.items():
        assert getattr(requests, name).tolist() == [int(value) for value in values for _ in range(2)]
    assert make().adapters.tolist() == make().salts.tolist() == make().priorities.tolist() == [0, 0, 0]


def test_what_is_delivered_lies_there_only_if_somebody_brings_it():
    assert make().delivered is None
    assert make(delivered=np.array([4, 0, 2])).delivered.tolist() == [4, 0, 2]


def test_requests_end_with_their_output_or_at_the_longest_sequence_and_never_store_the_last_token():
    assert final_lengths(make(), 10, jnp.arange(3)).tolist() == [8, 0, 9]


def test_no_request_arrives_before_its_time():
    times = np.array([0.0, 0.001, 0.01, 12.34, 12.3401])
    ticks = make_requests(np.ones((5, 1), int), np.ones(5, int), np.ones(5, int), times, seed=0).arrivals
    assert ticks.tolist() == [0, 1, 1, 1234, 1235]


def test_arrivals_keep_to_the_plan_however_many_there_are():
    # Each gap rounded by itself, or slept after other work, would add up: 200 a second became 183.5.
    times = np.arange(1, 2001) * 5.00013
    ticks = make_requests(np.ones((2000, 1), int), np.ones(2000, int), np.ones(2000, int), times, seed=0).arrivals
    assert ticks.tolist() == [-(-i * 500_013 // 1000) for i in range(1, 2001)]


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
        ({"output_lens": np.array([1, 2])}, r"output_lens: expected shape \[3\].*got \[2\]"),
        ({"prompt_lens": np.array([[4], [1], [3]])}, r"prompt_lens: expected shape \[3\].*got \[3, 1\]"),
        ({"prompt_lens": None}, r"prompt_lens: expected shape \[1\].*got \[\]"),
        ({"output_lens": 5}, r"output_lens: expected shape \[3\].*got \[\]"),
        ({"arrival_ms": np.zeros(4)}, r"arrival_ms: expected 3 numbers.*got float64\[4\]"),
        ({"arrival_ms": np.zeros((3, 1))}, "arrival_ms: expected 3 numbers"),
        ({"arrival_ms": None}, "arrival_ms: expected 3 numbers"),
        ({"arrival_ms": ["0", "1", "2"]}, "arrival_ms: expected 3 numbers"),
        ({"prompts": PROMPTS[:2]}, r"prompts: expected shape \[3, 4\].*got \[2, 4\]"),
        ({"prompts": PROMPTS[:, 0]}, r"prompts: expected shape \[3, max_prompt\].*got \[3\]"),
        ({"prompts": PROMPTS[:, :0]}, "prompt_lens: expected 1 to 0"),
        ({"prompts": PROMPTS - 1}, "prompts: expected token ids, which are 0 or more, got -1"),
        *(({name: np.array([1.5, 1, 1])}, f"{name}: expected integers, got float64") for name in INTEGERS),
        *(({name: np.array([True, True, True])}, f"{name}: expected integers, got bool") for name in INTEGERS),
        *(({name: [None] * 3}, f"{name}: expected integers, got object") for name in INTEGERS),
        *(({name: ["1"] * 3}, f"{name}: expected integers") for name in INTEGERS),
        *(({name: [1, 2**31, 1]}, f"{name}: expected integers of 32 bits, got 1 to 2147483648") for name in INTEGERS),
        *(({name: [1, -(2**31) - 1, 1]}, f"{name}: expected integers of 32 bits") for name in INTEGERS),
        *(({name: np.ones((3, 2), int)}, f"{name}: expected shape") for name in INTEGERS),
        *(({name: [1, 1]}, f"{name}: expected shape") for name in INTEGERS[1:]),
        ({"prompts": PROMPTS.astype(np.float32)}, "prompts: expected integers"),
        ({"prompts": PROMPTS.astype(np.int64) + 2**32}, "prompts: expected integers of 32 bits"),
        ({"prompt_lens": np.array([0, 1, 1])}, "prompt_lens: expected 1 to 4.*got 0 to 1"),
        ({"prompt_lens": np.array([5, 1, 1])}, "prompt_lens: expected 1 to 4.*got 1 to 5"),
        ({"output_lens": np.array([1, -1, 1])}, "output_lens: expected 0 or more.*got -1"),
        ({"output_lens": np.array([1, 2**31 - 1, 1])}, "output_lens: expected .* less than 2"),
        ({"temperature": -0.1}, "temperature: expected"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"temperature": "hot"}, "temperature: expected"),
        ({"stop_token": 1.5}, "stop_token must be an int"),
        ({"stop_token": -7}, "stop_token must be at least -1, got -7"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 2**31 // 3 + 1}, r"samples: expected fewer than 2\*\*31 sequences"),
        ({"beams": None, "samples": 2}, "beams must be True or False, got None"),
        ({"beams": "yes", "samples": 2}, "beams must be True or False, got 'yes'"),
        ({"beams": True}, "samples: expected at least 2 with beams"),
        ({"beams": True, "samples": 2, "temperature": 0.5}, "temperature: expected 0 with beams"),
        ({"beams": True, "samples": 2, "stop_token": 3}, "stop_token: expected none"),
        ({"delivered": np.array([5, 0, 0])}, "delivered: expected 0 to the prompt's tokens.*got 0 to 5"),
        ({"delivered": np.array([1, -1, 0])}, "delivered: expected 0 to the prompt's tokens.*got -1 to 1"),
        ({"delivered": np.array([1, 0, 0]), "samples": 2}, "delivered: expected .* one sample of each.* and 2"),
        ({"delivered": np.array([1, 0])}, r"delivered: expected shape \[3\]"),
        ({"arrival_ms": np.array([1.0, 0.5, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([-1.0, 0.5, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([0.0, np.nan, 2.0])}, "arrival_ms: expected ascending"),
        ({"arrival_ms": np.array([0.0, 1.0, 2**30 / 100])}, "arrival_ms: expected ascending"),
    ],
)
def test_a_malformed_workload_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
