"""The text that every CPython carries, split and encoded, and what a byte trigram model makes of it.

`pydoc_data.topics` is the language reference as `help()` shows it: about 0.5 MB of English, code and grammar, no
download, and under Python's own licence. Its wording changes between Python versions, so a result names the
version and the text's hash.
"""

import dataclasses
import hashlib
import json
from pydoc_data.topics import topics

import numpy as np
from jaxtyping import UInt8

VOCAB = 256  # bytes; there is no stop token

Bytes = UInt8[np.ndarray, " bytes"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes."""

    train: UInt8[np.ndarray, " train_bytes"]
    heldout: UInt8[np.ndarray, " heldout_bytes"]
    sha256: str  # of every topic's name and text, before the split


def load_corpus() -> Corpus:
    """The corpus of the running Python.

    One topic in ten, by a hash of its name, is held out: which ones does not depend on the Python version. Topics
    quote one another, so a paragraph is kept where it first occurs, held-out topics first: none occurs twice,
    and none of the held-out ones is trained on.
    """
    seen: set[str] = set()
    names = sorted(topics)
    heldout = _encode([n for n in names if is_heldout(n)], seen)
    train = _encode([n for n in names if not is_heldout(n)], seen)
    digest = hashlib.sha256(json.dumps(topics, sort_keys=True).encode()).hexdigest()
    return Corpus(train=train, heldout=heldout, sha256=digest)


def is_heldout(topic: str) -> bool:
    """Whether a topic is kept for evaluation."""
    return int(hashlib.sha256(topic.encode()).hexdigest(), 16) % 10 == 0


def _encode(names: list[str], seen: set[str]) -> Bytes:
    kept = []
    for name in names:
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                kept.append(paragraph.strip("\n"))
    return np.frombuffer("\n\n".join(kept).encode(), np.uint8)
