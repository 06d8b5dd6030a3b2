"""Published values are compared by their tolerance, and one that is compared with nothing is a mistake."""

import math

import pytest

from experiments import published
from experiments.published import Published

OURS = {"azure/paged": {"requests": 798, "waste": 0.5437, "note": "text"}, "azure/naive": {"requests": 61}}


def test_a_value_holds_within_its_tolerance_and_not_beyond():
    given = [
        Published("requests", {"azure/paged": 798, "azure/naive": 60}),
        Published("waste", {"azure/paged": 0.544}, tolerance=0.0005),
    ]
    found = published.compared(OURS, given)
    assert found["azure/paged"] == OURS["azure/paged"] | {
        "requests_published": 798, "requests_tolerance": 0, "requests_holds": True,
        "waste_published": 0.544, "waste_tolerance": 0.0005, "waste_holds": True,
    }  # fmt: skip
    assert published.failed_checks(found) == ["azure/naive: requests is 61, published 60, which may differ by 0"]
    assert published.headline(found) == "Published values: 3 compared, 1 differ"
    assert published.table(found).rows == [
        ["azure/paged", "requests", "798", "0", "798", "yes"],
        ["azure/paged", "waste", "0.544", "0.0005", "0.5437", "yes"],
        ["azure/naive", "requests", "60", "0", "61", "NO"],
    ]
    # One digit less of tolerance than it needs.
    (too_far,) = published.failed_checks(published.compared(OURS, [Published("waste", {"azure/paged": 0.544}, 0.0002)]))
    assert too_far == "azure/paged: waste is 0.5437, published 0.544, which may differ by 0.0002"
    assert OURS["azure/naive"] == {"requests": 61}  # as it was


def test_a_range_holds_from_end_to_end_and_says_both():
    given = [Published("requests", ranges={"azure/paged": (700, 798), "azure/naive": (62, 70)})]
    found = published.compared(OURS, given)
    assert published.failed_checks(found) == ["azure/naive: requests is 61, published 62 to 70, which may differ by 0"]
    assert published.table(found).rows[0] == ["azure/paged", "requests", "700 to 798", "0", "798", "yes"]
    found = published.compared(OURS, [Published("requests", ranges={"azure/paged": (799, math.inf)})])
    assert "published at least 799, which" in published.failed_checks(found)[0]
    below = published.compared(OURS, [Published("requests", ranges={"azure/paged": (-math.inf, 797)})])
    assert below["azure/paged"]["requests_published"] == "at most 797"
    assert below["azure/paged"]["requests_holds"] is False


def test_what_is_known_to_deviate_must():
    known = [Published("requests", {"azure/naive": 60}, deviates="one more fits")]
    found = published.compared(OURS, known)
    assert published.failed_checks(found) == []
    assert published.headline(found) == "Published values: 1 compared, 1 differ, 1 of them known to"
    assert published.table(found).rows == [["azure/naive", "requests", "60", "0", "61", "NO", "one more fits"]]
    held = published.compared(OURS, [Published("requests", {"azure/naive": 61}, deviates="one more fits")])
    assert published.failed_checks(held) == ["azure/naive: requests is 61, as published, though declared to deviate"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Published("requests", {"azure/pagd": 1})], "'requests' of 'azure/pagd' in the results.*mean 'azure/paged'"),
        ([Published("request", {"azure/paged": 1})], "'request' of 'azure/paged' in the results.*mean 'requests'"),
        ([Published("requests", {"azure/paged": 1})] * 2, "'requests' of 'azure/paged' is given twice"),
        ([Published("note", {"azure/paged": 1})], "must be a number to compare, got 'text'"),
    ],
)
def test_what_would_be_compared_with_nothing_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        published.compared(OURS, given)


def test_a_comparison_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^values of 'requests' must not be empty"):
        Published("requests", {})
    with pytest.raises(ValueError, match=r"^tolerance of 'requests' must be at least 0, got -1"):
        Published("requests", {"azure/paged": 1}, tolerance=-1)
    with pytest.raises(ValueError, match=r"^ranges of 'requests': expected 'azure/paged' to rise, got 2 to 1"):
        Published("requests", ranges={"azure/paged": (2, 1)})
