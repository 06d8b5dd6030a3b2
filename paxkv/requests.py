"""Requests: what was asked for, and how far each has come."""

import dataclasses
import enum
import typing

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.sizes import require_bool, require_int

TICK_US = 10  # the unit of the engine's clock; i32 ticks of 10 microseconds last almost six hours


class Status(enum.IntEnum):
    """Where a request stands."""

    WAITING = 0  # not arrived, queued, or preempted
    RUNNING = 1
    ENDED = 2


class Reason(enum.IntEnum):
    """Why a request ended."""

    NONE = 0  # it has not
    LENGTH = 1  # it generated what it asked for
    STOP_TOKEN = 2
    MAX_MODEL_LEN = 3  # prompt and output reached the longest sequence the memory can hold
    REFUSED_TOO_LONG = 4  # the prompt leaves no room for a single output token
    REFUSED_NEVER_FITS = 5  # more memory than there is, even if it ran alone
    NO_OUTPUT = 6  # it asked for no token
    ABORTED = 7  # whoever asked for it did not want it any more


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """A workload on the device, in order of arrival. Nothing here changes while it runs."""

    prompts: jax.Array  # i32[requests, max_prompt]; 0 beyond a prompt's end
    prompt_lens: jax.Array  # i32[requests]
    output_lens: jax.Array  # i32[requests]; tokens to generate
    arrivals: jax.Array  # i32[requests]; ticks, ascending
    temperatures: jax.Array  # f32[requests]; 0 is greedy
    keys: jax.Array  # key[requests]; each request's own stream, whoever runs beside it
    leaders: jax.Array  # i32[requests]; the first of the sequences that were asked for together; mostly itself
    group_sizes: jax.Array  # i32[requests]; how many were asked for together
    adapters: jax.Array  # i32[requests]; of the weights, 0 for none
    salts: jax.Array  # i32[requests]; requests of different salts share no cached prefix
    priorities: jax.Array  # i32[requests]; lower is preempted, and leaves the cache, first, and is admitted last
    predicted_lens: jax.Array  # i32[requests]; what somebody says that `output_lens` will be
    deadlines: jax.Array  # i32[requests]; ticks; when the first token is due
    delivered: jax.Array | None = None  # i32[requests]; tokens whose keys and values come with it; None: nobody has any
    stop_token: int = dataclasses.field(metadata={"static": True}, default=-1)  # -1: none
    samples: int = dataclasses.field(metadata={"static": True}, default=1)  # sequences of each prompt
    beams: bool = dataclasses.field(metadata={"static": True}, default=False)  # they are the best, not samples

    @property
    def count(self) -> int:
        """Number of requests; also the sentinel for "no request"."""
        return self.prompt_lens.shape[0]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """What became of each request. Times are ticks of the engine's clock, -1 for "never"."""

    status: jax.Array  # i32[requests]; Status
    reason: jax.Array  # i32[requests]; Reason
    generated: jax.Array  # i32[requests]; output tokens so far
    admitted_at: jax.Array  # i32[requests]; when it first got a row
    first_token_at: jax.Array  # i32[requests]
    ended_at: jax.Array  # i32[requests]
    preemptions: jax.Array  # i32[requests]


def init_progress(requests: int) -> Progress:
    """Nobody has started."""
    zeros, never = np.zeros(requests, np.int32), np.full(requests, -1, np.int32)
    return Progress(
        status=jnp.array(zeros),
        reason=jnp.array(zeros),
        generated=jnp.array(zeros),
        admitted_at=jnp.array(never),
        first_token_at=jnp.array(never),
        ended_at=jnp.array(never),
        preemptions=jnp.array(zeros),
    )


