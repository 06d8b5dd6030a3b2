"""Prompt tokens: random pieces of a text or uniform ids, shared between prompts exactly where the trace says so."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from experiments.workloads.streams import stream
from experiments.workloads.workload import Workload


def prompt_tokens(workload: Workload, seed: int, source: bytes | int) -> Int32[np.ndarray, "requests max_prompt"]:
    """The prompts of a workload.

    Without hash ids, each prompt is a piece of its own: request i's tokens depend on (seed, source, i) alone, so a
    longer prompt continues a shorter one, and other requests do not matter. With hash ids the pieces belong to
    the ids: a block's tokens depend on (seed, source, its id) alone, so prompts share tokens where they share ids.

    Args:
        workload: The requests.
        seed: Seed of the experiment; only its `tokens` stream is used.
        source: A text, whose bytes are the tokens, or the size of a vocabulary to draw ids from uniformly. Pieces
            of a text are windows that start at distinct places for ids below the text's length, and that
            go on from its beginning where they pass its end.

    Returns:
        Token ids; row i holds `prompt_len[i]` of them, and 0 after those.

    Raises:
        ValueError: If the text is shorter than a piece, or the vocabulary is empty.
    """
    prompt_len = workload.prompt_len
    if workload.hash_ids is None:
        # One piece per request, as long as its prompt.
        piece_len, pieces = int(prompt_len.max()), [[i] for i in range(workload.num_requests)]
    else:
        piece_len, pieces = workload.hash_block_size, [ids.tolist() for ids in workload.hash_ids]
    draw = _vocabulary_pieces(source, seed) if isinstance(source, int) else _text_windows(source, seed, piece_len)
    tokens = np.zeros((workload.num_requests, int(prompt_len.max())), np.int32)
    for row, (length, ids) in enumerate(zip(prompt_len.tolist(), pieces, strict=True)):
        for start, piece_id in zip(range(0, length, piece_len), ids, strict=True):
            count = min(piece_len, length - start)
            tokens[row, start : start + count] = draw(piece_id, count)
    return tokens


def _text_windows(text: bytes, seed: int, longest: int) -> Callable[[int, int], np.ndarray]:
    size = len(text)
    if size < longest:
        raise ValueError(f"source must hold at least one piece of {longest} tokens, got a text of {size} bytes")
    rng = stream(seed, "tokens")
    # Multiplying by a number coprime to the size permutes the starts, so distinct ids never share a window by chance.
    step, offset = (int(x) for x in rng.integers(size, size=2))
    while math.gcd(step, size) != 1:
        step += 1
    ring = np.frombuffer(text + text[:longest], np.uint8)

    def window(piece_id: int, count: int) -> np.ndarray:
        start = (piece_id * step + offset) % size
        return ring[start : start + count]

    return window


def _vocabulary_pieces(vocabulary: int, seed: int) -> Callable[[int, int], np.ndarray]:
    if vocabulary < 1:
        raise ValueError(f"source must be a vocabulary of at least 1 token, got {vocabulary}")
    return lambda piece_id, count: stream(seed, "tokens", piece_id).integers(vocabulary, size=count)
