"""Rows of a setup sample and of its probe."""

from hypothesis import given
from hypothesis import strategies as st

from streamkern.planning.sizes import MAX_PROBE, sample_sizes


@given(st.integers(2, 10**6), st.integers(1, 10**6), st.integers(1, MAX_PROBE))
def test_probe_is_held_out_or_all_rows(n_rows: int, desired: int, probe: int) -> None:
    s, h = sample_sizes(n_rows, desired, probe)
    assert 1 <= s <= n_rows
    assert 1 <= h <= n_rows
    if desired + probe <= n_rows:
        assert (s, h) == (desired, probe)
    assert s + h <= n_rows or h == n_rows <= MAX_PROBE
