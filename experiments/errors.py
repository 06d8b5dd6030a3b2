"""The one exception that the command line shows without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the person who typed the command can put right: exit code 2, the message alone."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, empty if none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
