"""Pass keys hidden in a text, to be told again at its end.

A prompt is text of some kind with a line at each of several depths, "The pass key of Ada is 48213.", each with a name
and digits of its own. It ends with the same lines in another order. Their digits are predicted from what stands before
them, the right ones given: if every digit of a key is the most likely one, a greedy answer is that key, and only then.
A model that cannot do it still has a probability of the digits, which sees what an exact match does not.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float32, Int32

from experiments.quality_metrics import standard_error

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal", "Ida", "Jan")
DIGITS = 5


class Prompt(NamedTuple):
    """Text with pass keys, which its end asks for."""

    tokens: Int32[np.ndarray, " tokens"]
    answers: Int32[np.ndarray, " tokens"]  # of which key, counted by depth, a token is a digit that is asked for; or -1

    @property
    def asked_tokens(self) -> int:
        """Tokens from the first digit that is asked for to the end."""
        return len(self.tokens) - int(np.argmax(self.answers >= 0))


def hide(
    encode: Callable[[str], Sequence[int]],
    filler: Int32[np.ndarray, " filler"],
    context: int,
    depths: Sequence[float],
    rng: np.random.Generator,
) -> Prompt:
    """Hides one pass key at each depth.

    Args:
      encode: a text's tokens, without any that only mark a beginning.
      filler: tokens of a text, of which a random part is taken.
      context: tokens of the prompt.
      depths: shares of the filler that stand before each key, ascending.
      rng: draws keys, names, their order at the end, and the part of the filler.

    Raises:
      ValueError: the keys do not fit into the context, or the filler does not fill it.
    """
    low = 10 ** (DIGITS - 1)
    keys = [str(low + int(key)) for key in rng.choice(9 * low, len(depths), replace=False)]
    names = rng.permutation(NAMES)[: len(depths)]
    heads = [encode(f"\nThe pass key of {name} is ") for name in names]
    digits, tail = [encode(key) for key in keys], encode(".\n")
    order = rng.permutation(len(depths)).tolist()
    asked = [(piece, owner) for i in order for piece, owner in ((heads[i], -1), (digits[i], i), (tail, -1))]
    size = context - 2 * sum(len(piece) for piece, _ in asked)
    if not 0 <= size <= len(filler):
        raise ValueError(
            f"passkey_contexts: expected contexts that hold {len(depths)} pass keys twice and at most {len(filler)} "
            f"tokens of text beside them, got {context}"
        )
    start = int(rng.integers(len(filler) - size + 1))
    places = [0, *(round(depth * size) for depth in depths), size]
    pieces: list[tuple[Sequence[int], int]] = [(filler[start : start + places[1]].tolist(), -1)]
    for i, place in enumerate(places[1:-1]):
        pieces += [(heads[i], -1), (digits[i], -1), (tail, -1)]
        pieces += [(filler[start + place : start + places[i + 2]].tolist(), -1)]
    pieces += asked
    return Prompt(
        np.array([token for piece, _ in pieces for token in piece], np.int32),
        np.array([owner for piece, owner in pieces for _ in piece], np.int32),
    )


def score(logits: Float32[np.ndarray, "asked vocab"], prompt: Prompt) -> list[dict[str, float | bool]]:
    """How each key is told.

    Args:
      logits: after the `asked_tokens` tokens before the last one.
      prompt: what was read.

    Returns:
      For each key, by depth: whether every digit is the most likely token, and their mean log-probability in nats.
    """
    answers, tokens = (x[-prompt.asked_tokens :] for x in (prompt.answers, prompt.tokens))
    found: list[dict[str, float | bool]] = []
    for key in range(int(prompt.answers.max()) + 1):
        own = answers == key
        rows = logits[own].astype(np.float64)
        top = rows.max(axis=-1)
        log_sum = top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))
        log_probs = rows[np.arange(len(rows)), tokens[own]] - log_sum
        exact = bool((rows.argmax(axis=-1) == tokens[own]).all())
        found.append({"exact": exact, "digit_logprob": float(log_probs.mean())})
    return found


def summarise(scheme: str, keys: pl.DataFrame, reference: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Metrics of each context, as `passkey_<context>/<scheme>`.

    Args:
      scheme: over a cache in which `keys` were told.
      keys: with `context`, `exact` and `digit_logprob`, a row a key.
      reference: the same keys over the reference's cache.
    """
    reference = reference.select(reference_logprob=pl.col("digit_logprob"))
    found = {}
    for (context,), own in pl.concat([keys, reference], how="horizontal").group_by("context", maintain_order=True):
        columns = own.select("exact", "digit_logprob", "reference_logprob").cast(pl.Float64)
        exact, log_probs, expected = (columns[name].to_numpy() for name in columns.columns)
        metrics = {"exact_match": exact, "digit_logprob": log_probs, "digit_logprob_change": log_probs - expected}
        summary: dict[str, Any] = {"scheme": scheme, "context": context, "keys": len(own)}
        for name, values in metrics.items():
            summary |= {name: float(values.mean()), f"{name}_se": standard_error(values)}
        found[f"passkey_{context}/{scheme}"] = summary
    return found
