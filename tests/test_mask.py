"""A band in global positions is the same band in local indices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.mask import CAUSAL, FULL, OPEN, Band, as_band, window

BANDS = st.one_of(
    st.sampled_from([FULL, CAUSAL]),
    st.builds(window, st.integers(-1, 12), st.integers(-1, 12)),
    st.tuples(st.integers(-12, 12), st.integers(-12, 12)).map(lambda pair: Band(min(pair), max(pair))),
)


@given(BANDS, st.integers(-40, 40), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_localize(band, distance, step, a, b):
    lo, hi = band.localize(distance, step)
    assert band.sees(distance + step * a, step * b) == (lo <= a - b <= hi)


def test_windows_count_keys_besides_the_query():
    assert window(2) == Band(0, 2) and window(2, 1) == Band(-1, 2)
    assert window(-1) == CAUSAL and window(-1, -1) == FULL
    assert all(band.sees(7, 7) for band in (window(0), window(0, 0), window(3, 3)))


def test_names():
    assert as_band("causal") is CAUSAL and as_band(Band(1, 3)) == Band(1, 3)
    assert str(CAUSAL) == "causal" and str(window(3)) == "band(0, 3)" and str(Band(lo=1)) == "band(1, inf)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Band(3, 2), "lo=3 > hi=2"),
        (lambda: Band(0.5, 2), "lo=0.5"),
        (lambda: Band(True, OPEN), "lo=True"),
        (lambda: window(-2), "left.*-2"),
        (lambda: window(1, 1.5), "right.*1.5"),
        (lambda: as_band("diagonal"), "'diagonal'.*full, causal"),
        (lambda: as_band(None), "None"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
