"""Whether two runs generated the same tokens, and if not, whether rounding explains it; whether scores are true."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Float64, Int32

from models.decoder import Decode, Params
from models.evaluate import token_nats

BATCH_TOKENS = 4096  # read anew at a time; bounds the memory it takes


class TokenCheck(NamedTuple):
    """How many requests differ."""

    near_ties: int  # whose first difference is between two logits that are equal within the tolerance
    unexplained: int


def compare_tokens(reference: pl.DataFrame, other: pl.DataFrame, near_tie: float) -> TokenCheck:
    """Compares tokens request by request, up to the first difference.

    At a first difference all tokens before are equal, so both runs computed the same logits up to the order in which
    they added, and drew with the same key; the choice may differ only where the best two are that close, in both
    runs. What comes after a first difference says nothing. Tokens that are equal as far as they go, but of different
    number, are unexplained.

    Args:
      reference: `tokens` and `margins` (lead of the best choice, in logits) of each request, as lists.
      other: the same of another run, in the same order.
      near_tie: largest margin, in logits, at which a difference is accepted.
    """
    near_ties = unexplained = 0
    for a, b in zip(reference.iter_rows(named=True), other.iter_rows(named=True), strict=True):
        if a["tokens"] == b["tokens"]:
            continue
        pairs = zip(a["tokens"], b["tokens"], strict=False)
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if first is not None and all(run["margins"][first] <= near_tie for run in (a, b)):
            near_ties += 1
        else:  # a real difference, or one run stopped where the other went on
            unexplained += 1
    return TokenCheck(near_ties=near_ties, unexplained=unexplained)


def scores_without_cache(
    decode: Decode, params: Params, prompts: Int32[np.ndarray, "seqs max_prompt"], answers: pl.DataFrame
) -> Float64[np.ndarray, " seqs"]:
    """Log probability of what each sequence generated, by the model that reads all of it anew.

    Args:
      decode: the model.
      params: its weights.
      prompts: tokens of the prompts.
      answers: one row a sequence with `prompt_len` and the list of its `tokens`.
    """
    lengths = answers["prompt_len"].to_numpy()
    ends = lengths + answers["tokens"].list.len().to_numpy()
    width = max(2, int(ends.max()))
    batch = max(1, BATCH_TOKENS // width)
    windows = np.zeros((-(-len(ends) // batch) * batch, width), np.int32)  # full batches, so that one program serves
    for window, prompt, length, end, tokens in zip(windows, prompts, lengths, ends, answers["tokens"], strict=False):
        window[:length], window[length:end] = prompt[:length], tokens
    nats = np.concatenate(
        [_token_nats(decode, params, jnp.asarray(windows[i : i + batch])) for i in range(0, len(windows), batch)]
    )[: len(ends)].astype(np.float64)
    predicted = np.arange(1, width)[None, :]
    return -np.sum(nats, axis=1, where=(predicted >= lengths[:, None]) & (predicted < ends[:, None]))


_token_nats = jax.jit(token_nats, static_argnames="decode")
