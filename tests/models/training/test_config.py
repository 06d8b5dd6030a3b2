import dataclasses
import json

import pytest

from models.training import Phase
from tests.models.training.tiny import CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": dataclasses.replace(CONFIG.model, vocab=255)}, "model.vocab must hold every byte, 256; got 255"),
        ({"phases": (Phase(5, 65, 1),)}, r"phases\[0\].context must not exceed model.max_len=64, got 65"),
        ({"phases": (Phase(5, 8, 0),)}, r"phases\[0\]: steps, context and batch must be at least 1"),
        ({"phases": (Phase(3, 8, 1),)}, "optimizer.warmup_steps must be below the 3 steps of all phases, got 3"),
        ({"evaluate_every": -1}, "evaluate_every must be at least 0, got -1"),
        ({"evaluate_windows": 0}, "evaluate_windows must be at least 1, got 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0, got -1"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_every_step_is_of_one_phase():
    assert [CONFIG.phase_of(step).context for step in range(33)] == [16] * 30 + [64] * 3
    with pytest.raises(ValueError, match="step must be below the 33 steps of all phases, got 33"):
        CONFIG.phase_of(33)


def test_held_out_text_is_looked_at_every_so_often_and_at_the_end():
    assert [taken for taken in range(1, 34) if CONFIG.evaluates_after(taken)] == [12, 24, 33]
    assert not any(dataclasses.replace(CONFIG, evaluate_every=0).evaluates_after(taken) for taken in range(1, 34))


def test_the_recipe_is_what_the_weights_follow_from():
    recipe = CONFIG.recipe()
    assert json.loads(json.dumps(recipe)) == recipe
    for change in ({"out_dir": "b"}, {"overwrite": True}, {"evaluate_every": 1}, {"checkpoint_every": 1}):
        assert dataclasses.replace(CONFIG, **change).recipe() == recipe
    faster = dataclasses.replace(CONFIG.optimizer, peak_learning_rate=1.0)
    for change in ({"seed": 4}, {"phases": CONFIG.phases[:1]}, {"optimizer": faster}):
        assert dataclasses.replace(CONFIG, **change).recipe() != recipe
