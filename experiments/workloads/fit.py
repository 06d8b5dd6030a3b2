"""Bringing a workload's lengths within a model's context, with a record of what that changed."""

import dataclasses
from fractions import Fraction
from typing import Literal

import numpy as np

from experiments.workloads.workload import Workload, ceil_div

TooLong = Literal["drop", "truncate", "refuse"]


def scale_lengths(workload: Workload, length_scale: float) -> Workload:
    """Multiplies both lengths by a factor and rounds up, so that a length of at least 1 stays at least 1.

    Hash ids keep naming the same blocks, whose size is scaled too.

    Args:
        workload: The requests.
        length_scale: The factor, > 0; read as the nearest fraction with a denominator of at most a million, so that
            0.2 of 35 tokens is 7, where float arithmetic rounded up would give 8.

    Raises:
        ValueError: If the factor is not positive, makes a length that int32 does not hold, or does not turn the
            hash ids' block size into a whole number (ids would no longer name whole blocks).
    """
    if not 1e-6 <= length_scale < np.inf:
        raise ValueError(f"length_scale must be a number >= 1e-6, got {length_scale}")
    factor = Fraction(length_scale).limit_denominator(1_000_000)
    block_size = workload.hash_block_size * factor
    if block_size.denominator != 1:
        raise ValueError(
            f"length_scale must turn the trace's hash blocks of {workload.hash_block_size} tokens into whole tokens, "
            f"got {length_scale} (blocks of {float(block_size)})"
        )
    longest = int(max(workload.prompt_len.max(), workload.output_len.max()))
    if longest * factor > np.iinfo(np.int32).max:
        raise ValueError(f"length_scale {length_scale} makes {longest} tokens exceed 32 bits; lower it")
    numerator = np.int64(factor.numerator)
    return dataclasses.replace(
        workload,
        prompt_len=ceil_div(workload.prompt_len * numerator, factor.denominator).astype(np.int32),
        output_len=ceil_div(workload.output_len * numerator, factor.denominator).astype(np.int32),
        hash_block_size=int(block_size),
        provenance=dataclasses.replace(workload.provenance, length_scale=length_scale),
    )


def fit_lengths(workload: Workload, max_model_len: int, too_long: TooLong) -> Workload:
    """Applies a policy to requests whose prompt + output exceed `max_model_len`, and counts them.

    Args:
        workload: The requests.
        max_model_len: Most tokens of one sequence, >= 2.
        too_long: `drop` leaves them out; `truncate` cuts the output first (to no less than 1 token), then the end of
            the prompt; `refuse` raises.

    Raises:
        ValueError: If the policy is `refuse` and a request is too long, if none remains, or on a wrong argument.
    """
    if max_model_len < 2:
        raise ValueError(f"max_model_len must hold a prompt and an output token (>= 2), got {max_model_len}")
    over = workload.total_len > max_model_len
    count = int(over.sum())
    if count == 0:
        return workload
    if too_long == "drop":
        return _drop(workload, over, max_model_len)
    if too_long == "truncate":
        return _truncate(workload, count, max_model_len)
    first = int(np.argmax(over))
    raise ValueError(
        f"{count} of {workload.num_requests} requests exceed max_model_len {max_model_len}; the first is request "
        f"{first} ({workload.prompt_len[first]} prompt + {workload.output_len[first]} output tokens). "
        "Lower length_scale, or set too_long to drop or truncate"
    )


def _drop(workload: Workload, over: np.ndarray, max_model_len: int) -> Workload:
    count = int(over.sum())
    if count == workload.num_requests:
        raise ValueError(f"all {count} requests exceed max_model_len {max_model_len}; lower length_scale")
    hash_ids = workload.hash_ids
    return dataclasses.replace(
        workload,
        arrival_ms=workload.arrival_ms[~over],
        prompt_len=workload.prompt_len[~over],
        output_len=workload.output_len[~over],
        hash_ids=None if hash_ids is None else tuple(hash_ids[i] for i in np.flatnonzero(~over)),
        provenance=dataclasses.replace(workload.provenance, too_long=count, too_long_dropped=count),
    )


def _truncate(workload: Workload, count: int, max_model_len: int) -> Workload:
    prompt_len, output_len = workload.prompt_len, workload.output_len
    # The output keeps what the prompt leaves, and its first token at least; a kept request without output has none.
    new_output = np.minimum(output_len, np.maximum(max_model_len - prompt_len, 1))
    new_prompt = np.minimum(prompt_len, max_model_len - new_output)
    hash_ids = workload.hash_ids
    if hash_ids is not None:
        blocks = ceil_div(new_prompt, workload.hash_block_size)
        hash_ids = tuple(ids[:n] for ids, n in zip(hash_ids, blocks, strict=True))
    return dataclasses.replace(
        workload,
        prompt_len=new_prompt,
        output_len=new_output,
        hash_ids=hash_ids,
        provenance=dataclasses.replace(
            workload.provenance,
            too_long=count,
            too_long_truncated=count,
            prompt_tokens_cut=int((prompt_len - new_prompt).sum(dtype=np.int64)),
            output_tokens_cut=int((output_len - new_output).sum(dtype=np.int64)),
        ),
    )
