"""Held-out loss of a model beside that of a byte trigram model, so that a model card can be checked."""

import dataclasses
import math
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32, UInt8

from models.checkpoint import RECORD, load_checkpoint, load_record
from models.decoder import Decode, Params, forward, make_decode
from models.text import Bytes, Corpus, load_corpus
from models.trigram import Trigram, fit_trigram

CONTEXTS = (256, 1024)
BATCH_TOKENS = 4096  # of one evaluation step; bounds its memory
POSITION_BUCKETS = 8


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Loss over consecutive windows of held-out text, each read from its own start."""

    context: int  # bytes a window predicts; byte i is given the i before it
    bytes: int  # predicted in all
    nats: float  # per byte
    bits_per_byte: float
    bits_by_position: tuple[float, ...]  # mean over each eighth of the window
    trigram_bits_per_byte: float  # the same bytes, always given two


def token_nats(decode: Decode, params: Params, windows: Int32[Array, "batch bytes"]) -> Float[Array, "batch context"]:
    """Loss of every byte of each window but the first, given those before it in the window, in nats."""
    log_probs = jax.nn.log_softmax(forward(decode, params, windows[:, :-1]), axis=-1)
    return -jnp.take_along_axis(log_probs, windows[:, 1:, None], axis=-1)[..., 0]


def cut_windows(text: Bytes, context: int) -> UInt8[np.ndarray, "windows width"]:
    """Windows of `context` + 1 bytes, each starting on the last byte of the one before; what is left over goes.

    Raises:
      ValueError: The text does not fill one window.
    """
    count = (text.size - 1) // context
    if count < 1:
        raise ValueError(f"a window of context {context} needs {context + 1} bytes of text, got {text.size}")
    return np.stack([text[i * context : (i + 1) * context + 1] for i in range(count)])


def window_nats(
    decode: Decode, params: Params, windows: UInt8[np.ndarray, "windows width"]
) -> Float64[np.ndarray, "windows context"]:
    """Loss of every byte of each window but the first, in nats; a few windows at a time."""
    batch = max(1, BATCH_TOKENS // (windows.shape[1] - 1))
    # Full batches, so that one program serves all; the rows added to the last one are not counted.
    padded = np.pad(windows, ((0, -len(windows) % batch), (0, 0))).astype(np.int32)
    parts = [_token_nats(decode, params, jnp.asarray(padded[i : i + batch])) for i in range(0, len(padded), batch)]
    return np.concatenate(parts)[: len(windows)].astype(np.float64)


def evaluate(
    decode: Decode, params: Params, trigram: Trigram, text: Bytes, context: int, max_windows: int | None = None
) -> Heldout:
    """The model's and the trigram model's loss on the same bytes of `text`: all windows, or the first few."""
    nats = window_nats(decode, params, cut_windows(text, context)[:max_windows])
    by_position = [part.mean() for part in np.array_split(nats, POSITION_BUCKETS, axis=1)]
    return Heldout(
        context=context,
        bytes=nats.size,
        nats=float(nats.mean()),
        bits_per_byte=_bits(nats.mean()),
        bits_by_position=tuple(map(_bits, by_position)),
        trigram_bits_per_byte=_bits(trigram.nats(text)[1 : 1 + nats.size].mean()),
    )


def evaluate_all(decode: Decode, params: Params, corpus: Corpus) -> dict[str, Heldout]:
    """The loss on all held-out text at each of `CONTEXTS` that the model is made for, as `heldout_<context>`."""
    trigram = fit_trigram(corpus.train)
    contexts = sorted({min(context, decode.config.max_len) for context in CONTEXTS})
    return {f"heldout_{n}": evaluate(decode, params, trigram, corpus.heldout, n) for n in contexts}


def check_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Scores a checkpoint on the running Python's text, which may not be quite the one it was trained on.

    Returns:
      The results, and what they are of, as JSON holds it.

    Raises:
      FileNotFoundError: There is no checkpoint, or none with a record of its training.
      ValueError: The weights are not those its config asks for.
    """
    if not (pathlib.Path(path) / RECORD).is_file():
        raise FileNotFoundError(
            f"{path}: expected a folder with {RECORD}, as `python -m models train` writes it, and no other model; the "
            "experiment fp8_quality reads texts with any"
        )
    decode, params = make_decode(load_checkpoint(path))
    record, corpus = load_record(path), load_corpus()
    return {
        "checkpoint": str(path),
        "python": platform.python_version(),
        "text_sha256": corpus.sha256,
        "trained_on_this_text": record.get("text_sha256") == corpus.sha256,
        "results": {name: dataclasses.asdict(found) for name, found in evaluate_all(decode, params, corpus).items()},
    }


_token_nats = jax.jit(token_nats, static_argnames=("decode",))


def _bits(nats: float) -> float:
    return float(nats) / math.log(2)
