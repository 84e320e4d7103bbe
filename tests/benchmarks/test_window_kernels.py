"""The benchmark of windows: what it tries. What it measures needs a GPU."""

from __future__ import annotations

from benchmarks.window_kernels import CASES, forms_of, shape_from
from penstock.kernels.attention_tiling import find_row, low_tiling
from penstock.kernels.chip import CHIPS

H200 = CHIPS["sm_90"]


def test_before_is_the_table_without_windows_and_after_is_the_products_own() -> None:
    for case in CASES:
        forms = forms_of(case, H200)
        assert list(forms)[-1] == "after"
        assert forms["after"] == low_tiling(shape_from(case), 1, H200)
        assert len(set(forms.values())) == len(forms)
        assert all(form.by_row for form in forms.values())
        if case.window:
            assert not forms["before"].one_loop
    assert find_row(("window", "low"), 16, 256, 2, H200) is not None, "the table is whole again"


def test_each_key_within_reach_is_counted_once() -> None:
    case = next(case for case in CASES if case.window == 128 and case.dim == 128 and case.rows == 64)
    keys, queries = 2 * 64 * 128 * 8 * 128, 2 * 64 * 32 * 128  # keys and values; queries and results
    assert case.bytes == 2 * (keys + queries)
