"""Where greedy continuations part from those over the reference's cache.

The reference continues some prompts, a token at a time. Every other way of storing then reads the prompts and those
continuations: up to the first token that it would have chosen otherwise it has read just what it would have chosen
itself, so that this is where its own continuation parts. Reading costs a fraction of generating, and shares a compiled
program with all other reading. (Scales of blocks are the one thing that a generation stores otherwise: they grow with
every token, and what a block holds is quantised anew.)

Where a continuation parts is chaotic: two tokens that the reference finds almost equally likely part at any rounding.
The gap between their logits is therefore told beside it.
"""

from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Float32, Int32

from experiments.quality_forward import Step, Subject, read
from experiments.quality_metrics import first_difference
from paxkv.calibration import Calibration
from paxkv.kv_format import KVFormat


def part(
    subject: Subject,
    prompt: Int32[np.ndarray, " tokens"],
    reference: list[Step],
    fmt: KVFormat,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Where a format's greedy continuation of a prompt parts from the reference's.

    Args:
      subject: the model.
      prompt: token ids.
      reference: its continuation by the reference, see `quality_forward.continue_greedily`.
      fmt: how keys and values are stored.
      calibration: where static scales come from; needed if the format has any.

    Returns:
      See `compare`.
    """
    given = np.array([step.token for step in reference[:-1]], np.int32)
    logits = read(subject, np.concatenate([prompt, given]), fmt, calibration, last=len(reference)).logits
    return compare(np.asarray(logits), reference)


def compare(logits: Float32[np.ndarray, "steps vocab"], reference: list[Step]) -> dict[str, Any]:
    """`steps` before the first token that differs, and whether none does; what was chosen there, and the gap.

    Args:
      logits: after the prompt and after every token of the reference's continuation but the last.
      reference: the continuation.
    """
    chosen = np.argmax(logits, axis=-1).astype(np.int32)
    steps = first_difference(chosen, np.array([step.token for step in reference], np.int32))
    if steps == len(reference):
        return {"steps": steps, "never": True, "token": None, "reference_token": None, "gap": None}
    token, gap = reference[steps]
    return {"steps": steps, "never": False, "token": int(chosen[steps]), "reference_token": token, "gap": gap}


SCHEMA = pl.Schema(
    {
        "text": pl.String,
        "prompt": pl.Int32,
        "steps": pl.Int32,
        "never": pl.Boolean,
        "token": pl.Int32,
        "reference_token": pl.Int32,
        "gap": pl.Float32,
    }
)
"""Of a table of prompts."""


def summarise(prompts: pl.DataFrame) -> dict[str, float | None]:
    """Metrics of some prompts, of `SCHEMA`; the gap is None if no continuation parts."""
    gaps = prompts["gap"].drop_nulls().cast(pl.Float64).to_numpy()
    return {
        "divergence_median": float(np.median(prompts["steps"].to_numpy())),
        "never_diverged": float(prompts["never"].to_numpy().mean()),
        "divergence_gap": float(np.median(gaps)) if len(gaps) else None,
    }
