"""Rates of links in text."""

import pytest

from commhooks.lab.units import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        (" 2.5 Gbit/s ", 2.5e9),
        ("400 kbit", 4e5),
        ("8bit", 8.0),
        ("1e2Mbit", 1e8),
    ],
)
def test_parse(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "1", "1gb", "1gbyte", "-1gbit", "0mbit", "1.2.3gbit", "gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate in bits per second"):
        parse_rate(text)


def test_format() -> None:
    assert format_rate(2.5e9) == "2.5 Gbit/s"
    assert format_rate(100e6) == "100 Mbit/s"
    assert format_rate(999.6e6) == "1 Gbit/s"
    assert format_rate(5.0) == "5 bit/s"
    assert parse_rate(format_rate(25e9)) == 25e9
