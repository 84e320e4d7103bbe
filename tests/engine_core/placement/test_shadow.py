"""The guess at a replica's cache: bounded, least recently used first, a chain's end before its beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.placement.placement import MAX_BLOCKS, Shadow


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def shadow(blocks: int) -> Shadow:
    made = Shadow()
    made.resize(blocks)
    return made


def test_hits_count_from_the_beginning() -> None:
    made = shadow(8)
    made.use(chain("a", "b", "c"))
    assert made.hits(chain("a", "b", "x", "c")) == 2
    assert made.hits(chain("b", "c")) == 2, "a chain names all that is before it, so this is one"
    assert made.hits(chain("x", "a")) == 0
    assert made.hits([]) == 0


def test_the_end_of_what_was_used_first_goes_first() -> None:
    made = shadow(4)
    made.use(chain("a", "b"))
    made.use(chain("c", "d", "e"))
    assert len(made) == 4
    assert made.hits(chain("a", "b")) == 1
    made.use(chain("a"))
    made.use(chain("f"))
    assert made.hits(chain("c", "d", "e")) == 2
    assert made.hits(chain("a")) == 1


def test_one_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    made = shadow(2)
    made.use(chain("a", "b", "c", "d"))
    assert made.hits(chain("a", "b", "c", "d")) == 2


def test_a_smaller_cache_holds_less_and_a_lost_one_nothing() -> None:
    made = shadow(4)
    made.use(chain("a", "b", "c"))
    made.resize(1)
    assert (len(made), made.hits(chain("a", "b"))) == (1, 1)
    made.clear()
    assert (len(made), made.hits(chain("a"))) == (0, 0)


def test_it_is_bounded_whatever_a_replica_says() -> None:
    made = shadow(1 << 40)
    made.use([number.to_bytes(4, "little") for number in range(MAX_BLOCKS + 10)])
    assert len(made) == MAX_BLOCKS


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=30), st.integers(1, 12))
def test_what_was_used_last_is_there_as_far_as_it_fits(prompts: list[list[int]], blocks: int) -> None:
    made = shadow(blocks)
    for prompt in prompts:
        names = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        made.use(names)
        assert made.hits(names) == min(len(names), blocks)
        assert len(made) <= blocks
