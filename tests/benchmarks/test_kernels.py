"""What the kernels' benchmark counts. Its imports stand in the tests: they bring Triton, whose interpreter other tests
choose when they are collected."""

from __future__ import annotations


def test_attention_counts_keys_once_and_pairs_below_the_diagonal() -> None:
    from benchmarks.kernels import DIM, HEADS, KV_HEADS, attention_work

    rows = [(1, 5), (3, 4)]
    size, flops = attention_work(rows)
    pairs = 5 + (2 + 3 + 4)
    assert flops == pairs * HEADS * (2 * DIM + 2 * DIM)  # scores, then values
    keys_and_values, queries_and_output = 2 * 9 * KV_HEADS * DIM, 2 * 4 * HEADS * DIM
    assert size == 2 * (keys_and_values + queries_and_output)  # two bytes each


def test_the_nearer_limit_is_the_one_that_counts() -> None:
    from benchmarks.kernels import MATRIX, READ, figure

    read = figure("attention", "decode", 20.0, (int(READ * 1e-5), int(MATRIX * 1e-6)))
    assert (read.limit, read.share) == ("read", 0.5)
    multiplied = figure("attention", "prefill", 20.0, (int(READ * 1e-6), int(MATRIX * 1.6e-5)))
    assert (multiplied.limit, multiplied.share) == ("matrix", 0.8)


def test_shapes_can_be_and_each_has_forms_to_compare() -> None:
    from benchmarks.kernels import name_of, shapes, tilings

    for rows in shapes().values():
        assert all(0 < count <= context for count, context in rows)
        forms = tilings(rows)
        assert len({name_of(form) for form in forms}) == len(forms)
        assert all(form.by_row == (max(count for count, _ in rows) == 1) for form in forms)
