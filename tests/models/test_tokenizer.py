"""Tokenizers against plain ones written here, and text that comes in pieces against text that comes at once."""

import itertools
import json
import os
import pathlib

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from models.formats import load_tokenizer
from models.formats.tokenizers import (
    CUTS,
    begin_with,
    byte_level_bpe,
    load_gguf_tokenizer,
    load_tokenizer_json,
    scored_bpe,
)
from models.tokenizer import Bytes, Pieces, TextStream

ROOT = pathlib.Path(__file__).parents[2]
STORIES = pathlib.Path(os.environ.get("PAXKV_WEIGHTS_DIR", ROOT / "../shared/weights")) / "stories260K"


def printable_bytes():
    """GPT-2's character for every byte: itself where it is printable Latin-1, else the next one from U+0100 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("1", "2"), ("Ã", "©")]
PIECES = ["<|end|>", *printable_bytes().values(), *("".join(pair) for pair in MERGES)]


def byte_level(words="smollm", bos=None):
    library = byte_level_bpe(PIECES, [" ".join(pair) for pair in MERGES], CUTS[words])
    library.add_special_tokens(["<|end|>"])
    if bos is not None:
        begin_with(library, PIECES[bos], bos)
    return Pieces(library, bos, (0,))


def by_score():
    return Pieces(scored_bpe(SCORED, SCORES, space="▁", unknown="<unk>"), None, (2,))


def write_gguf(path, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)](
            f"tokenizer.ggml.{name}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SCORED = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SCORED += ["▁a", "ab", "▁", "a", "b", "c", "▁ab", "bc", "abc"]
SCORES = [0.0] * 259 + [-1.0, -2.0, -9.0, -9.0, -9.0, -9.0, -3.0, -0.5, -4.0]


def merge_by_score(text, pieces, scores):
    """A text's ids: characters, else bytes, then the neighbours whose piece has the best score, the first of equals."""
    vocab = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    ids = []
    for character in text:
        ids += [vocab[character]] if character in vocab else [3 + byte for byte in character.encode()]
    while True:
        names = [pieces[a] + pieces[b] for a, b in itertools.pairwise(ids)]
        known = [(-scores[vocab[name]], i, vocab[name]) for i, name in enumerate(names) if name in vocab]
        if not known:
            return ids
        _, at, piece = min(known)
        ids[at : at + 2] = [piece]


def test_digits_are_split_and_merges_do_not_cross_words():
    tokenizer = byte_level()
    pieces = [PIECES[i] for i in tokenizer.encode("the the12 é")]
    assert pieces == ["t", "he", "Ġthe", "1", "2", "Ġ", "Ã©"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpt-2", ["12", "3", "4", "5", "Ġ", "Ġthe"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġ", "Ġthe"]),
        ("llama-bpe", ["12", "3", "4", "5", "Ġ", "Ġthe"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġ", "Ġthe"]),
    ],
)
def test_numbers_are_split_as_the_model_was_trained(words, expected):
    assert [PIECES[i] for i in byte_level(words).encode("12345  the")] == expected


def test_three_digits_are_the_most_that_llama_3_merges():
    pieces = [*printable_bytes().values(), "23", "34"]
    library = byte_level_bpe(pieces, ["2 3", "3 4"], CUTS["llama-bpe"])
    assert [pieces[i] for i in Pieces(library, None, ()).encode("1234")] == ["1", "23", "4"]
    assert [pieces[i] for i in Pieces(library, None, ()).encode("12 34")] == ["1", "2", "Ġ", "34"]


@pytest.mark.parametrize(("whole_words", "expected"), [(True, ["abc"]), (False, ["a", "b", "c"])])
def test_a_word_that_is_a_piece_is_taken_whole_by_some(whole_words, expected):
    pieces = [*printable_bytes().values(), "abc"]
    library = byte_level_bpe(pieces, [], CUTS["gpt-2"], whole_words=whole_words)
    assert [pieces[i] for i in Pieces(library, None, ()).encode("abc")] == expected


