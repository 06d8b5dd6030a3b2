import polars as pl
import pytest

from experiments.token_check import compare_tokens

NEAR_TIE = 1e-4


def table(*requests):
    tokens, margins = zip(*requests, strict=True)
    return pl.DataFrame(
        {"tokens": tokens, "margins": margins}, schema={"tokens": pl.List(pl.Int32), "margins": pl.List(pl.Float32)}
    )


def check(a, b):
    return tuple(compare_tokens(table(*a), table(*b), NEAR_TIE))


def test_equal_tokens_are_equal_whatever_the_margins():
    assert check([([1, 2], [0, 0]), ([], [])], [([1, 2], [1, 2]), ([], [])]) == (0, 0)


def test_a_first_difference_between_logits_that_are_all_but_equal_is_accepted_and_counted():
    assert check([([1, 2, 3, 4], [1, 5e-5, 1, 1])], [([1, 7, 8, 9], [1, 9e-5, 1, 1])]) == (1, 0)
    assert check([([1, 2, 3], [1, 5e-5, 1])], [([1, 7], [1, 9e-5])]) == (1, 0)  # what comes after says nothing


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (([1, 2], [1, 5e-5]), ([1, 3], [1, 2e-4])),  # near in one run only
        (([1, 2], [1, 2e-4]), ([1, 3], [1, 5e-5])),
        (([1, 2, 4], [1, 1, 5e-5]), ([1, 3, 5], [1, 1, 5e-5])),  # near where it is too late
        (([1, 2], [5e-5, 1]), ([1, 3], [5e-5, 1])),  # or too early
        (([1, 2], [1, 5e-5]), ([1, 3], [1, float("nan")])),
        (([1, 2], [1, float("nan")]), ([1, 3], [1, 5e-5])),
        (([1, 2], [0, 0]), ([1, 2, 3], [0, 0, 0])),  # one stopped, the other went on
        (([], []), ([1], [0])),
    ],
)
def test_any_other_difference_is_unexplained(a, b):
    assert check([a], [b]) == (0, 1)
    same = ([1], [1])
    assert check([same, a, same], [same, b, same]) == (0, 1)


def test_another_number_of_requests_is_refused():
    with pytest.raises(ValueError, match="zip"):
        check([([1], [1])], [([1], [1]), ([1], [1])])
