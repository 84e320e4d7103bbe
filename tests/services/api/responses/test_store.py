"""What is kept of responses: the latest, within bounds, found by every process of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config import ApiConfig
from protocol.errors import NotFound
from services.api.responses.store import ID, ResponseStore, Stored


def stored(text: bytes = b"{}") -> Stored:
    return Stored("completed", text, b"[]", b"[]")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_oldest_go_first(tmp_path: Path, processes: int) -> None:
    store = ResponseStore(tmp_path, 0, processes, ApiConfig(max_stored_responses=2))
    names = [store.new_id() for _ in range(3)]
    for name in names:
        assert ID.fullmatch(name)
        store.put(name, stored(name.encode()))
    with pytest.raises(NotFound, match="the latest 2 "):
        store.get(names[0])
    assert [store.get(name).answer for name in names[1:]] == [name.encode() for name in names[1:]]
    assert (store.statistics().responses, store.statistics().evicted) == (2, 1)
    store.delete(names[2])
    with pytest.raises(NotFound):
        store.delete(names[2])
    store.close()
    assert store.statistics().bytes == 0
    assert list(tmp_path.glob("responses/*")) == []


def test_bytes_are_bounded_and_a_new_state_replaces_the_old_one(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 0, 1, ApiConfig(max_stored_bytes=1024))
    first, second = store.new_id(), store.new_id()
    store.put(first, stored(b"x" * 600))
    store.put(first, stored(b"y" * 600))
    assert store.get(first).answer == b"y" * 600
    store.put(second, stored(b"z" * 600))
    with pytest.raises(NotFound):
        store.get(first)
    assert store.statistics().bytes == 604


def test_what_the_disk_does_not_take_is_not_kept_and_fails_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore(tmp_path, 0, 2, ApiConfig())
    name = store.new_id()
    (tmp_path / "responses" / name / "in the way").mkdir(parents=True)
    store.put(name, stored())
    with pytest.raises(NotFound):
        store.get(name)
    assert store.statistics().responses == store.statistics().bytes == 0
    assert [path.name for path in (tmp_path / "responses").iterdir()] == [name]
    assert [record.getMessage() for record in caplog.records] == ["response_not_kept"]


def test_processes_find_each_others_and_take_up_their_own_again(tmp_path: Path) -> None:
    options = ApiConfig(max_stored_responses=2)
    one, other = (ResponseStore(tmp_path, index, 2, options) for index in range(2))
    names = [one.new_id(), one.new_id()]
    for name in names:
        one.put(name, stored(name.encode()))
    assert other.get(names[0]).answer == names[0].encode()
    again = ResponseStore(tmp_path, 0, 2, options)  # the process was lost and started again
    assert again.statistics().responses == 2
    again.put(again.new_id(), stored())
    with pytest.raises(NotFound):
        other.get(names[0])
    other.delete(names[1])
    with pytest.raises(NotFound):
        again.get(names[1])
    assert other.statistics().responses == 0


@pytest.mark.parametrize("name", ["", "x", "../../etc/passwd", "resp_0000" + "g" * 40, "resp_0000" + "a" * 40])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound):
        ResponseStore(tmp_path, 0, 2, ApiConfig()).get(name)


def test_a_server_that_keeps_none_says_so(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 0, 1, ApiConfig(max_stored_responses=0))
    name = store.new_id()
    store.put(name, stored())
    with pytest.raises(NotFound, match="keeps none"):
        store.get(name)
