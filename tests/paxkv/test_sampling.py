import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from paxkv.sampling import sample

LOGITS = np.array([2.0, -1.0, 0.5, 2.5, 0.0, 1.0, -4.0, 1.7], np.float32)
DRAWS = 20_000


def many(logits, temperature, rows=DRAWS, seed=0):
    keys = jax.random.split(jax.random.key(seed), rows)
    temperatures = jnp.full(rows, temperature, jnp.float32)
    return jax.jit(sample)(jnp.tile(jnp.asarray(logits), (rows, 1)), temperatures, keys)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_softmax_of_logits_over_temperature(temperature):
    tokens, _ = many(LOGITS, temperature)
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    found = np.bincount(np.asarray(tokens), minlength=len(LOGITS))
    expected = DRAWS * weights / weights.sum()
    often = expected >= 5  # what the chi-square distribution needs; the rest counts as one
    found, expected = ([*n[often], n[~often].sum()] if (~often).any() else n for n in (found, expected))
    assert scipy.stats.chisquare(found, expected).pvalue > 1e-3


def test_temperature_zero_takes_the_best_and_the_lowest_of_equals():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 2.0, 5.0], [-3.0, -2.0, -1.0]])
    for seed in range(3):
        tokens, margins = jax.jit(sample)(logits, jnp.zeros(3), jax.random.split(jax.random.key(seed), 3))
        assert tokens.tolist() == [1, 0, 2]
        assert margins.tolist() == [2, 0, 1]


def test_the_margin_is_how_much_it_takes_to_change_the_token():
    keys = jax.random.split(jax.random.key(5), 40)
    temperatures = jnp.where(jnp.arange(40) % 2 == 0, 0.0, 1.7)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(40, 8)) * 2, jnp.float32)
    tokens, margins = jax.jit(sample)(logits, temperatures, keys)
    assert float(jnp.min(margins)) > 1e-3
    chosen = jax.nn.one_hot(tokens, 8, dtype=jnp.float32)
    for factor, same in ((0.999, True), (1.001, False)):
        again, _ = jax.jit(sample)(logits - factor * margins[:, None] * chosen, temperatures, keys)
        assert ((again == tokens) == same).all()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    keys = jax.random.split(jax.random.key(3), 3)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 50)), jnp.float32)
    temperatures = jnp.array([1.0, 0.0, 2.0])
    together, _ = jax.jit(sample)(logits, temperatures, keys)
    for row in range(3):
        others = jnp.asarray(rng.normal(size=(3, 50)), jnp.float32).at[2 - row].set(logits[row])
        at = jnp.array([2 - row])
        alone, _ = jax.jit(sample)(
            others, jnp.ones(3).at[at].set(temperatures[row]), keys.at[at].set(keys[row : row + 1])
        )
        assert alone[2 - row] == together[row]


def test_the_smallest_temperatures_take_the_best():
    tokens, _ = many(LOGITS + 100, 1e-37, rows=50)
    assert tokens.tolist() == [3] * 50
