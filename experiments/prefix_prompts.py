"""Sequences of prompts that share beginnings: from a trace with prefix ids, or drawn as chats over system prompts."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32

from experiments.workloads import Workload, stream
from paxkv.sizes import require_int


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts in order of arrival, as ids of pieces of `unit` tokens.

    Token p of a prompt is `ids[p // unit] * unit + p % unit`: tokens are equal exactly where ids are, and a trace of
    long prompts stays a few megabytes.

    Attributes:
      ids: piece ids from 0, one row a prompt; 0 after a prompt's last piece.
      unit: tokens of a piece; the last one of a prompt may be cut short.
      lengths: tokens of each prompt.
      priorities: of each prompt; blocks of a lower one are evicted first by `eviction: priority`.
    """

    ids: Int32[np.ndarray, "prompts pieces"]
    unit: int
    lengths: Int32[np.ndarray, " prompts"]
    priorities: Int32[np.ndarray, " prompts"]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """The tokens of one prompt after another."""
        for ids, length in zip(self.ids, self.lengths.tolist(), strict=True):
            position = np.arange(length, dtype=np.int32)
            yield ids[position // self.unit] * np.int32(self.unit) + position % np.int32(self.unit)


@dataclasses.dataclass(frozen=True)
class SyntheticPrompts:
    """Conversations that each open with one of a few system prompts; every turn repeats all that was said before.

    Attributes:
      conversations: how many there are.
      turns: prompts of each conversation.
      open_conversations: conversations in progress at a time; the next prompt is that of a random one among them.
      system_prompts: how many system prompts there are. The first one has the highest priority, the last one 1.
      system_tokens: tokens of each.
      popularity: system prompt k opens a conversation with weight `k ** -popularity`, k from 1; 0 makes all alike.
      question_tokens: shortest and longest question of a turn, drawn uniformly.
      answer_tokens: the same of an answer, which belongs to the prompts of the turns after it.
    """

    conversations: int
    turns: int = 1
    open_conversations: int = 1
    system_prompts: int = 1
    system_tokens: int = 0
    popularity: float = 0.0
    question_tokens: tuple[int, int] = (1, 1)
    answer_tokens: tuple[int, int] = (0, 0)

    def check(self) -> None:
        """Refuses what describes no prompts.

        Raises:
          ValueError: naming the field, what was expected and what came.
        """
        for name in ("conversations", "turns", "open_conversations", "system_prompts"):
            require_int(f"synthetic.{name}", getattr(self, name))
        require_int("synthetic.system_tokens", self.system_tokens, minimum=0)
        if not 0 <= self.popularity < float("inf"):
            raise ValueError(f"synthetic.popularity must be a finite exponent, 0 or more, got {self.popularity}")
        for name, least in (("question_tokens", 1), ("answer_tokens", 0)):
            shortest, longest = getattr(self, name)
            if not least <= shortest <= longest:
                raise ValueError(
                    f"synthetic.{name} must be a shortest and a longest length with {least} <= shortest <= longest, "
                    f"got {shortest} and {longest}"
                )


def trace_prompts(workload: Workload, whole_pieces: bool = False) -> Prompts:
    """The prompts of a trace that says where they share beginnings. It gives no priorities: all are 0.

    Args:
      workload: requests with hash ids.
      whole_pieces: take each hash id, that of a partly filled last piece too, for one token. This is how published
        hit rates of such traces are counted.

    Raises:
      ValueError: the workload has no hash ids, or tokens would not fit int32.
    """
    if workload.hash_ids is None:
        raise ValueError(
            f"trace: expected one that says which prompts share a beginning (kind: mooncake), got "
            f"{workload.provenance.source}"
        )
    unit = 1 if whole_pieces else workload.hash_block_size
    pieces = np.array([len(ids) for ids in workload.hash_ids])
    known, dense = np.unique(np.concatenate(workload.hash_ids), return_inverse=True)
    if len(known) * unit > 2**31:
        raise ValueError(f"trace: expected at most 2**31 different tokens, got {len(known)} pieces of {unit}")
    ids = np.zeros((len(pieces), pieces.max()), np.int32)
    ids[np.arange(pieces.max()) < pieces[:, None]] = dense
    lengths = pieces.astype(np.int32) if whole_pieces else workload.prompt_len
    return Prompts(ids, unit, lengths, np.zeros(len(lengths), np.int32))


def synthetic_prompts(config: SyntheticPrompts, seed: int) -> Prompts:
    """Draws conversations. No token occurs twice but where a prompt repeats what was said before."""
    config.check()
    rng = stream(seed, "lengths")
    last_token = 0

    def said(tokens: int) -> list[int]:
        nonlocal last_token
        last_token += tokens
        return list(range(last_token - tokens, last_token))

    systems = [said(config.system_tokens) for _ in range(config.system_prompts)]
    weights = np.arange(1, config.system_prompts + 1, dtype=float) ** -config.popularity
    chosen = rng.choice(config.system_prompts, size=config.conversations, p=weights / weights.sum())
    waiting = list(range(config.conversations))[::-1]
    spoken = {c: list(systems[chosen[c]]) for c in range(config.conversations)}
    turns_left = dict.fromkeys(spoken, config.turns)
    in_progress: list[int] = []
    prompts: list[list[int]] = []
    priorities: list[int] = []
    while waiting or in_progress:
        while waiting and len(in_progress) < config.open_conversations:
            in_progress.append(waiting.pop())
        at = int(rng.integers(len(in_progress)))
        conversation = in_progress[at]
        spoken[conversation] += said(int(rng.integers(*config.question_tokens, endpoint=True)))
        prompts.append(list(spoken[conversation]))
        priorities.append(config.system_prompts - int(chosen[conversation]))
        spoken[conversation] += said(int(rng.integers(*config.answer_tokens, endpoint=True)))
        turns_left[conversation] -= 1
        if turns_left[conversation] == 0:
            in_progress.pop(at)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((len(prompts), lengths.max()), np.int32)
    ids[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(prompts)
    return Prompts(ids, 1, lengths, np.array(priorities, np.int32))
