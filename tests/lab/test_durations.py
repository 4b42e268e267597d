import pytest

from commhooks.lab.units import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 20e-6), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("0us", 0.0)]
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "-1ms", "1 hour", "nans", "infs", "1e999s"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="such as 20us"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (2e-5, "20 us"), (0.0, "0 s")]
)
def test_durations_are_written(seconds, text):
    assert format_duration(seconds) == text
