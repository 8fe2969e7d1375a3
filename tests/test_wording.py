"""Dates written as series come back exactly, and regular ones in a short text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ml.wording import dates_of, dates_text

START = np.datetime64("2001-01-07T00", "ns")


def every(hours, count, start=START):
    return start + np.arange(count) * np.timedelta64(hours, "h")


REGULAR = st.builds(
    lambda first, step, count: first + step * np.arange(count),
    st.integers(-(10**6), 10**6),
    st.integers(1, 400),
    st.integers(1, 40),
)


@given(
    series=st.lists(REGULAR, max_size=4),
    single=st.lists(st.integers(-(10**7), 10**7), max_size=8),
    unit=st.sampled_from(["h", "m", "s", "ms", "ns"]),
)
def test_any_dates_come_back_exactly(series, single, unit):
    numbers = np.concatenate([*series, np.array(single, int)]).astype(np.int64)
    dates = (START.astype(f"datetime64[{unit}]") + numbers).astype("datetime64[ns]")
    np.testing.assert_array_equal(dates_of(dates_text(dates)), np.unique(dates))


@pytest.mark.parametrize(
    ("dates", "text"),
    [
        ([], ""),
        (every(24, 1), "2001-01-07T00"),
        (every(24, 2), "2001-01-07T00 2001-01-08T00"),
        (every(48, 2000), "R2000/2001-01-07T00/PT48H"),
        (START + np.arange(3) * np.timedelta64(90, "m"), "R3/2001-01-07T00/PT90M"),
        (START + np.arange(3) * np.timedelta64(61, "s"), "R3/2001-01-07T00/PT61S"),
        (["2001-01-07T00:30", "2001-01-06T12:00", "2001-01-07T00:30"], "2001-01-06T12 2001-01-07T00:30"),
        (np.delete(every(48, 2000), 701), "R701/2001-01-07T00/PT48H R1298/2004-11-11T00/PT48H"),
        (
            np.concatenate([every(168, 1000), every(168, 1000, START + np.timedelta64(72, "h"))]),
            "R1000/2001-01-07T00/PT168H R1000/2001-01-10T00/PT168H",
        ),
    ],
)
def test_texts_are_short_and_of_iso_8601(dates, text):
    assert dates_text(dates) == text


def test_plain_lists_are_read_too():
    found = dates_of("2001-01-09T00:00 2001-01-07T00:00:00 R3/2001-01-08T12/PT24H 2001-01-07")
    want = ["2001-01-07T00", "2001-01-08T12", "2001-01-09T00", "2001-01-09T12", "2001-01-10T12"]
    np.testing.assert_array_equal(found, np.array(want, "datetime64[ns]"))


@pytest.mark.parametrize(
    "text",
    [
        "no 2001-01-01",
        "R3/2001-01-07T00/P1D",
        "R3/x/PT48H",
        "R9/2250-01-01/PT99999H",
        "2001-13-01",
        "2500-01-01",
        "R4000000000/2001-01-01/PT1S",
    ],
)
def test_what_is_no_date_is_refused(text):
    with pytest.raises(ValueError, match=r"date|goes on|outside of the years"):
        dates_of(text)
