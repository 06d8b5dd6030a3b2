"""Tokenizers as model files hold them, built into one form: that of the `tokenizers` library."""

import json
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from models.formats.gguf import metadata, open_gguf
from models.json_file import read_json
from models.tokenizer import Pieces

TOKENIZER = "tokenizer.json"

# Files of a folder that say which ids end a text, in words of config.json, the first to be asked first.
GENERATION = "generation_config.json"
IDS = "tokenizer_config.json"


def _cut_words(max_digits: int) -> Sequence[pre_tokenizers.PreTokenizer]:
    """As Llama 3 and Qwen do: contractions, letters with what stands before, few digits, marks, and kinds of space."""
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            rf"\p{{N}}{{1,{max_digits}}}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return (split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


# How a text is cut before its pieces are merged, by the name that GGUF has for it.
CUTS: Mapping[str, Sequence[pre_tokenizers.PreTokenizer]] = {
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "default": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "llama-bpe": _cut_words(max_digits=3),
    "qwen2": _cut_words(max_digits=1),
}
_WHOLE_WORDS = "llama-bpe"  # where a word that is a piece is taken as it is, even if no merges lead there
_CONTROL = 3  # GGUF's type of tokens that only mark


def load_tokenizer_json(path: str | os.PathLike[str], config: Mapping[str, Any]) -> Pieces:
    """`tokenizer.json` of a folder.

    What it puts before a text is `bos`; `config.json` may name a token that models are not given. What ends a text is
    said by the files beside it: one id or several.

    Args:
      path: of the folder.
      config: its `config.json`.

    Raises:
      ValueError: The file is not one that the `tokenizers` library reads, or a file beside it is broken.
    """
    file = pathlib.Path(path) / TOKENIZER
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file}: expected a tokenizer of the tokenizers library: {error}") from error
    before = library.encode("").ids
    beside = [file.with_name(name) for name in (GENERATION, IDS)]
    said = [read_json(other) for other in beside if other.is_file()]
    found = (words["eos_token_id"] for words in (*said, config) if words.get("eos_token_id") is not None)
    eos = next(found, [])
    ids = eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{path}: eos_token_id: expected an id or a list of ids, got {eos!r}")
    return Pieces(library, before[0] if before else None, tuple(ids))


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Pieces:
    """The tokenizer inside a GGUF file: byte-level BPE (`gpt2`) or sentencepiece's BPE (`llama`).

    Raises:
      ValueError: There is none, or it is of another kind.
    """
    words = metadata(open_gguf(path))
    kind, pieces = words.get("tokenizer.ggml.model"), words.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not pieces:
        raise ValueError(f"{path}: tokenizer.ggml.model: expected gpt2 or llama, and its tokens, got {kind!r}")
    types = words.get("tokenizer.ggml.token_type", [])
    control = [piece for piece, token_type in zip(pieces, types, strict=False) if token_type == _CONTROL]
    if kind == "gpt2":
        cut = words.get("tokenizer.ggml.pre", "default")
        if cut not in CUTS:
            raise ValueError(f"{path}: tokenizer.ggml.pre: expected one of {', '.join(CUTS)}, got {cut!r}")
        merges = words.get("tokenizer.ggml.merges", [])
        library = byte_level_bpe(pieces, merges, CUTS[cut], whole_words=cut == _WHOLE_WORDS)
    else:
        unknown = pieces[words.get("tokenizer.ggml.unknown_token_id", 0)]
        library = scored_bpe(pieces, words.get("tokenizer.ggml.scores", []), space="\u2581", unknown=unknown)
    library.add_special_tokens([AddedToken(piece, special=True) for piece in control])
    wants_bos = words.get("tokenizer.ggml.add_bos_token", kind == "llama")
    bos = words.get("tokenizer.ggml.bos_token_id") if wants_bos else None
    if bos is not None:
        begin_with(library, pieces[bos], bos)
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")  # of a text, and of a turn of a talk
    return Pieces(library, bos, tuple(dict.fromkeys(words[end] for end in ends if end in words)))


def begin_with(library: tokenizers.Tokenizer, piece: str, token: int) -> None:
    """Has a piece before every text, where whoever encodes wants special tokens."""
    library.post_processor = processors.TemplateProcessing(
        single=[piece, "$A"], pair=[piece, "$A", piece, "$B"], special_tokens=[(piece, token)]
    )


def load_llama2c_tokenizer(path: str | os.PathLike[str], vocab: int) -> Pieces:
    """The tokenizer file of a llama2.c model: the longest piece, then for each piece its score, length and bytes.

    Raises:
      ValueError: The file does not hold `vocab` pieces.
    """
    data, at = pathlib.Path(path).read_bytes(), 4
    pieces: list[str] = []
    scores: list[float] = []
    try:
        for _ in range(vocab):
            score, length = struct.unpack_from("<fi", data, at)
            at += 8 + length
            if length < 0 or at > len(data):
                raise ValueError(f"piece {len(pieces)} has {length} bytes")
            scores.append(score)
            pieces.append(data[at - length : at].decode())
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes more than {vocab} pieces")
        return _llama2c(pieces, scores, bos=1, eos=2)
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path}: expected {vocab} pieces of a llama2.c tokenizer, got: {error}") from error


def load_llama2c_json(path: str | os.PathLike[str]) -> Pieces:
    """The same tokenizer written as JSON: `pieces` with their scores, `bos` and `eos`.

    Raises:
      ValueError: It is not that.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text())
        pieces, scores = zip(*found["pieces"], strict=True)
        return _llama2c(pieces, scores, bos=found["bos"], eos=found["eos"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected pieces, bos and eos of a llama2.c tokenizer, got: {error!r}") from error


def byte_level_bpe(
    pieces: Sequence[str],
    merges: Sequence[str],
    cuts: Sequence[pre_tokenizers.PreTokenizer],
    *,
    whole_words: bool = False,
) -> tokenizers.Tokenizer:
    """GPT-2's kind: a text is cut by `cuts`, the last of which makes bytes of it; then pairs merge in order of rank.

    With `whole_words`, a cut that is a piece is taken as it is.
    """
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    library.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    library.decoder = decoders.ByteLevel()
    return library


def scored_bpe(pieces: Sequence[str], scores: Sequence[float], *, space: str, unknown: str) -> tokenizers.Tokenizer:
    """Sentencepiece's kind: a space before the text; the pair that makes the piece of the best score merges first.

    Bytes without a piece of their own become the pieces `<0x00>` to `<0xFF>`.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    by_score = sorted(vocab, key=lambda piece: -scores[vocab[piece]])
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, unk_token=unknown))
    library.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(" ", space)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def _llama2c(pieces: Sequence[str], scores: Sequence[float], *, bos: int, eos: int) -> Pieces:
    for name, token in (("bos", bos), ("eos", eos)):
        if type(token) is not int or not 0 <= token < len(pieces):
            raise ValueError(f"{name}: expected an id below {len(pieces)}, got {token!r}")
    library = scored_bpe(pieces, scores, space=" ", unknown=pieces[0])
    library.add_special_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in (bos, eos)])
    begin_with(library, pieces[bos], bos)
    return Pieces(library, bos, (eos,))