def make_requests(
    prompts: np.ndarray | None,
    prompt_lens: np.ndarray,
    output_lens: np.ndarray,
    arrival_ms: np.ndarray,
    *,
    seed: int,
    temperature: float = 0.0,
    stop_token: int = -1,
    samples: int = 1,
    beams: bool = False,
    adapters: np.ndarray | None = None,
    salts: np.ndarray | None = None,
    priorities: np.ndarray | None = None,
    predicted_lens: np.ndarray | None = None,
    deadline_ms: np.ndarray | None = None,
    delivered: np.ndarray | None = None,
) -> Requests:
    """Puts a workload on the device.

    Args:
      prompts: i32[requests, max_prompt], token ids; of any kind of integers that fit int32, as all that follow. None if
        nobody looks at them, as in a simulation.
      prompt_lens: i32[requests], at least 1.
      output_lens: i32[requests], at least 0.
      arrival_ms: f64[requests], ascending from 0 or later.
      seed: of the sampling keys; request i samples from `fold_in(key(seed), i)`.
      temperature: of every request; 0 is greedy.
      stop_token: a token that ends a request, -1 for none.
      samples: sequences to generate for each prompt. Sequence k of prompt i is request `i * samples + k`.
      beams: the sequences of a prompt are its best ones by a beam search of this width, at least 2, instead of
        samples; greedy, and without a stop token.
      adapters: i32[requests], of the weights each prompt is for; 0 for none.
      salts: i32[requests]; prompts of different salts share no cached prefix.
      priorities: i32[requests]; lower is preempted, and leaves the cache, first, and is admitted last under the order
        `priority`.
      predicted_lens: i32[requests], at least 0; what a predictor says of `output_lens`, which it knows if None.
      deadline_ms: f64[requests], not negative; when the first token of each is due, on the clock of `arrival_ms`. Its
        arrival if None, as if all were due after the same time.
      delivered: i32[requests], from 0 to the prompt; tokens at its start whose keys and values were computed elsewhere
        and come with the request, as to a server that only answers. The last token of a prompt is computed in any case.

    Raises:
      ValueError: if shapes disagree, anything is no integer of 32 bits or out of range, arrivals are unsorted or
        beyond the clock, beams are asked for with what only samples have, or several samples with what is delivered.
    """
    count = np.size(prompt_lens)
    if count == 0:
        raise ValueError("requests: expected at least one, got none; does the workload's filter drop every row?")
    one_each = (count,)
    prompt_lens = _integers("prompt_lens", prompt_lens, one_each)
    output_lens = _integers("output_lens", output_lens, one_each)
    widest = 2**31 - 1
    if prompts is None:
        prompts = np.zeros((count, 0), np.int32)
    else:
        width = np.shape(prompts)[1] if np.ndim(prompts) == 2 else "max_prompt"
        prompts = _integers("prompts", prompts, (count, width))
        widest = prompts.shape[1]
    if not (prompt_lens.min() >= 1 and prompt_lens.max() <= widest):
        raise ValueError(
            f"prompt_lens: expected 1 to {widest} (the width of prompts), got {prompt_lens.min()} to "
            f"{prompt_lens.max()}"
        )
    if prompts.size and prompts.min() < 0:
        raise ValueError(f"prompts: expected token ids, which are 0 or more, got {prompts.min()}")
    longest = int((prompt_lens.astype(np.int64) + output_lens).max())
    if output_lens.min() < 0 or longest >= 2**31:
        raise ValueError(
            f"output_lens: expected 0 or more, and with the prompt less than 2**31, got {output_lens.min()} to "
            f"{output_lens.max()}, {longest} with the prompt"
        )
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a finite number, 0 (greedy) or more, got {temperature}")
    arrivals = _ticks(arrival_ms, count)
    total = count * require_int("samples", samples)
    if total >= 2**31:
        raise ValueError(f"samples: expected fewer than 2**31 sequences in all, got {samples} of {count} prompts")
    require_int("stop_token", stop_token, minimum=-1)
    if require_bool("beams", beams):
        _require_search(samples, temperature, stop_token)
    key = jax.random.key(seed)
    place = np.arange(total, dtype=np.int32)

    def each(values: np.ndarray) -> jax.Array:
        """One value a prompt, repeated for its sequences."""
        return jnp.asarray(np.repeat(values, samples, axis=0), jnp.int32)

    def label(name: str, values: object) -> jax.Array:
        """What requests are told apart by, 0 unless given."""
        return each(_integers(name, np.zeros(count, np.int32) if values is None else values, one_each))

    predicted = output_lens if predicted_lens is None else _integers("predicted_lens", predicted_lens, one_each)
    if predicted.min() < 0 or (prompt_lens.astype(np.int64) + predicted).max() >= 2**31:
        raise ValueError(
            f"predicted_lens: expected 0 or more, and with the prompt less than 2**31, got {predicted.min()} to "
            f"{predicted.max()}"
        )
    if delivered is not None:
        delivered = _integers("delivered", delivered, one_each)
        if not (np.all(delivered >= 0) and np.all(delivered <= prompt_lens)) or samples > 1:
            raise ValueError(
                f"delivered: expected 0 to the prompt's tokens, and one sample of each, got {delivered.min()} to "
                f"{delivered.max()} and {samples}"
            )
    return Requests(
        prompts=each(prompts),
        prompt_lens=each(prompt_lens),
        output_lens=each(output_lens),
        arrivals=each(arrivals),
        temperatures=jnp.full(total, temperature, jnp.float32),
        keys=jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(total)),
        leaders=jnp.asarray(place // samples * samples),
        group_sizes=jnp.full(total, samples, jnp.int32),
        adapters=label("adapters", adapters),
        salts=label("salts", salts),
        priorities=label("priorities", priorities),
        predicted_lens=each(predicted),
        deadlines=each(arrivals if deadline_ms is None else _deadlines(deadline_ms, count)),
        delivered=None if delivered is None else each(delivered),
        stop_token=stop_token,
        samples=samples,
        beams=beams,
    )


