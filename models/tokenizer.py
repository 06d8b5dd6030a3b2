"""Text to token ids and back, and a stream of ids to a stream of whole characters."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"  # what stands for bytes that are no character, or not yet


@typing.runtime_checkable
class Tokenizer(Protocol):
    """What a model reads and writes."""

    @property
    def vocab(self) -> int:
        """Distinct ids."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins every text; None if there is none, or none is wanted."""
        ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, `bos` first if there is one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without those that only mark; U+FFFD for bytes that are no characters."""
        ...

    def to_json(self) -> str | None:
        """What `tokenizer.json` is to hold; None for a tokenizer that needs none."""
        ...


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Every byte of UTF-8 is its own id."""

    vocab: int = 256
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(ids).decode(errors="replace")

    def to_json(self) -> str | None:
        """See `Tokenizer`."""
        return None


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A tokenizer of the `tokenizers` library, with the ids that a model's config gives a meaning to."""

    library: tokenizers.Tokenizer
    bos: int | None
    eos: tuple[int, ...]

    @property
    def vocab(self) -> int:
        """See `Tokenizer`."""
        return self.library.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return [*(() if self.bos is None else (self.bos,)), *self.library.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self.library.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str | None:
        """See `Tokenizer`."""
        return self.library.to_str(pretty=True)


class TextStream:
    """Turns ids, as they come, into text, and holds back what may be half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What was told last: a piece may look otherwise at the beginning of a text than behind another.
        self._told: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before; often one word, sometimes nothing."""
        self._held.append(token)
        text = self._text()
        if text.endswith(_REPLACEMENT):
            return ""
        if text:  # behind one that only marks, the next would look as at the beginning
            self._told, self._held = self._held, []
        return text

    def finish(self) -> str:
        """What is left, where no more ids come."""
        text = self._text()
        self._told, self._held = [], []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._told)
        return self._tokenizer.decode([*self._told, *self._held])[len(before) :]
