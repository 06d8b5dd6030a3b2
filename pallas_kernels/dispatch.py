"""Which implementation of an operation runs: the platform's, a named one, or the first of a list that can."""

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax

from pallas_kernels import choices

P = ParamSpec("P")
R = TypeVar("R")

# The order tried when the caller names no backend. An operation that lacks one of them goes on to the next.
_PREFERRED: Mapping[str, tuple[str, ...]] = {"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("mosaic_tpu", "xla")}

INTERPRET = "interpret"
# The order tried for `interpret`. Triton kernels are interpreted as plain JAX inside the compiled program; those for
# TPUs call Python for every DMA, which takes hundreds of times as long.
_INTERPRETED = ("triton_interpret", "mosaic_tpu_interpret")


def preferred(backends: Mapping[str, Callable[..., object]]) -> list[str]:
    """The names of an operation's backends that are tried in turn on this platform if the caller names none."""
    return [name for name in _PREFERRED.get(jax.default_backend(), ("xla",)) if name in backends]


def only(backends: Mapping[str, Callable[..., R]], names: Sequence[str], argument: str) -> dict[str, Callable[..., R]]:
    """The backends, of which all but `names` refuse the call, as their kernels have no `argument`."""

    def refusal(name: str) -> Callable[..., R]:
        def refuse(*args: object, **kwargs: object) -> R:
            raise NotImplementedError(f"{argument}: the backend {name!r} has none; use {' or '.join(map(repr, names))}")

        return refuse

    return {name: run if name in names else refusal(name) for name, run in backends.items()}


def dispatch(
    op: str,
    backends: Mapping[str, Callable[P, R]],
    backend: str | Sequence[str] | None,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Calls one of an operation's backends.

    An operation checks its arguments before it dispatches. What a backend raises as `NotImplementedError` or
    `ValueError` therefore means that this backend cannot do this call, and a list goes on to its next name;
    any other exception is a defect and is not swallowed.

    Args:
      op: the operation's name, for messages.
      backends: the operation's implementations by name, all with one signature.
      backend: None for the platform's own order, a name for that one alone, `interpret` for the kernels of absent
        devices in the fastest interpreter that can do the call, or names to try in turn.
      *args: handed to the backend.
      **kwargs: handed to the backend.

    Returns:
      What the backend returns.

    Raises:
      NotImplementedError: the named backend does not exist for `op`, or no name of the list can do the call;
        the message holds every reason.
      ValueError: `backend` is an empty list, or the only backend asked refuses the call.
    """
    if backend is None:
        backend = preferred(backends)
    asked = [backend] if isinstance(backend, str) else list(backend)
    if not asked:
        raise ValueError(f"{op}: backend must be None, a name or a non-empty list of names of {list(backends)}")
    interpreters = [name for name in _INTERPRETED if name in backends] or [INTERPRET]
    names = [name for word in asked for name in (interpreters if word == INTERPRET else [word])]

    failures: list[Exception] = []
    for name in names:
        try:
            if name not in backends:
                raise NotImplementedError(f"{op} has no backend {name!r}; it has {list(backends)}")
            answer = backends[name](*args, **kwargs)
        except (NotImplementedError, ValueError) as failure:
            failures.append(failure)
        else:
            choices.note(op, backend=name)
            return answer
    if len(failures) == 1:
        on = f"{op}: the backend was {names[0]!r}, on a {jax.default_backend()}"
        failures[0].add_note(f"{on}; {INTERPRET!r} runs the kernels of absent devices")
        raise failures[0]
    reasons = "; ".join(f"{name}: {failure}" for name, failure in zip(names, failures, strict=True))
    raise NotImplementedError(f"{op}: no backend of {names} can do this call. {reasons}") from ExceptionGroup(
        f"{op}: one failure per backend", failures
    )
