"""Tokens of whole requests for memories that share what is equal: prompts that begin alike, and what came of them."""

import dataclasses

import numpy as np
from jaxtyping import Int32

from experiments.workloads.streams import stream
from experiments.workloads.workload import Workload
from paxkv.sizes import require_int

_MOST_TEXTS = 2**20  # far more than requests that anybody draws from them


@dataclasses.dataclass(frozen=True)
class SystemPrompts:
    """Texts of one length, with one of which each prompt begins.

    Attributes:
        count: How many there are, at most 2**20.
        tokens: Length of each, which comes on top of what a prompt has.
        popularity: The k-th one, from 1, is drawn with weight `k ** -popularity`; 0 makes all alike.
    """

    count: int
    tokens: int
    popularity: float = 0.0

    def check(self) -> None:
        """Refuses what describes no texts.

        Raises:
            ValueError: Naming the field, what was expected and what came.
        """
        if require_int("system_prompts.count", self.count) > _MOST_TEXTS:
            raise ValueError(f"system_prompts.count: expected at most {_MOST_TEXTS:,}, got {self.count:,}")
        require_int("system_prompts.tokens", self.tokens)
        if not 0 <= self.popularity < float("inf"):
            raise ValueError(f"system_prompts.popularity: expected a finite exponent, 0 or more, got {self.popularity}")


def with_system_prompts(workload: Workload, system: SystemPrompts, max_model_len: int, seed: int) -> Workload:
    """The same requests, each of which begins with one of the texts: its prompt is longer by that, and says so.

    Args:
        workload: Requests without hash ids.
        system: The texts.
        max_model_len: Most tokens (prompt + output) of one sequence.
        seed: Seed of the experiment; only its `tokens` stream is used.

    Raises:
        ValueError: If the workload says already what its prompts share, or a request would be too long.
    """
    if workload.hash_ids is not None:
        raise ValueError(
            f"system_prompts: expected null with {workload.provenance.source}, which says what its prompts share"
        )
    if (longest := int(workload.total_len.max()) + system.tokens) > max_model_len:
        raise ValueError(
            f"system_prompts.tokens: expected room for it in server.max_model_len = {max_model_len}, got "
            f"{system.tokens}, with which a request comes to {longest} tokens; raise max_model_len, or shorten it"
        )
    weights = np.arange(1, system.count + 1, dtype=float) ** -system.popularity
    chosen = stream(seed, "tokens").choice(system.count, size=workload.num_requests, p=weights / weights.sum())
    own = -(-workload.prompt_len // system.tokens)  # pieces of its own that each prompt has
    begins = system.count + np.cumsum(own) - own
    ids = [
        np.concatenate([[text], np.arange(begin, begin + count)])
        for text, begin, count in zip(chosen, begins, own, strict=True)
    ]
    return dataclasses.replace(
        workload,
        prompt_len=(workload.prompt_len + system.tokens).astype(np.int32),
        hash_ids=tuple(each.astype(np.int64) for each in ids),
        hash_block_size=system.tokens,
    )


def transcripts(workload: Workload) -> Int32[np.ndarray, "requests width"]:
    """Prompt and output of each request, in tokens that are equal exactly where hash ids say that they are.

    What is generated occurs nowhere else: a prompt that quotes an earlier answer shares it with other prompts that do,
    and not with the answer.

    Args:
        workload: Requests with hash ids.

    Returns:
        Token ids; row i holds `prompt_len[i] + output_len[i]` of them, and 0 after those.

    Raises:
        ValueError: If the workload has no hash ids, or more tokens than int32 can tell apart.
    """
    if workload.hash_ids is None:
        raise ValueError(
            f"transcripts: expected a workload that says what its prompts share, got {workload.provenance.source}"
        )
    unit = workload.hash_block_size
    known, dense = np.unique(np.concatenate(workload.hash_ids), return_inverse=True)
    outputs = np.concatenate([[0], np.cumsum(workload.output_len, dtype=np.int64)])
    if (tokens := len(known) * unit + int(outputs[-1])) >= 2**31:
        raise ValueError(f"transcripts: expected less than 2**31 different tokens, got {tokens:,}; take fewer requests")
    pieces = np.cumsum([0, *map(len, workload.hash_ids)])
    found = np.zeros((workload.num_requests, int(workload.total_len.max())), np.int32)
    for row, (length, answered) in enumerate(zip(workload.prompt_len, workload.output_len, strict=True)):
        ids = dense[pieces[row] : pieces[row + 1]].astype(np.int64)
        found[row, :length] = (ids[:, None] * unit + np.arange(unit)).reshape(-1)[:length]
        answer = len(known) * unit + outputs[row] + np.arange(answered)
        found[row, length : length + answered] = answer
    return found
