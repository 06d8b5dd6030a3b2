"""From a config to a model with its card: trains on the text every CPython carries, evaluates, saves."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import draccus
import flax
import jax
import numpy as np
import optax
import orbax.checkpoint
import rich.console
import rich.progress

from models.card import render_card
from models.checkpoint import CARD, RECORD, save_checkpoint
from models.evaluate import evaluate_all
from models.text import Corpus, load_corpus
from models.training.checkpoints import Checkpoints
from models.training.config import TrainConfig
from models.training.curves import PICTURE, TABLE, as_jsonl, as_svg, curves
from models.training.loop import Progress, train
from models.training.step import TrainState
from models.whole_folder import check_free

# The last steps whose mean loss is reported as training loss.
TRAIN_LOSS_STEPS = 100


def read_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """The config in a YAML file, with `--field value` and `--dotted.field value` put over it.

    Raises:
      OSError: The file cannot be read.
      ValueError: It, or an override, does not say a config that can be trained.
    """
    try:
        return draccus.parse(TrainConfig, config_path=path, args=list(overrides))
    except draccus.ParsingError as error:
        # Where draccus only says that something failed, its cause says what: YAML, or a ValueError of the config.
        told = isinstance(error, draccus.utils.DecodingError)
        raise ValueError(str(error if told else error.__cause__ or error)) from error


def train_and_save(config: TrainConfig, command: str, console: rich.console.Console) -> dict[str, Any]:
    """Trains a model, or goes on with it, and writes it with card, record and curves to `config.out_dir`.

    A run on one machine gives the same weights each time, bit for bit, however often it is killed and called again.

    Args:
      config: the run.
      command: what was typed, for the record.
      console: for the progress bar, which only a terminal gets, and for a word on where a run goes on.

    Returns:
      The training record.

    Raises:
      FileExistsError: `config.out_dir` is taken and `config.overwrite` is false.
      ValueError: The unfinished run beside `config.out_dir` cannot be gone on with, or another process is in it.
    """
    check_free(config.out_dir, config.overwrite)
    with _alone(config.out_dir):
        return _train_and_save(config, command, console)


@contextlib.contextmanager
def _alone(out_dir: str) -> Iterator[None]:
    """Refuses a second process that would write the same model; the kernel drops the lock with its process."""
    final = pathlib.Path(out_dir).resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = final.with_name(final.name + ".lock")
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"out_dir: {out_dir} is being trained by another process; wait, or give another"
            ) from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _train_and_save(config: TrainConfig, command: str, console: rich.console.Console) -> dict[str, Any]:
    corpus = load_corpus()
    checkpoints = Checkpoints.beside(config.out_dir, _origin(config, corpus))
    resumed_after = checkpoints.latest_step()
    if resumed_after:
        place = f"after step {resumed_after} of {config.steps}, from {checkpoints.folder}"
        console.print(f"goes on {place}", soft_wrap=True, markup=False, highlight=False)
    start = time.perf_counter()
    with _bar(console, config.steps, resumed_after) as on_step:
        decode, state = train(config, corpus, checkpoints, on_step)
    seconds = time.perf_counter() - start

    results = evaluate_all(decode, state.params, corpus)
    record = {
        "command": command,
        "train_seconds": round(seconds),
        "resumed_after_step": resumed_after,
        **_describe(config, corpus, state),
        "results": {name: dataclasses.asdict(found) for name, found in results.items()},
    }
    columns = curves(config, state)
    files = {
        RECORD: json.dumps(record, indent=2) + "\n",
        CARD: render_card(pathlib.Path(config.out_dir).name, record),
        TABLE: as_jsonl(columns),
        PICTURE: as_svg(columns),
    }
    save_checkpoint(config.out_dir, decode.model(state.params), files, overwrite=config.overwrite)
    checkpoints.remove()
    return record


@contextlib.contextmanager
def _bar(console: rich.console.Console, steps: int, taken: int) -> Iterator[Callable[[Progress], None]]:
    """One live line on a terminal, moved by what it yields; silent elsewhere."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loss", total=steps, completed=taken)
        heldout = ""

        def on_step(progress: Progress) -> None:
            nonlocal heldout
            if progress.heldout is not None:
                heldout = f", held out {progress.heldout:.3f}"
            bar.update(task, completed=progress.taken, description=f"loss {progress.loss:.3f}{heldout}")

        yield on_step


def _origin(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What the bits of a run follow from, its curves included."""
    return {
        **config.recipe(),
        "evaluate_every": config.evaluate_every,
        "evaluate_windows": config.evaluate_windows,
        "text_sha256": corpus.sha256,
        "platform": jax.default_backend(),
        "versions": _versions(),
    }


def _describe(config: TrainConfig, corpus: Corpus, state: TrainState) -> dict[str, Any]:
    """What it takes to train the same model again, and how it went."""
    heldout = np.asarray(state.heldout)
    evaluated = np.flatnonzero(~np.isnan(heldout))
    return {
        "config": config.recipe(),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "text": "pydoc_data.topics",
        "text_sha256": corpus.sha256,
        "train_bytes": corpus.train.size,
        "heldout_bytes": corpus.heldout.size,
        "steps": config.steps,
        "bytes_seen": sum(phase.steps * phase.context * phase.batch for phase in config.phases),
        "cpu_count": os.cpu_count(),
        "platform": jax.default_backend(),
        "train_nats_steps": min(TRAIN_LOSS_STEPS, config.steps),
        "train_nats": float(np.mean(np.asarray(state.losses, np.float64)[-TRAIN_LOSS_STEPS:])),
        "evaluations": {
            "windows": config.evaluate_windows,
            "context": config.evaluation_context,
            "nats": {str(step + 1): float(heldout[step]) for step in evaluated},
        },
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "orbax-checkpoint": orbax.checkpoint.__version__,
    }
