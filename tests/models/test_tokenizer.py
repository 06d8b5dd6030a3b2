from models.tokenizer import Bytes, TextStream

TEXT = "a\u00e9\u65e5\U0001f600!"


def test_bytes_are_their_own_ids():
    assert Bytes().encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert Bytes().decode([97, 0xC3, 0xA9, 0xFF]) == "a\u00e9\ufffd"


def test_a_stream_never_tells_half_a_character():
    stream = TextStream(Bytes())
    told = [stream.feed(token) for token in Bytes().encode(TEXT)]
    assert told == ["a", "", "\u00e9", "", "", "\u65e5", "", "", "", "\U0001f600", "!"]
    assert stream.finish() == ""


def test_what_is_left_of_a_character_is_told_at_the_end():
    stream = TextStream(Bytes())
    assert [stream.feed(token) for token in (98, 0xE6, 0x97)] == ["b", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_no_character_do_not_swallow_those_behind():
    stream = TextStream(Bytes())
    assert "".join(map(stream.feed, b"\xff\xff\xc3\xa9x")) == "\ufffd\ufffd\u00e9x"
