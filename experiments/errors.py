"""The one exception that the command line shows without a traceback."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable


class UserError(Exception):
    """Something that the person who typed the command can put right: exit code 2, the message alone."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, empty if none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def what_there_is(pattern: str, known: Collection[str]) -> str:
    """What a pattern of kernel/case that matches nothing might have meant: the cases of its kernel, or the kernels."""
    wanted = pattern.partition("/")[0]
    cases = dict.fromkeys(name.partition("/")[2] for name in known if fnmatch.fnmatch(name, f"{wanted}/*"))
    if cases:
        return f"; the cases of {wanted} are {', '.join(cases)}"
    return f"; the kernels are {', '.join(dict.fromkeys(name.partition('/')[0] for name in known))}"
