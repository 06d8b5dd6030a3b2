"""The ways in which the suite runs a backend: on this machine as it is, or interpreted in one mode or another.

A backend joins the suite by an entry here and one in its operation's `BACKENDS`.
"""

import contextlib
import dataclasses
import faulthandler
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import pytest

from pallas_kernels.paged_attention.shapes import AttentionCase


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a backend.

    Attributes:
      backend: its name among an operation's backends.
      mode: what sets this way apart from others of the same backend.
      around: opens what a call must happen in, such as an interpreter's options.
      limit_s: a call that takes longer ends the process, as one that waits for a semaphore in vain never returns.
      runs: whether it can do a case; what it says no to must be refused by the backend with a message.
    """

    backend: str
    mode: str = ""
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    limit_s: float = 600.0
    runs: Callable[[AttentionCase], bool] = lambda case: True

    def __str__(self) -> str:
        return f"{self.backend}-{self.mode}" if self.mode else self.backend

    @contextlib.contextmanager
    def open(self):
        """The context of a call."""
        faulthandler.dump_traceback_later(self.limit_s, exit=True)
        try:
            with self.around():
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()


WAYS: tuple[Way, ...] = (Way("xla"), Way("triton_interpret"))


def ways(backends: Mapping[str, Callable], case: AttentionCase | None = None, *, always: tuple[str, ...] = ()) -> list:
    """Test parameters: the ways to run an operation's backends, on a case that they can do.

    With `always` given, the ways of other backends are left to `pytest -m soak`.
    """
    return [
        pytest.param(way, id=str(way), marks=pytest.mark.soak if always and way.backend not in always else ())
        for way in WAYS
        if way.backend in backends and (case is None or way.runs(case))
    ]


# What every test run does. The other cases are for where there are many minutes to spend.
QUICK = (
    "decode_d64_kv2_g4_b16_f32",
    "decode_d32_kv2_g2_b16_f32_sinks_cap_5_window_60",
    "mixed_d32_kv2_g3_b8_f32",
    "mixed_d32_kv2_g2_b16_f32_e4m3_layer_new",
    "mixed_d32_kv2_g2_b16_bf16_int8_token_new_window_50_cap_10_sinks",
)


def batches_of(
    backends: Mapping[str, Callable], cases: tuple[AttentionCase, ...], *, always: tuple[str, ...] = ()
) -> list:
    """Test parameters (way, case, batch): every batch of every case, in every way that can do it.

    Cases that are not among the quick ones are left to `pytest -m soak`, but for the backends `always`.
    """
    return [
        pytest.param(
            *way.values,
            case,
            batch,
            id=f"{case.name}-{batch}-{way.id}",
            marks=() if case.name in QUICK or way.values[0].backend in always else pytest.mark.soak,
        )
        for case in cases
        for way in ways(backends, case)
        for batch in case.batches
    ]
