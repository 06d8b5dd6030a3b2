"""Trains a byte-level decoder on the text every CPython carries, and writes its checkpoint and model card.

    uv run python -m models.train configs/train/byte_llama.yaml --out_dir runs/model [--seed 1 ...]

On one machine the same config and versions give the same weights, bit for bit.
"""

import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import draccus
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx
from jaxtyping import Array, Float, Int32, Key
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.card import render_card
from models.checkpoint import CARD, RECORD, save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decode, Decoder, Params, make_decode
from models.evaluate import CONTEXTS, evaluate, token_nats
from models.text import VOCAB, Bytes, Corpus, load_corpus
from models.trigram import fit_trigram
from models.whole_folder import check_free

# The last steps whose mean loss is reported as training loss.
TRAIN_LOSS_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of steps on windows of one length."""

    steps: int
    context: int  # bytes predicted per window
    batch: int  # windows per step


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping; norms' scales are not decayed."""

    peak_learning_rate: float
    final_fraction: float  # of the peak, at the last step
    warmup_steps: int
    b1: float
    b2: float
    weight_decay: float
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: DecoderConfig
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig
    seed: int  # of the initial weights and of the windows drawn
    out_dir: str
    overwrite: bool = False  # replace a checkpoint that is there

    def __post_init__(self) -> None:
        """A config that exists can be trained."""
        if self.model.vocab < VOCAB:
            raise ValueError(f"model.vocab must hold every byte, {VOCAB}; got {self.model.vocab}")
        for i, phase in enumerate(self.phases):
            if min(phase.steps, phase.context, phase.batch) < 1:
                raise ValueError(f"phases[{i}]: steps, context and batch must be at least 1, got {phase}")
            if phase.context > self.model.max_len:
                raise ValueError(
                    f"phases[{i}].context must not exceed model.max_len={self.model.max_len}, got {phase.context}"
                )
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps must be below the {self.steps} steps of all phases, "
                f"got {self.optimizer.warmup_steps}"
            )

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer over a run of `steps` steps."""
    peak = config.peak_learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup_steps, steps, end_value=peak * config.final_fraction
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def train(
    config: TrainConfig, text: Bytes, on_step: Callable[[float], None] = lambda loss: None
) -> tuple[Decode, Params, list[float]]:
    """Trains on windows drawn uniformly from `text`.

    Returns:
      The function and weights of the model, and the loss of every step in nats per byte.

    Raises:
      ValueError: `text` is not longer than the longest context.
    """
    longest = max(phase.context for phase in config.phases)
    if text.size <= longest:
        raise ValueError(f"the longest context needs {longest + 1} bytes of text, got {text.size}")
    weights_key, windows_key = jax.random.split(jax.random.key(config.seed))
    decode, params = make_decode(Decoder(config.model, rngs=nnx.Rngs(params=weights_key)))
    state = make_optimizer(config.optimizer, config.steps).init(params)
    tokens = jnp.asarray(text.astype(np.int32))
    losses: list[float] = []
    for phase in config.phases:
        for _ in range(phase.steps):
            key = jax.random.fold_in(windows_key, len(losses))
            params, state, loss = _train_step(
                params,
                state,
                tokens,
                key,
                decode=decode,
                context=phase.context,
                batch=phase.batch,
                optimizer=config.optimizer,
                steps=config.steps,
            )
            losses.append(float(loss))
            on_step(losses[-1])
    return decode, params, losses


@jax.jit(static_argnames=("decode", "context", "batch", "optimizer", "steps"), donate_argnames=("params", "state"))
def _train_step(
    params: Params,
    state: optax.OptState,
    text: Int32[Array, " bytes"],
    key: Key[Array, ""],
    *,
    decode: Decode,
    context: int,
    batch: int,
    optimizer: OptimizerConfig,
    steps: int,
) -> tuple[Params, optax.OptState, Float[Array, ""]]:
    starts = jax.random.randint(key, (batch, 1), 0, text.size - context)
    windows = text[starts + jnp.arange(context + 1)[None, :]]
    loss, gradients = jax.value_and_grad(lambda p: token_nats(decode, p, windows).mean())(params)
    # optax raises a Python float to an integer step count.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = make_optimizer(optimizer, steps).update(gradients, state, params)
    return jax.tree.map(jnp.add, params, updates), state, loss


def main() -> int:
    """Trains, evaluates, saves; the last line of stdout is the result as JSON.

    Returns:
      The exit code: 2 for a mistake in the command or the config, which is told in a line.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m models.train CONFIG.yaml [--field value ...]", file=sys.stderr)
        return 2
    config_path, *overrides = sys.argv[1:]
    try:
        config = draccus.parse(TrainConfig, config_path=config_path, args=overrides)
        check_free(config.out_dir, config.overwrite)
    except (draccus.ParsingError, OSError) as error:
        # Where draccus only says that something failed, its cause says what: YAML, or a ValueError of the config.
        told = isinstance(error, draccus.utils.DecodingError)
        print("error:", " ".join(str(error if told else error.__cause__ or error).split()), file=sys.stderr)
        return 2
    corpus = load_corpus()

    start = time.perf_counter()
    with _progress() as progress:
        bar = progress.add_task("train", total=config.steps, loss=float("nan"))
        decode, params, losses = train(config, corpus.train, lambda loss: progress.update(bar, advance=1, loss=loss))
    seconds = time.perf_counter() - start

    trigram = fit_trigram(corpus.train)
    contexts = sorted({min(context, config.model.max_len) for context in CONTEXTS})
    heldout = [evaluate(decode, params, trigram, corpus.heldout, context) for context in contexts]
    record = {
        "command": " ".join(["python -m models.train", *sys.argv[1:]]),
        "train_seconds": round(seconds),
        **_describe(config, corpus),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "train_nats_steps": min(TRAIN_LOSS_STEPS, config.steps),
        "train_nats": float(np.mean(losses[-TRAIN_LOSS_STEPS:])),
        "results": {f"heldout_{h.context}": dataclasses.asdict(h) for h in heldout},
    }
    files = {RECORD: json.dumps(record, indent=2) + "\n", CARD: render_card(pathlib.Path(config.out_dir).name, record)}
    save_checkpoint(config.out_dir, decode.model(params), files, overwrite=config.overwrite)
    summary = {"checkpoint": config.out_dir} | {k: v for k, v in record.items() if k != "config"}
    print(json.dumps(summary, separators=(",", ":")))
    return 0


def _progress() -> Progress:
    """One live line on a terminal; silent elsewhere."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("loss {task.fields[loss]:.3f}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _describe(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What it takes to train the same model again."""
    # Where the checkpoint lies says nothing of how it came about.
    recipe = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out_dir", "overwrite")}
    return {
        "config": recipe | {"model": config.model.as_dict()},
        "steps": config.steps,
        "bytes_seen": sum(phase.steps * phase.context * phase.batch for phase in config.phases),
        "text": "pydoc_data.topics",
        "text_sha256": corpus.sha256,
        "train_bytes": corpus.train.size,
        "heldout_bytes": corpus.heldout.size,
        "cpu_count": os.cpu_count(),
        "platform": jax.default_backend(),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "orbax-checkpoint": orbax.checkpoint.__version__,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
