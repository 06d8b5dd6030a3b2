"""Sizes and fractions as exact numbers: bytes from text that says its unit, fractions from decimals.

A float is refused wherever either is expected: 0.9 as a float is 0.90000000000000002, and a block more
or less is then a matter of luck.
"""

import re
from fractions import Fraction

_UNIT_BYTES = {"": 1, "B": 1}
_UNIT_BYTES |= {unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)}
_UNIT_BYTES |= {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def require_int(name: str, value: object, minimum: int = 1) -> int:
    """`value` as it came, if it is an int of at least `minimum`.

    Args:
        name: what the error calls it.
        value: anything; a bool is no number here, and a NumPy integer is refused because it can overflow.
        minimum: smallest allowed value.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int:
        raise ValueError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}; "
            f"pass a Python int (int(x) if it is a whole number of another type)"
        )
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}; give a larger {name}")
    return value


def require_bool(name: str, value: object) -> bool:
    """`value` as it came, if it is True or False: the text "no" would count as true.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return value


def parse_size(size: str | int, name: str = "size") -> int:
    """Bytes of a size such as `"120 GB"` (1e9 each), `"54 GiB"` (2**30 each) or `4096` (bytes).

    Units are B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), spelled exactly so.
    "G", "gb" or "KB" mean 1000 to some and 1024 to others, and "Gb" means bits: none of them is guessed at.

    Args:
        size: text, or a number of bytes.
        name: what an error calls it.

    Raises:
        ValueError: not a size, an unknown unit, a negative size, or no whole number of bytes.
    """
    if not isinstance(size, str):
        return require_int(name, size, minimum=0)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{name} must be a number and a unit, got {size!r}; write '54 GiB' or '120 GB'")
    number, unit = match.groups()
    if unit not in _UNIT_BYTES:
        raise ValueError(f"{name} must end in one of {_known_units()}, got {size!r}; {_unit_advice(unit)}")
    num_bytes = Fraction(number) * _UNIT_BYTES[unit]
    if num_bytes.denominator != 1:
        raise ValueError(f"{name} must be a whole number of bytes, got {size!r}; write it in a smaller unit")
    return num_bytes.numerator


def parse_fraction(fraction: str | int | Fraction, name: str = "fraction") -> Fraction:
    """A fraction above 0 and up to 1 as the exact rational that its decimal says: `"0.9"` is 9/10.

    Args:
        fraction: decimal text, a `Fraction`, or 1.
        name: what an error calls it.

    Raises:
        ValueError: no number, a float, or outside of (0, 1].
    """
    if isinstance(fraction, bool) or not isinstance(fraction, str | int | Fraction):
        raise ValueError(f"{name} must be decimal text or a Fraction, got {fraction!r}; write it like '0.9'")
    try:
        exact = Fraction(fraction)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{name} must be a decimal number, got {fraction!r}; write it like '0.9'") from None
    if not 0 < exact <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {fraction}; 90 % is '0.9'")
    return exact


def _known_units() -> str:
    return ", ".join(unit for unit in _UNIT_BYTES if unit)


def _unit_advice(unit: str) -> str:
    for binary in ("KiB", "MiB", "GiB", "TiB"):
        if unit.lower() in (binary[0].lower(), binary[0].lower() + "b", binary.lower()):
            decimal = "kB" if binary == "KiB" else f"{binary[0]}B"
            return f"write {decimal} for {_UNIT_BYTES[decimal]:,} bytes, {binary} for {_UNIT_BYTES[binary]:,}"
    return "a bare number is bytes"
