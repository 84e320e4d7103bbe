"""What is kept of responses: the latest, within bounds, found by every process of the server, by threads alone."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError, NotFound
from penstock.services.openai.responses import store as store_module
from penstock.services.openai.responses.store import CACHE, ID, ResponseStore, Stored

LIMIT = 20.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv(CACHE, raising=False)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path / "temporary"


def stored(text: bytes = b"{}", status: str = "completed") -> Stored:
    return Stored(status, text, b"[]", b"[]")


def store(tmp_path: Path, index: int = 0, processes: int = 1, **options: int | str) -> ResponseStore:
    return ResponseStore(tmp_path / "run", index, processes, msgspec.convert(options, ApiConfig))


async def put(found: ResponseStore, name: str, what: Stored) -> None:
    async with asyncio.timeout(LIMIT):
        if (writing := found.put(name, what)) is not None:
            await writing
            await asyncio.sleep(0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("resp_*"))


@pytest.mark.parametrize("kept_in", ["memory", "temporary", "response_dir"])
async def test_the_oldest_go_first(tmp_path: Path, temporary: Path, kept_in: str) -> None:
    options = {"response_dir": str(tmp_path / "own")} if kept_in == "response_dir" else {}
    found = store(tmp_path, 0, 2 if kept_in == "temporary" else 1, max_stored_responses=2, **options)
    names = [found.new_id() for _ in range(3)]
    for name in names:
        assert ID.fullmatch(name)
        await put(found, name, stored(name.encode()))
    with pytest.raises(NotFound, match="the latest 2 "):
        await found.get(names[0])
    assert [(await found.get(name)).answer for name in names[1:]] == [name.encode() for name in names[1:]]
    assert (found.statistics().responses, found.statistics().evicted) == (2, 1)
    await found.delete(names[2])  # behind what the writer's thread removes for others
    assert files(tmp_path) == ([] if kept_in == "memory" else [names[1]])
    with pytest.raises(NotFound):
        await found.delete(names[2])
    found.close()
    assert files(tmp_path) == ([names[1]] if kept_in == "response_dir" else [])
    assert os.listdir(temporary) == os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("processes", [1, 2])
async def test_bytes_are_bounded_and_a_new_state_replaces_the_old_one(tmp_path: Path, processes: int) -> None:
    found = store(tmp_path, 0, processes, max_stored_bytes=1024)
    first, second = found.new_id(), found.new_id()
    await put(found, first, stored(b"x" * 600))
    await put(found, first, stored(b"y" * 600))
    assert (await found.get(first)).answer == b"y" * 600
    await put(found, second, stored(b"z" * 600))
    with pytest.raises(NotFound):
        await found.get(first)
    assert found.statistics().bytes == 604
    found.close()


@pytest.mark.parametrize("states", [1, 2])
async def test_what_the_disk_does_not_take_is_not_kept_and_fails_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, states: int
) -> None:
    """Nor does an older state of it stay, which nobody would bring to an end."""
    found = store(tmp_path, 0, 2)
    name = found.new_id()
    if states == 2:
        await put(found, name, stored(status="in_progress"))

    def full(path: Path, data: bytes) -> None:
        path.with_name(path.name + ".new").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "replace_file", full)
    await put(found, name, stored())
    with pytest.raises(NotFound):
        await found.get(name)
    statistics = found.statistics()
    assert (statistics.responses, statistics.bytes, statistics.lost, statistics.waiting_bytes) == (0, 0, 1, 0)
    assert files(tmp_path) == []
    assert [record.getMessage() for record in caplog.records] == ["response_not_kept"]
    found.close()


async def test_a_slow_disk_stops_no_loop_and_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, write = threading.Semaphore(0), store_module.replace_file
    order: list[bytes] = []
    alone = threading.Lock()

    def waiting(path: Path, data: bytes) -> None:
        assert alone.acquire(blocking=False), "two writes at a time have no order"
        assert slow.acquire(timeout=LIMIT)
        order.append(data)
        write(path, data)
        alone.release()

    found = store(tmp_path, 0, 2, max_stored_bytes=2000)
    monkeypatch.setattr(store_module, "replace_file", waiting)
    name, other = found.new_id(), found.new_id()
    writes = [found.put(name, stored(text * 500)) for text in (b"a", b"b", b"c")]
    assert (await found.get(name)).answer == b"c" * 500  # it is there before it is written
    assert found.statistics().waiting_bytes == 3 * 504
    assert found.put(other, stored(b"d" * 500)) is None  # more would wait than may be kept
    with pytest.raises(NotFound):
        await found.get(other)
    assert found.statistics().lost == 1
    async with asyncio.timeout(LIMIT):
        assert writes[0] is not None
        slow.release()
        await writes[0]
        await asyncio.sleep(0)
        assert (await found.get(name)).answer == b"c" * 500  # not the state that has just been written
        slow.release(2)
        await asyncio.gather(*(writing for writing in writes if writing is not None))
        await asyncio.sleep(0)
    assert [data[-510:].count(text) for data, text in zip(order, (b"a", b"b", b"c"), strict=True)] == [500] * 3
    assert (await found.get(name)).answer == b"c" * 500
    assert (found.statistics().waiting_bytes, found.statistics().bytes) == (0, 504)
    found.close()


async def test_what_is_deleted_while_it_waits_stays_deleted(tmp_path: Path) -> None:
    found = store(tmp_path, 0, 2)
    name = found.new_id()
    found.put(name, stored())
    await found.delete(name)
    with pytest.raises(NotFound):
        await found.get(name)
    assert (found.statistics().responses, found.statistics().bytes) == (0, 0)
    found.close()


async def test_processes_find_each_others_and_take_up_their_own_again(tmp_path: Path) -> None:
    one, other = (store(tmp_path, index, 2, max_stored_responses=2) for index in range(2))
    names = [one.new_id(), one.new_id()]
    for name in names:
        await put(one, name, stored(name.encode()))
    assert (await other.get(names[0])).answer == names[0].encode()
    again = store(tmp_path, 0, 2, max_stored_responses=2)  # the process was lost and started again
    assert again.statistics().responses == 2
    newest = again.new_id()
    for _ in range(2):  # removals are behind the first write and before the second
        await put(again, newest, stored())
    with pytest.raises(NotFound):
        await other.get(names[0])
    await other.delete(names[1])
    with pytest.raises(NotFound):
        await again.get(names[1])
    assert other.statistics().responses == 0


async def test_what_was_left_is_let_go_of_by_age(tmp_path: Path) -> None:
    """Not by name, and not as the file system lists it."""
    own = {"response_dir": str(tmp_path / "own")}
    found = store(tmp_path, **own)
    names = sorted(found.new_id() for _ in range(4))
    ages = dict(zip(names, (3, 1, 4, 2), strict=True))
    for name in names:
        await put(found, name, stored())
        os.utime(tmp_path / "own" / name, (ages[name], ages[name]))
    found.close()
    again = store(tmp_path, max_stored_responses=3, **own)
    youngest = [name for name in names if ages[name] > 1]
    assert files(tmp_path) == youngest
    await put(again, again.new_id(), stored())
    again.close()
    assert set(files(tmp_path)) & set(names) == {name for name in names if ages[name] > 2}


async def test_what_was_being_made_has_failed_and_processes_that_are_no_more_are_followed(tmp_path: Path) -> None:
    own = {"response_dir": str(tmp_path / "own")}
    before = [store(tmp_path, index, 3, **own) for index in range(3)]
    names = [each.new_id() for each in before]
    for each, name in zip(before, names, strict=True):
        await put(each, name, stored(b'{"id":"x","status":"in_progress"}', "in_progress"))
        each.close()
    first, second = (store(tmp_path, index, 2, **own) for index in range(2))
    assert (first.statistics().responses, second.statistics().responses) == (2, 1)
    for name in names:
        found = await second.get(name)
        assert found.status == "failed"
        told = msgspec.json.decode(found.answer)
        assert (told["status"], told["error"]["code"], told["id"]) == ("failed", "server_error", "x")
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["", "x", "../../etc/passwd", "resp_0000" + "g" * 40, "resp_0000" + "a" * 40])
async def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    found = store(tmp_path, 0, 2)
    with pytest.raises(NotFound):
        await found.get(name)
    found.close()


async def test_a_server_that_keeps_none_says_so(tmp_path: Path) -> None:
    found = store(tmp_path, 0, 2, max_stored_responses=0)
    name = found.new_id()
    found.put(name, stored())
    with pytest.raises(NotFound, match="keeps none"):
        await found.get(name)
    assert files(tmp_path) == []


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for name in ("open", "file"):
        with pytest.raises(ConfigError, match="response-dir"):
            store(tmp_path, response_dir=str(tmp_path / name))
