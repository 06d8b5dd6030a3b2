"""Writes a continuation as it comes, and tells how fast it came."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import jax
import jax.monitoring

from models.config import Dtype
from models.decoder import make_decode
from models.formats import load_model, load_tokenizer
from models.generate import Sampling, generate
from models.names import find_model
from models.tokenizer import TextStream
from paxkv.kv_format import KVFormat


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of one continuation; seconds of compilation are in none but `compile_seconds`."""

    load_seconds: float
    compile_seconds: float
    prefill_tokens: int
    prefill_seconds: float  # until the first token is known
    decode_tokens: int  # after it
    decode_seconds: float

    def __str__(self) -> str:
        parts = [f"load {self.load_seconds:.1f} s, compile {self.compile_seconds:.1f} s"]
        for name in ("prefill", "decode"):
            tokens, seconds = getattr(self, f"{name}_tokens"), getattr(self, f"{name}_seconds")
            rate = f", {tokens / seconds:.1f} tokens/s" if tokens else ""
            parts.append(f"{name} {tokens} tokens in {seconds:.2f} s{rate}")
        return "; ".join(parts)


def stream(
    model: str | os.PathLike[str],
    prompt: str,
    sampling: Sampling,
    *,
    dtype: Dtype | None,
    kv_format: KVFormat,
    block_size: int,
    write: Callable[[str], object],
) -> Speed:
    """Hands the text that follows a prompt to `write`, piece by piece, until the model or `sampling` ends it.

    Args:
      model: name or path.
      prompt: goes behind what the model expects before every text.
      sampling: how many tokens, and how they are chosen.
      dtype: of weights and activations; None for what is stored.
      kv_format: of the cache.
      block_size: tokens in a block of the memory.
      write: takes text; never half a character.

    Raises:
      FileNotFoundError: there is no such model.
      ValueError: the model cannot be read, or an argument does not fit it; see `generate`.
    """
    start = time.perf_counter()
    path = find_model(model)
    tokenizer = load_tokenizer(path)
    decode, params = make_decode(load_model(path, dtype=dtype))
    jax.block_until_ready(params)
    loaded = time.perf_counter()

    ids = tokenizer.encode(prompt)
    text = TextStream(tokenizer)
    seconds = []  # of each token, without compilation
    with compile_clock() as compiled:
        before, compiled_before = time.perf_counter(), 0.0
        for token in generate(decode, params, ids, sampling, kv_format=kv_format, block_size=block_size):
            now, compiled_now = time.perf_counter(), compiled()
            seconds.append(now - before - (compiled_now - compiled_before))
            before, compiled_before = now, compiled_now
            if token in tokenizer.eos:
                break
            write(text.feed(token))
        write(text.finish())
        return Speed(
            load_seconds=loaded - start,
            compile_seconds=compiled(),
            prefill_tokens=len(ids),
            prefill_seconds=seconds[0],
            decode_tokens=len(seconds) - 1,
            decode_seconds=sum(seconds[1:], 0.0),
        )


@contextlib.contextmanager
def compile_clock() -> Iterator[Callable[[], float]]:
    """Gives a function that tells how many seconds JAX has traced and compiled for since the block was entered."""
    spans: list[tuple[float, float]] = []

    def note(event: str, start_time: float, end_time: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((start_time, end_time))

    def seconds() -> float:
        total, reached = 0.0, float("-inf")
        for start, end in sorted(spans):  # one lies within the other where a function calls another
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    jax.monitoring.register_event_time_span_listener(note)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_time_span_listener(note)