@given(st.text())
@pytest.mark.parametrize("words", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@settings(max_examples=60)
def test_text_survives_byte_pairs(words, text):
    tokenizer = byte_level(words)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_text_survives_bytes(text):
    assert Bytes().decode(Bytes().encode(text)) == text
    assert Bytes().encode(text) == list(text.encode())


@given(st.text(alphabet="abc é👍\n", max_size=12))
def test_scores_decide_which_neighbours_are_merged(text):
    tokenizer = by_score()
    spaced = [piece.replace("▁", " ") for piece in SCORED]
    assert tokenizer.encode(text) == merge_by_score(f" {text}" if text else "", spaced, SCORES)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_begins_with_what_the_model_expects():
    assert byte_level(bos=0).encode("the") == [0, *byte_level().encode("the")]


def test_control_tokens_are_found_in_a_text_and_not_told():
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|end|>b")
    assert ids[1] == 0
    assert tokenizer.decode(ids) == "ab"


def test_a_control_token_does_not_make_the_next_word_the_first():
    library = scored_bpe(SCORED, SCORES, space="▁", unknown="<unk>")
    library.add_special_tokens(["</s>"])
    tokenizer = Pieces(library, None, (2,))
    stream = TextStream(tokenizer)
    ids = [*tokenizer.encode("abc"), 2, 2, *tokenizer.encode("ab")]
    assert "".join([*map(stream.feed, ids), stream.finish()]) == tokenizer.decode(ids) == "abc ab"


@pytest.mark.parametrize(
    "tokenizer",
    [
        Bytes(),
        byte_level(),
        by_score(),
    ],
    ids=["bytes", "byte_level", "pieces"],
)
@given(text=st.text(alphabet="ab é€👍🏽\n", max_size=12))
def test_text_in_pieces_is_the_text_and_never_half_a_character(tokenizer, text):
    stream, told = TextStream(tokenizer), []
    for token in tokenizer.encode(text):
        told.append(stream.feed(token))
    assert "\ufffd" not in "".join(told)
    assert "".join(told) == text
    assert stream.finish() == ""


def test_a_character_is_told_with_its_last_byte():
    stream = TextStream(Bytes())
    assert [stream.feed(byte) for byte in "é👍".encode()] == ["", "é", "", "", "", "👍"]


@given(st.lists(st.integers(0, 255), max_size=12))
@pytest.mark.parametrize("tokenizer", [Bytes(), byte_level()], ids=["bytes", "byte_level"])
def test_bytes_that_are_no_text_are_told_in_the_end(tokenizer, ids):
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.feed, ids), stream.finish()]) == tokenizer.decode(ids)


def test_a_gguf_file_of_merges_carries_its_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    kinds = [3] + [1] * (len(PIECES) - 1)
    merges = [" ".join(pair) for pair in MERGES]
    fields = {"model": "gpt2", "pre": "smollm", "tokens": PIECES, "token_type": kinds, "merges": merges}
    write_gguf(path, **fields, bos_token_id=0, eos_token_id=0, eot_token_id=5, add_bos_token=False)
    tokenizer = load_gguf_tokenizer(path)
    text = "the the12 é<|end|>"
    assert tokenizer.encode(text) == byte_level().encode(text)
    assert (tokenizer.bos, tokenizer.eos) == (None, (0, 5))
    write_gguf(path, **fields, bos_token_id=0, add_bos_token=True)
    assert (load_gguf_tokenizer(path).bos, load_gguf_tokenizer(path).eos) == (0, ())


def test_a_gguf_file_of_scores_carries_its_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, model="llama", tokens=SCORED, scores=SCORES, bos_token_id=1, eos_token_id=2)
    tokenizer = load_gguf_tokenizer(path)
    spaced = [piece.replace("▁", " ") for piece in SCORED]
    assert tokenizer.encode("abc") == [1, *merge_by_score(" abc", spaced, SCORES)]
    assert (tokenizer.bos, tokenizer.eos) == (1, (2,))


def test_a_folder_of_hugging_faces_says_what_begins_and_ends_a_text(tmp_path):
    byte_level(bos=0).library.save(str(tmp_path / "tokenizer.json"))
    # A config names a first token even where models are given none: only the tokenizer itself is believed.
    config = {"bos_token_id": 7, "eos_token_id": 3}
    tokenizer = load_tokenizer_json(tmp_path, config)
    assert (tokenizer.bos, tokenizer.eos) == (0, (3,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert load_tokenizer_json(tmp_path, config).eos == (4, 5)
    # The library itself reads the same file.
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("the é12") == library.encode("the é12").ids
    byte_level().library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer_json(tmp_path, config).bos is None


@pytest.mark.parametrize("words", ["smollm", "llama-bpe"])
def test_a_written_tokenizer_is_the_same(tmp_path, words):
    written = byte_level(words, bos=0)
    (tmp_path / "tokenizer.json").write_text(written.to_json())
    read = load_tokenizer_json(tmp_path, {})
    text = "the 12345 é <|end|>"
    assert (read.bos, read.encode(text)) == (0, written.encode(text))
    assert read.decode(read.encode(text)) == "the 12345 é "


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no weights at {STORIES}; set PAXKV_WEIGHTS_DIR")
def test_the_trained_storyteller_reads_as_its_table_says():
    table = json.loads((STORIES / "hf" / "tokenizer_llama2c.json").read_text())
    pieces, scores = zip(*table["pieces"], strict=True)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. é👍"
    for place in ("hf", "stories260K.bin"):
        tokenizer = load_tokenizer(STORIES / place)
        assert tokenizer.encode(text) == [1, *merge_by_score(" " + text, pieces, scores)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
