"""What a server is asked to do: when requests arrive, how long they are, and where that knowledge comes from."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a workload comes from and what was done to it, as plain values for a manifest.

    Attributes:
        source: Kind of source: `azure`, `sharegpt_stats`, `mooncake`, `burstgpt` or `synthetic`.
        rows_read: Rows read from the file, dropped ones included; for a generator the requests drawn.
        lengths: Where the lengths come from, in words: what is truncated and which means are guaranteed.
        arrivals: Where the arrival times come from, in words.
        file: Name of the trace file relative to the trace folder; None for a generator.
        sha256: Hash of the file's bytes as they lie on disk (compressed if it is); None for a generator.
        zero_output: Rows read that ask for no output token.
        zero_output_dropped: How many of those were left out.
        too_long: Requests whose prompt + output exceed `max_model_len` (after length scaling).
        too_long_dropped: How many of those were left out.
        too_long_truncated: How many of those were cut to fit.
        prompt_tokens_cut: Prompt tokens that the cutting took away, over all requests.
        output_tokens_cut: Output tokens that the cutting took away, over all requests.
        length_scale: Factor applied to both lengths, rounded up, before fitting to `max_model_len`.
        time_scale: Factor applied to the arrival times.
    """

    source: str
    rows_read: int
    lengths: str
    arrivals: str
    file: str | None = None
    sha256: str | None = None
    zero_output: int = 0
    zero_output_dropped: int = 0
    too_long: int = 0
    too_long_dropped: int = 0
    too_long_truncated: int = 0
    prompt_tokens_cut: int = 0
    output_tokens_cut: int = 0
    length_scale: float = 1.0
    time_scale: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival. A host value, not a pytree; it owns its arrays and makes them read-only.

    Attributes:
        provenance: Where all this comes from.
        arrival_ms: Arrival of each request in milliseconds, finite, >= 0, never decreasing.
        prompt_len: Prompt tokens of each request, >= 1.
        output_len: Output tokens of each request, >= 0; 0 only where the reader was told to keep such rows.
        hash_ids: One array per request naming its prompt's blocks of `hash_block_size` tokens, the last one
            possibly partial. Ids are chained: equal ids mean equal tokens in this block and in all before it.
            None where the source does not know.
        hash_block_size: Tokens per hash id; 0 where `hash_ids` is None.

    Raises:
        ValueError: If there is no request, or one breaks what is said above; the message names the first.
    """

    provenance: Provenance
    arrival_ms: Float64[np.ndarray, " requests"]
    prompt_len: Int32[np.ndarray, " requests"]
    output_len: Int32[np.ndarray, " requests"]
    hash_ids: tuple[Int64[np.ndarray, " _"], ...] | None = None
    hash_block_size: int = 0

    def __post_init__(self) -> None:
        requests = len(self.arrival_ms)
        if requests == 0:
            raise ValueError(f"a workload needs at least one request, got none from {self.provenance.source}")
        if len(self.prompt_len) != requests or len(self.output_len) != requests:
            raise ValueError(
                "arrival_ms, prompt_len and output_len must be equally long, "
                f"got {requests}, {len(self.prompt_len)} and {len(self.output_len)}"
            )
        rising = np.diff(self.arrival_ms, prepend=0.0) >= 0
        _check(rising & np.isfinite(self.arrival_ms), self.arrival_ms, "arrival_ms finite, >= 0, not decreasing")
        _check(self.prompt_len >= 1, self.prompt_len, "prompt_len >= 1")
        _check(self.output_len >= 0, self.output_len, "output_len >= 0")
        if (self.hash_ids is None) != (self.hash_block_size == 0) or self.hash_block_size < 0:
            raise ValueError(
                f"hash_block_size must be positive with hash_ids and 0 without, got {self.hash_block_size}"
            )
        if self.hash_ids is not None:
            if len(self.hash_ids) != requests:
                raise ValueError(f"hash_ids must hold {requests} arrays, one per request, got {len(self.hash_ids)}")
            blocks = np.array([len(ids) for ids in self.hash_ids])
            _check(
                blocks == ceil_div(self.prompt_len, self.hash_block_size),
                blocks,
                f"ceil(prompt_len / {self.hash_block_size}) hash ids",
            )
        for array in (self.arrival_ms, self.prompt_len, self.output_len, *(self.hash_ids or ())):
            array.setflags(write=False)

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_ms)

    @property
    def total_len(self) -> Int64[np.ndarray, " requests"]:
        """Prompt plus output tokens of each request."""
        return self.prompt_len.astype(np.int64) + self.output_len


def statistics(workload: Workload) -> dict[str, int | float | None]:
    """Figures that describe a workload; None where one is not defined (a rate with no time span).

    Returns:
        `requests`; sum, mean, p50 and max of `prompt_*` and `output_*` in tokens; `total_max` in tokens; `span_s` from
        the first to the last arrival; `rate` = requests / span in 1/s; `gap_cv`, the population coefficient of
        variation of the gaps between arrivals.
    """
    gaps = np.diff(workload.arrival_ms)
    span_s = float(workload.arrival_ms[-1] - workload.arrival_ms[0]) / 1e3
    figures: dict[str, int | float | None] = {"requests": workload.num_requests}
    for name, lengths in (("prompt", workload.prompt_len), ("output", workload.output_len)):
        figures[f"{name}_sum"] = int(lengths.sum(dtype=np.int64))
        figures[f"{name}_mean"] = float(lengths.mean())
        figures[f"{name}_p50"] = float(np.median(lengths))
        figures[f"{name}_max"] = int(lengths.max())
    figures["total_max"] = int(workload.total_len.max())
    figures["span_s"] = span_s
    figures["rate"] = workload.num_requests / span_s if span_s > 0 else None
    figures["gap_cv"] = float(gaps.std() / gaps.mean()) if span_s > 0 else None
    return figures


def ceil_div(values: np.ndarray, divisor: int) -> np.ndarray:
    """Quotients rounded up, in int64."""
    return -(-values.astype(np.int64) // divisor)


def _check(good: Bool[np.ndarray, " requests"], values: np.ndarray, expected: str) -> None:
    if not good.all():
        first = int(np.argmin(good))
        raise ValueError(f"request {first}: expected {expected}, got {values[first]}")
