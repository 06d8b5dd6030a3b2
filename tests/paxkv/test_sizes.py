from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.sizes import parse_fraction, parse_size, require_int

quick = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no failure


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("120 GB", 120_000_000_000),
        ("54 GiB", 57_982_058_496),
        ("54GiB", 57_982_058_496),
        (" 2 MiB ", 2_097_152),
        ("64 KiB", 65_536),
        ("64 kB", 64_000),
        ("1 MB", 1_000_000),
        ("1 TB", 1_000_000_000_000),
        ("1 TiB", 1_099_511_627_776),
        ("7.5 MiB", 7_864_320),
        ("0.1 kB", 100),
        ("17 B", 17),
        ("0 B", 0),
        ("4096", 4096),
        (4096, 4096),
        (0, 0),
    ],
)
def test_size_is_read_exactly(text, num_bytes):
    assert parse_size(text) == num_bytes
    assert type(parse_size(text)) is int


@quick
@given(st.integers(0, 2**80))
def test_decimal_and_binary_units_differ(count):
    assert parse_size(f"{count} GB") == count * 10**9
    assert parse_size(f"{count} GiB") == count * 2**30


def test_decimals_do_not_pass_through_floats():
    assert parse_size("9007199254740993 GiB") == 9007199254740993 * 2**30  # 2**53 + 1
    assert parse_size("0.000000001 GB") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("54 G", "write GB for 1,000,000,000 bytes, GiB for 1,073,741,824"),
        ("54 gb", "write GB for 1,000,000,000 bytes, GiB for 1,073,741,824"),
        ("54 Gb", "write GB"),
        ("54 gib", "write GB"),
        ("64 KB", "write kB for 1,000 bytes, KiB for 1,024"),
        ("64 k", "write kB"),
        ("2 m", "write MB for 1,000,000 bytes, MiB for 1,048,576"),
        ("1 t", "write TB"),
        ("1 parsec", "a bare number is bytes"),
        ("GiB", "a number and a unit"),
        ("", "a number and a unit"),
        ("-1 GiB", "a number and a unit"),
        ("1e9 B", "a number and a unit"),
        ("1,000 B", "a number and a unit"),
        ("1 GiB 2", "a number and a unit"),
        ("\u0663 GiB", "a number and a unit"),  # an Arabic three
        ("0.5 B", "a whole number of bytes"),
        ("0.3 KiB", "a whole number of bytes"),
        ("1.5", "a whole number of bytes"),
    ],
)
def test_doubtful_size_is_refused_by_name(text, said):
    with pytest.raises(ValueError, match=r"^pool must ") as error:
        parse_size(text, "pool")
    assert said in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("number", [True, -1])
def test_number_of_bytes_must_be_a_count(number):
    with pytest.raises(ValueError, match=r"^pool must be"):
        parse_size(number, "pool")


@pytest.mark.parametrize(
    ("given_as", "exact"),
    [
        ("0.9", Fraction(9, 10)),
        ("0.92", Fraction(23, 25)),
        ("1", Fraction(1)),
        ("1/3", Fraction(1, 3)),
        (Fraction(2, 3), Fraction(2, 3)),
        (1, Fraction(1)),
    ],
)
def test_fraction_is_what_its_decimal_says(given_as, exact):
    assert parse_fraction(given_as) == exact


@pytest.mark.parametrize(
    "wrong", ["0", "1.0001", "-0.5", "90 %", "", "nan", "1/0", Fraction(0), Fraction(3, 2), 2, True]
)
def test_fraction_outside_of_0_to_1_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^memory_fraction must be") as error:
        parse_fraction(wrong, "memory_fraction")
    assert "'0.9'" in str(error.value)


@pytest.mark.parametrize("wrong", [1.0, True, False, "1", None, np.int32(1), np.float64(1), Fraction(1)])
def test_only_python_ints_count(wrong):
    with pytest.raises(ValueError, match=r"^rows must be an int, got .* of type .*; pass a Python int"):
        require_int("rows", wrong)


def test_int_below_its_minimum_is_refused():
    assert require_int("rows", 1) == 1
    assert require_int("rows", 0, minimum=0) == 0
    assert require_int("rows", 2**200) == 2**200
    with pytest.raises(ValueError, match=r"^rows must be at least 1, got 0"):
        require_int("rows", 0)
    with pytest.raises(ValueError, match=r"^rows must be at least 0, got -1"):
        require_int("rows", -1, minimum=0)
