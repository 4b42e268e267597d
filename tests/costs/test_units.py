"""Rates and durations in text."""

import pytest

from commhooks.costs.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_duration,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        (" 2.5 Gbit/s ", 2.5e9),
        ("400 kbit", 4e5),
        ("8bit", 8.0),
        ("1e2Mbit", 1e8),
        ("10Gbps", 1e10),
        ("10 Gb/s", 1e10),
        ("10gbitps", 1e10),
    ],
)
def test_parse_rate(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "1", "1gb", "1gbyte", "1GB/s", "1GBps", "-1gbit", "0mbit", "1.2.3gbit", "gbit"]
)
def test_text_that_is_not_a_rate(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate in bits per second"):
        parse_rate(text)


def test_format_rate() -> None:
    assert format_rate(2.5e9) == "2.5 Gbit/s"
    assert format_rate(100e6) == "100 Mbit/s"
    assert format_rate(999.6e6) == "1 Gbit/s"
    assert format_rate(5.0) == "5 bit/s"
    assert parse_rate(format_rate(25e9)) == 25e9
    assert format_rate(float("inf")) == "inf"


def test_format_bytes() -> None:
    assert format_bytes(3_337_216) == "3.34 MB"
    assert format_bytes(999_600) == "1 MB"
    assert format_bytes(0) == "0 B"


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 20e-6), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("0us", 0.0)]
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "-1ms", "1 hour", "nans", "infs", "1e999s"])
def test_text_that_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20us"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (0.9996, "1 s"), (0.0123, "12.3 ms"), (2e-5, "20 us"), (0.0, "0 s")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
