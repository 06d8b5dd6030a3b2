"""Texts of quality: two kinds, known by their hashes, in windows that do not overlap, apart from calibration."""

import pathlib

import numpy as np
import pytest

from experiments.quality_texts import TextConfig, cut, encode_text, load_text, token_sha256
from models.text import load_corpus


def _bytes(text):
    return list(text.encode())


@pytest.fixture(scope="module")
def texts():
    return {kind: load_text(kind, TextConfig(kind)) for kind in ("prose", "code")}


def test_both_kinds_fill_windows_and_differ_in_kind(texts):
    for text in texts.values():
        assert min(len(text.evaluated), len(text.calibration)) > 30_000
    assert "def __init__(self" in texts["code"].evaluated
    assert texts["prose"].evaluated.encode() == load_corpus().heldout.tobytes()
    assert texts["prose"].sha256 != texts["code"].sha256


def test_no_line_of_calibration_prose_and_no_module_is_evaluated(texts):
    code = texts["code"]
    assert code.evaluated not in code.calibration
    long = {line for line in code.evaluated.splitlines() if len(line) > 60}
    assert len(long & set(code.calibration.splitlines())) < 0.02 * len(long)
    paragraphs = set(texts["prose"].calibration.split("\n\n"))
    assert not paragraphs & set(texts["prose"].evaluated.split("\n\n"))


def test_a_text_that_is_not_the_one_named_is_refused(texts):
    same = load_text("prose", TextConfig("prose", sha256=texts["prose"].sha256))
    assert same == texts["prose"]
    with pytest.raises(ValueError, match=r"texts\.a\.sha256: expected the text 00, got"):
        load_text("a", TextConfig("prose", sha256="00"))


def test_a_file_gives_its_beginning_to_calibration(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0123456789" * 10, encoding="utf-8")
    text = load_text("own", TextConfig("file", path))
    assert (text.calibration, text.evaluated) == ("0123456789", "0123456789" * 9)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"texts\.own\.path: expected a file in UTF-8"):
        load_text("own", TextConfig("file", path))


@pytest.mark.parametrize("config", [TextConfig("file"), TextConfig("prose", path=pathlib.Path("x"))])
def test_a_path_belongs_to_a_file(config):
    with pytest.raises(ValueError, match=r"texts\.t\.path: expected a path with kind `file`"):
        load_text("t", config)


def test_windows_cover_a_text_from_end_to_end_and_predict_no_token_twice():
    tokens = np.arange(100, dtype=np.int32)
    windows = cut(tokens, 3, 20, "t")
    assert windows[:, 0].tolist() == [0, 39, 79]
    assert windows[-1, -1] == 99
    predicted = windows[:, 1:].ravel()
    assert len(set(predicted.tolist())) == predicted.size
    tight = cut(tokens[:61], 3, 20, "t")
    assert sorted(tight[:, 1:].ravel().tolist()) == list(range(1, 61))
    with pytest.raises(ValueError, match=r"texts\.t: expected at least 81 tokens for 4 windows of context 20, got 61"):
        cut(tokens[:61], 4, 20, "t")


def test_encoding_takes_as_much_of_the_beginning_as_is_asked_for():
    assert encode_text(_bytes, "abcdef").tolist() == [97, 98, 99, 100, 101, 102]
    assert encode_text(_bytes, "abcdef" * 10, 3).tolist() == [97, 98, 99]


def test_the_hash_of_tokens_is_that_of_their_values():
    a = np.array([[1, 2], [3, 4]], np.int32)
    assert token_sha256(a) == token_sha256(a.T.copy().T)
    assert token_sha256(a) != token_sha256(a + 1)
