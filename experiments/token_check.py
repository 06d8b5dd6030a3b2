"""Whether two runs generated the same tokens, and if not, whether rounding explains it."""

from typing import NamedTuple

import polars as pl


class TokenCheck(NamedTuple):
    """How many requests differ."""

    near_ties: int  # whose first difference is between two logits that are equal within the tolerance
    unexplained: int


def compare_tokens(reference: pl.DataFrame, other: pl.DataFrame, near_tie: float) -> TokenCheck:
    """Compares greedy tokens request by request, up to the first difference.

    At a first difference all tokens before are equal, so both runs computed the same logits up to the order in which
    they added; the choice may differ only where the best two are that close, in both runs. What comes after a first
    difference says nothing. Tokens that are equal as far as they go, but of different number, are unexplained.

    Args:
      reference: `tokens` and `margins` (lead of the best logit) of each request, as lists.
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
