"""A run: what it learns and measures, and that one which is killed and called again ends in the same bits."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from models.checkpoint import by_name
from models.evaluate import evaluate, token_nats
from models.training import Checkpoints, train
from models.training.step import init_state, train_step
from models.trigram import fit_trigram
from tests.models.training.tiny import CONFIG, CORPUS


@functools.cache
def run(config=CONFIG):
    reported = []
    decode, state = train(config, CORPUS, on_step=reported.append)
    return decode, state, reported


def assert_same_bits(found, expected):
    found, expected = by_name(found), by_name(expected)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.asarray(array).tobytes() == np.asarray(expected[name]).tobytes(), name


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(decode, params, windows):
    return jax.value_and_grad(lambda params: token_nats(decode, params, windows).mean())(params)


def test_training_lowers_the_loss_in_both_phases_and_reports_every_step():
    _, state, reported = run()
    losses = np.asarray(state.losses)
    assert [progress.taken for progress in reported] == list(range(1, 34))
    np.testing.assert_array_equal(np.float32([progress.loss for progress in reported]), losses)
    assert losses[0] == pytest.approx(np.log(256), abs=0.3)
    assert losses[29] < losses[0] - 1.5
    assert max(losses[30:]) < losses[0] - 1.5
    assert int(state.step) == 33


def test_training_repeats_bit_for_bit_and_depends_on_the_seed():
    _, first, _ = run()
    _, again = train(CONFIG, CORPUS)
    assert_same_bits(again, first)
    _, other, _ = run(dataclasses.replace(CONFIG, seed=4))
    assert float(other.losses[0]) != float(first.losses[0])


@pytest.mark.parametrize("step", [0, 7])
def test_a_step_is_taken_on_windows_drawn_with_its_own_key(step):
    phase = CONFIG.phases[0]
    decode, state, key = init_state(CONFIG)
    starts = jax.random.randint(jax.random.fold_in(key, step), (8, 1), 0, CORPUS.train.size - 16)
    windows = jnp.asarray(np.stack([CORPUS.train[int(s) : int(s) + 17] for s in starts[:, 0]]), jnp.int32)
    loss, gradients = loss_and_gradients(decode, state.params, windows)
    squares = sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in jax.tree.leaves(gradients))
    state = dataclasses.replace(state, step=jnp.int32(step))
    text = jnp.asarray(CORPUS.train.astype(np.int32))
    after, found = train_step(state, text, key, decode=decode, phase=phase, optimizer=CONFIG.optimizer)
    assert int(after.step) == step + 1
    assert float(found) == float(after.losses[step]) == pytest.approx(float(loss), rel=1e-5)
    assert float(after.gradient_norms[step]) == pytest.approx(squares**0.5, rel=1e-4)
    # Before clipping, or it could not be more than clip_norm=1.
    assert squares > 1.1


def test_held_out_text_is_scored_on_the_way_and_changes_nothing():
    decode, state, reported = run()
    heldout = np.asarray(state.heldout)
    assert np.flatnonzero(~np.isnan(heldout)).tolist() == [11, 23, 32]
    assert [p.taken for p in reported if p.heldout is not None] == [12, 24, 33]
    whole = evaluate(decode, state.params, fit_trigram(CORPUS.train), CORPUS.heldout, context=16, max_windows=5)
    assert heldout[32] == pytest.approx(whole.nats, rel=1e-6)
    assert heldout[11] > heldout[32] + 0.1
    _, unseen, reported = run(dataclasses.replace(CONFIG, evaluate_every=0))
    assert_same_bits(unseen.params, state.params)
    assert np.isnan(np.asarray(unseen.heldout)).all()
    assert all(progress.heldout is None for progress in reported)


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="the longest context needs 65 bytes of text, got 64"):
        train(CONFIG, dataclasses.replace(CORPUS, train=CORPUS.train[:64]))
    message = "evaluate_windows: expected at most the 3 windows of context 16 in the held-out text, got 5"
    with pytest.raises(ValueError, match=message):
        train(CONFIG, dataclasses.replace(CORPUS, heldout=CORPUS.heldout[:64]))


# ---- killed, and called again ----

ORIGIN = {"seed": 3, "optimizer": {"b1": 0.9}, "phases": [{"steps": 30}], "versions": {"jax": "1.0"}}


class KilledError(Exception):
    """Stands for the end of the process."""


def train_until(checkpoints, last=None):
    """Trains, and is killed right after step `last`; tells the steps that were taken, and the state at the end."""
    taken = []

    def on_step(progress):
        taken.append(progress.taken)
        if progress.taken == last:
            raise KilledError

    try:
        _, state = train(CONFIG, CORPUS, checkpoints, on_step)
    except KilledError:
        state = None
    return taken, state


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints.beside(tmp_path / "model", ORIGIN)


def steps_in(checkpoints):
    return sorted(int(path.name) for path in checkpoints.folder.iterdir())


def test_a_run_killed_again_and_again_ends_in_the_same_bits(checkpoints):
    # Before the first checkpoint, at one, just behind and before others, in the second phase.
    resumed = []
    for last in (5, 8, 9, 15, 17, 31, None):
        taken, state = train_until(checkpoints, last)
        resumed.append(taken[0])
    assert resumed == [1, 1, 9, 9, 9, 17, 25]
    assert_same_bits(state, run()[1])
    assert steps_in(checkpoints) == [24, 32]
    # A run whose last step is saved needs none.
    assert checkpoints.latest_step() == 32


def test_every_part_of_the_state_is_needed(checkpoints):
    """The comparison above would see it if moments, the count of steps, or a curve were not brought back."""
    train_until(checkpoints, 16)
    finished = run()[1]
    state, fresh = checkpoints.resume(finished), by_name(finished)
    differing = {name for name, array in by_name(state).items() if not np.array_equal(array, fresh[name])}
    assert {name.split(".")[0] for name in differing} == set(state.__dataclass_fields__)
    assert any(".mu." in name for name in differing)
    assert any(".nu." in name for name in differing)
    assert int(state.step) == 16
    assert np.isnan(np.asarray(state.losses)[16:]).all()
    assert not np.isnan(np.asarray(state.losses)[:16]).any()


def test_what_a_killed_save_leaves_is_passed_over_and_cleared_away(checkpoints):
    train_until(checkpoints, 17)
    torn = checkpoints.folder / "24.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints.folder / "16", torn)
    for path in list(torn.rglob("manifest.ocdbt")):
        path.unlink()
    # An older one whose removal was cut short.
    shutil.rmtree(checkpoints.folder / "8" / "state")
    taken, state = train_until(checkpoints)
    assert taken[0] == 17
    assert_same_bits(state, run()[1])
    assert steps_in(checkpoints) == [24, 32]


def nudge_a_moment(place):
    """Changes one first moment of Adam by the smallest there is, as orbax itself would write it."""
    with ocp.training.Checkpointer(str(place.parent)) as checkpointer:
        about = checkpointer.metadata(int(place.name)).custom_metadata
        arrays = checkpointer.load(int(place.name))
        name = next(name for name in arrays if name.startswith("optimizer.") and ".mu." in name)
        arrays[name].reshape(-1)[0] = np.nextafter(arrays[name].reshape(-1)[0], np.float32(np.inf))
        checkpointer.save(int(place.name), arrays, custom_metadata=about, force=True, overwrite=True)


def largest(place):
    return max((path for path in place.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(place):
    data = bytearray(largest(place).read_bytes())
    data[len(data) // 2] ^= 1
    largest(place).write_bytes(data)


def cut_short(place):
    largest(place).write_bytes(largest(place).read_bytes()[:100])


def empty(place):
    shutil.rmtree(place)
    place.mkdir()


# orbax's threads outlive the read that fails, and complain.
BROKEN_OFF = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("damage", [nudge_a_moment, flip_a_bit, pytest.param(cut_short, marks=BROKEN_OFF), empty])
def test_a_damaged_checkpoint_is_seen_and_the_one_before_goes_on(checkpoints, damage):
    train_until(checkpoints, 17)
    place = checkpoints.folder / "16"
    damage(place)
    with pytest.raises(ValueError, match=f"{place} is damaged; remove it to go on from the checkpoint before"):
        train(CONFIG, CORPUS, checkpoints)
    shutil.rmtree(place)
    taken, state = train_until(checkpoints)
    assert taken[0] == 9
    assert_same_bits(state, run()[1])


def test_a_run_that_follows_from_something_else_is_refused_by_name(checkpoints):
    train_until(checkpoints, 8)
    other = {**ORIGIN, "optimizer": {"b1": 0.8}, "versions": {"jax": "1.1"}, "new": 1}
    with pytest.raises(ValueError, match="remove the folder to start over") as caught:
        train(CONFIG, CORPUS, Checkpoints(checkpoints.folder, other))
    for word in ("optimizer.b1 is 0.9 there and 0.8 here", "versions.jax is 1.0 there and 1.1 here", "new is None"):
        assert word in str(caught.value)
    assert "seed" not in str(caught.value)
    assert str(checkpoints.folder) in str(caught.value)
    assert steps_in(checkpoints) == [8]


def test_a_folder_is_there_from_the_first_checkpoint_until_it_is_removed(checkpoints):
    assert checkpoints.latest_step() == 0
    train_until(checkpoints, 7)
    assert not checkpoints.folder.exists()
    train_until(checkpoints, 8)
    checkpoints.remove()
    assert not checkpoints.folder.exists()
