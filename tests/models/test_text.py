import hashlib
import json
from pydoc_data.topics import topics

import numpy as np

from models.text import is_heldout, load_corpus


def paragraphs(text):
    return [" ".join(p.split()) for p in bytes(text).decode().split("\n\n")]


def test_the_corpus_is_the_same_every_time():
    first, second = load_corpus(), load_corpus()
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.heldout, second.heldout)
    assert first.sha256 == second.sha256 == hashlib.sha256(json.dumps(topics, sort_keys=True).encode()).hexdigest()


def test_the_held_out_topics_do_not_depend_on_the_python_version():
    expected = "dict floating id-classes raise return sequence-types slicings specialattrs string-methods typesmodules"
    assert sorted(filter(is_heldout, topics)) == expected.split()


def test_about_a_tenth_of_the_text_is_held_out():
    corpus = load_corpus()
    assert 0.08 < corpus.heldout.size / (corpus.train.size + corpus.heldout.size) < 0.15


def test_no_paragraph_is_on_both_sides_or_twice_on_one():
    corpus = load_corpus()
    train, heldout = paragraphs(corpus.train), paragraphs(corpus.heldout)
    assert not set(train) & set(heldout)
    assert len(set(train)) == len(train)
    assert len(set(heldout)) == len(heldout)


def test_no_paragraph_is_lost_and_topics_follow_by_name():
    corpus = load_corpus()

    def first_occurrences(names):
        every = [" ".join(p.split()) for name in sorted(names) for p in topics[name].split("\n\n")]
        return [p for p in dict.fromkeys(every) if p]

    held = first_occurrences(name for name in topics if is_heldout(name))
    others = first_occurrences(name for name in topics if not is_heldout(name))
    assert paragraphs(corpus.heldout) == held
    assert paragraphs(corpus.train) == [p for p in others if p not in held]
