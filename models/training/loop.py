"""The loop: steps, looks at held-out text, checkpoints."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from models.decoder import Decode
from models.evaluate import cut_windows, window_nats
from models.text import Bytes, Corpus
from models.training.checkpoints import Checkpoints
from models.training.config import TrainConfig
from models.training.step import TrainState, init_state, train_step


class Progress(NamedTuple):
    """How far a run is."""

    taken: int  # steps
    loss: float  # nats per byte, of the last step
    heldout: float | None  # nats per byte, if held-out text was looked at after this step


def train(
    config: TrainConfig,
    corpus: Corpus,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Decode, TrainState]:
    """Trains to the last step, from the latest checkpoint if there is one.

    A run that was killed, however and wherever, and is called again gives the bits of one that was not.

    Args:
      config: the run.
      corpus: windows are drawn uniformly from its training text.
      checkpoints: where to resume from, and where to save every `config.checkpoint_every` steps; None: nowhere.
      on_step: called after every step, once all it brings is saved.

    Returns:
      The function of the model, and the state after the last step.

    Raises:
      ValueError: A text is too short, or the latest checkpoint cannot be gone on from.
    """
    longest = max(phase.context for phase in config.phases)
    if corpus.train.size <= longest:
        raise ValueError(f"the longest context needs {longest + 1} bytes of text, got {corpus.train.size}")
    windows = _evaluation_windows(config, corpus.heldout)
    decode, state, key = init_state(config)
    if checkpoints is not None:
        state = checkpoints.resume(state)
    text = jnp.asarray(corpus.train.astype(np.int32))
    for taken in range(int(state.step) + 1, config.steps + 1):
        phase = config.phase_of(taken - 1)
        state, loss = train_step(state, text, key, decode=decode, phase=phase, optimizer=config.optimizer)
        heldout = None
        if config.evaluates_after(taken):
            heldout = float(window_nats(decode, state.params, windows).mean())
            state = dataclasses.replace(state, heldout=state.heldout.at[taken - 1].set(heldout))
        if checkpoints is not None and config.checkpoint_every and taken % config.checkpoint_every == 0:
            checkpoints.save(state)
        on_step(Progress(taken, float(loss), heldout))
    return decode, state


def _evaluation_windows(config: TrainConfig, text: Bytes) -> np.ndarray:
    if not config.evaluate_every:
        return np.empty((0, 0), np.uint8)
    windows = cut_windows(text, config.evaluation_context)
    if len(windows) < config.evaluate_windows:
        raise ValueError(
            f"evaluate_windows: expected at most the {len(windows)} windows of context {config.evaluation_context} "
            f"in the held-out text, got {config.evaluate_windows}"
        )
    return windows[: config.evaluate_windows]
