"""Merging gives what delivering row by row would have given."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.scheduling.outbox import MERGE_AT, Outbox, Rows, end_row, joined, merged, merged_extras
from penstock.protocol.messages import Finish, Rejected
from penstock.protocol.outputs import Logprobs, TokenBatch, TokenExtra

Key = tuple[int, int]
ROWS = st.dictionaries(
    st.tuples(st.sampled_from((3, 1 << 61, 7)), st.integers(0, 2)),
    st.tuples(st.lists(st.integers(0, 99), max_size=3), st.booleans()),
    min_size=1,
    max_size=6,
)


def scores(tokens: list[int]) -> Logprobs:
    column = np.array(tokens, np.int32)
    return Logprobs(
        width=1, token_ids=column.tobytes(), values=(-column.astype(np.float32)).tobytes(), ranks=column.tobytes()
    )


def rows(content: dict[Key, tuple[list[int], bool]], ended: set[Key]) -> Rows | None:
    kept = {key: value for key, value in content.items() if key not in ended}
    if not kept:
        return None
    ended |= {key for key, (_, end) in kept.items() if end}
    extras = {
        row: TokenExtra(row=0, logprobs=scores(tokens))
        for row, (tokens, _) in enumerate(kept.values())
        if tokens and tokens[0] % 2
    }
    return Rows(
        np.array([number for number, _ in kept], np.int64),
        np.array([choice for _, choice in kept], np.uint16),
        np.array([len(tokens) for tokens, _ in kept.values()], np.int32),
        np.array([Finish.STOP if end else 0 for _, end in kept.values()], np.uint8),
        np.array([token for tokens, _ in kept.values() for token in tokens], np.int32),
        extras,
    )


def spread(part: Rows) -> dict[Key, tuple[list[int], int, list[int]]]:
    """What a receiver makes of the rows: tokens, finish and scored tokens of each choice."""
    found, at = {}, 0
    for row, (number, choice) in enumerate(zip(part.ids.tolist(), part.numbers.tolist(), strict=True)):
        count, note = int(part.counts[row]), part.extras.get(row)
        scored = [] if note is None or note.logprobs is None else np.frombuffer(note.logprobs.ranks, np.int32).tolist()
        assert (number, choice) not in found
        found[number, choice] = (part.tokens[at : at + count].tolist(), int(part.finish[row]), scored)
        at += count
    assert at == len(part.tokens)
    return found


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_merging_is_the_same_as_one_after_the_other(steps: list[dict[Key, tuple[list[int], bool]]]) -> None:
    ended: set[Key] = set()
    parts = [part for part in (rows(content, ended) for content in steps) if part is not None]
    expected: dict[Key, tuple[list[int], int, list[int]]] = {}
    for part in parts:
        for key, (tokens, finish, scored) in spread(part).items():
            before = expected.get(key, ([], 0, []))
            expected[key] = (before[0] + tokens, max(before[1], finish), before[2] + scored)
    assert spread(merged(parts)) == expected


def test_extras_of_one_choice_join() -> None:
    early = TokenExtra(row=0, cached_tokens=4, logprobs=scores([1]), weights=((0, "0"),))
    late = TokenExtra(row=0, logprobs=scores([2, 3]), stop_token=3, error=None, weights=((1, "1"),))
    both = merged_extras(early, late)
    assert both.weights == ((0, "0"), (1, "1"))
    assert both.cached_tokens == 4
    assert both.stop_token == 3
    assert both.logprobs == scores([1, 2, 3])
    assert joined([]) is None


def one(token: int, finish: Finish = Finish.NONE) -> Rows:
    part = end_row(5, 1, finish)
    return Rows(part.ids, part.numbers, np.ones(1, np.int32), part.finish, np.array([token], np.int32))


def test_a_late_call_gives_one_batch_with_everything_and_a_second_call_nothing() -> None:
    outbox = Outbox()
    for token in range(3 * MERGE_AT):
        outbox.rows.append(one(token))
        assert outbox.take(0) == []
        assert len(outbox.rows) < MERGE_AT, "what the link does not take is merged"
    outbox.rows.append(end_row(5, 1, Finish.ABORT))
    (batch,) = outbox.take(10)
    assert isinstance(batch, TokenBatch)
    assert np.frombuffer(batch.token_ids, np.int32).tolist() == list(range(3 * MERGE_AT))
    assert np.frombuffer(batch.counts, np.int32).tolist() == [3 * MERGE_AT]
    assert batch.finish == bytes([Finish.ABORT])
    assert not outbox
    assert outbox.take(10) == []


def test_the_limit_is_kept_and_nothing_is_lost_by_it() -> None:
    outbox = Outbox()
    refusals = [Rejected(id=number, status=400, message="no") for number in range(3)]
    for refusal in refusals:
        outbox.reject(refusal)
    outbox.rows.append(one(1, Finish.STOP))
    assert outbox.take(0) == []
    assert outbox.take(2) == refusals[:2]
    assert outbox.take(1) == refusals[2:]
    (batch,) = outbox.take(1)
    assert isinstance(batch, TokenBatch)


def test_an_error_travels_in_the_extra_of_its_row() -> None:
    outbox = Outbox()
    outbox.rows.append(one(1))
    outbox.rows.append(end_row(6, 0, Finish.ERROR, "broken"))
    (batch,) = outbox.take(1)
    assert isinstance(batch, TokenBatch)
    assert [(extra.row, extra.error) for extra in batch.extras] == [(1, "broken")]


def test_what_became_of_drafts_is_told_with_the_last_row() -> None:
    outbox = Outbox()
    outbox.rows.append(one(1))
    outbox.rows.append(end_row(5, 1, Finish.ABORT, drafted=(3, 4)))
    (batch,) = outbox.take(1)
    assert isinstance(batch, TokenBatch)
    assert [(extra.row, extra.drafted, extra.error) for extra in batch.extras] == [(0, (3, 4), None)]
    first, later, nothing = TokenExtra(row=0, drafted=(1, 2)), TokenExtra(row=0, drafted=(4, 2)), TokenExtra(row=0)
    assert merged_extras(first, nothing).drafted == merged_extras(nothing, first).drafted == (1, 2)
    assert merged_extras(first, later).drafted == (4, 2), "they count from the choice's beginning"
    assert end_row(5, 1, Finish.ABORT).extras == {}
