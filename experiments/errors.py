"""The one exception that the command line shows without a traceback."""

import difflib
import fnmatch
import traceback
from collections.abc import Collection, Iterable


class UserError(Exception):
    """Something that the person who typed the command can put right: exit code 2, the message alone."""


def last_words(error: BaseException) -> tuple[str, int]:
    """What a command that an exception ends says on standard error, and its exit code."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; finished parts are kept, and the same command resumes", 130
    return "".join(traceback.format_exception(error)).rstrip(), 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, empty if none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def require_matches(patterns: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuses patterns of kernel/case that match nothing, with the cases of the kernel that is meant, or the kernels.

    Args:
      patterns: as a config gives them under `cases`.
      known: every kernel/case there is.
      where: the devices that these are for.

    Raises:
      ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if fnmatch.filter(known, pattern):
            continue
        wanted = pattern.partition("/")[0]
        cases = dict.fromkeys(name.partition("/")[2] for name in fnmatch.filter(known, f"{wanted}/*"))
        kernels = dict.fromkeys(name.partition("/")[0] for name in known)
        there_is = f"the cases of {wanted} are {', '.join(cases)}" if cases else f"the kernels are {', '.join(kernels)}"
        raise ValueError(f"cases must match a kernel/case of {where}, got {pattern!r}; {there_is}")