def _integers(name: str, values: object, shape: tuple[int | str, ...]) -> np.ndarray:
    """`values` as an array of integers of 32 bits: what is rounded, cut or broadcast could be mixed up."""
    array = np.asarray(values)
    if array.shape != shape:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected shape [{wanted}], one entry a prompt, got {list(array.shape)}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: expected integers, got {array.dtype}; round them first")
    if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise ValueError(f"{name}: expected integers of 32 bits, got {array.min()} to {array.max()}")
    return array


def _ticks(arrival_ms: object, count: int) -> np.ndarray:
    """Arrivals in ticks: rounded up, or a request could be served before it arrives."""
    times = np.asarray(arrival_ms)
    if times.shape != (count,) or times.dtype.kind not in "iuf":
        raise ValueError(
            f"arrival_ms: expected {count} numbers, one for each of prompt_lens, got {times.dtype}{list(times.shape)}"
        )
    # What float64 adds to a whole tick does not count.
    ticks = np.ceil(np.round(times.astype(np.float64) * (1000 / TICK_US), 6))
    if not np.all(np.diff(ticks) >= 0) or not ticks[0] >= 0 or not ticks[-1] < 2**30:
        raise ValueError(
            f"arrival_ms: expected ascending times from 0 to {2**30 * TICK_US // 1000}, got {times[0]} to "
            f"{times[-1]}; sort the workload, or shorten it with its time scale"
        )
    return ticks


def _deadlines(deadline_ms: object, count: int) -> np.ndarray:
    """Deadlines in ticks, in any order."""
    times = np.asarray(deadline_ms)
    if times.shape != (count,) or times.dtype.kind not in "iuf":
        raise ValueError(
            f"deadline_ms: expected {count} numbers, one for each of prompt_lens, got {times.dtype}{list(times.shape)}"
        )
    ticks = np.ceil(np.round(times.astype(np.float64) * (1000 / TICK_US), 6))
    if not (np.all(ticks >= 0) and np.all(ticks < 2**31 - 1)):
        raise ValueError(f"deadline_ms: expected times from 0 to {(2**31 - 2) * TICK_US // 1000}, got {times}")
    return ticks


def _require_search(samples: int, temperature: float, stop_token: int) -> None:
    """Refuses what a beam search would ignore."""
    if samples < 2:
        raise ValueError(f"samples: expected at least 2 with beams, the width of the search, got {samples}")
    if temperature > 0:
        raise ValueError(f"temperature: expected 0 with beams, which are not drawn, got {temperature}")
    if stop_token >= 0:
        raise ValueError(
            f"stop_token: expected none (-1) with beams, which all get the length that was asked for, got {stop_token}"
        )


def final_lengths(requests: Requests, max_len: int, ids: jax.Array) -> jax.Array:
    """Tokens that each of these requests has stored when it ends by itself; 0 for `requests.count`.

    Prompt and output, at most `max_len` together, without the last token: nothing comes after it that would attend
    to it, so its keys and values are never computed.
    """
    prompt = requests.prompt_lens.at[ids].get(mode="fill", fill_value=1)
    return jnp.minimum(prompt + requests.output_lens.at[ids].get(mode="fill", fill_value=0), max_len) - 1
