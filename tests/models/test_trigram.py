import collections
import math

import numpy as np
import pytest

from models.trigram import WEIGHTS, Trigram, fit_trigram


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    return fit_trigram(as_bytes("".join(rng.choice(["the cat ", "a dog ", "the dot ", "42\n"], 200))))


def test_losses_equal_those_of_counting_in_plain_python():
    train, scored = "abracadabra abracadabra bra", "abcad!a"
    model = fit_trigram(as_bytes(train))
    after = [collections.defaultdict(collections.Counter) for _ in range(3)]
    padded = "\n\n" + train
    for i in range(2, len(padded)):
        for order in range(3):
            after[order][padded[i - order : i]][padded[i]] += 1
    expected = []
    padded = "\n\n" + scored
    for i in range(2, len(padded)):
        p = 1 / 256
        for order, weight in enumerate(model.weights):
            seen = after[order][padded[i - order : i]]
            p = (seen[padded[i]] + weight * p) / (sum(seen.values()) + weight)
        expected.append(-math.log(p))
    np.testing.assert_allclose(model.nats(as_bytes(scored)), expected, rtol=1e-12)


@pytest.mark.parametrize("context", ["th", "zz"])
def test_probabilities_of_the_next_byte_sum_to_one(fitted, context):
    every = np.concatenate([[*context.encode(), byte] for byte in range(256)]).astype(np.uint8)
    assert np.exp(-fitted.nats(every)[2::3]).sum() == pytest.approx(1, abs=1e-12)


def test_what_was_seen_costs_less_than_what_was_not(fitted):
    assert fitted.nats(as_bytes("the cat a dog ")).mean() < 0.5
    assert fitted.nats(as_bytes("XYZ%XYZ%")).min() > math.log(256)


def test_no_single_other_weight_does_better_on_the_last_tenth():
    text = as_bytes("".join(np.random.default_rng(1).choice(["ab", "ba", "abc "], 300)))
    cut = text.size - text.size // 10
    counts = fit_trigram(text[:cut]).counts
    chosen = fit_trigram(text).weights
    changed = [(*chosen[:order], w, *chosen[order + 1 :]) for order in range(3) for w in WEIGHTS]
    losses = [Trigram(counts, weights).nats(text[cut:]).sum() for weights in changed]
    assert Trigram(counts, chosen).nats(text[cut:]).sum() <= min(losses) + 1e-9
    assert max(losses) > min(losses) + 1
