import io
import json
import logging
import re
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.supervisor import logs

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning|error|critical) scheduler-0 \S+.*\n")
log = logging.getLogger("penstock.test")


@pytest.fixture(params=["logfmt"])
def lines(request):
    root = logging.getLogger()
    level, outputs = root.level, list(root.handlers)
    original, hook = warnings.formatwarning, sys.excepthook
    stream = io.StringIO()
    logs.setup("scheduler-0", "info", request.param, stream)
    yield stream
    logging.captureWarnings(False)
    warnings.formatwarning, sys.excepthook = original, hook
    root.setLevel(level)
    root.handlers[:] = outputs


def test_an_event_is_one_line(lines):
    logs.info(log, "ready", blocks=512, url="http://127.0.0.1:8000", load=1.23456789, ok=True, note="two words")
    line = lines.getvalue()
    assert LINE.fullmatch(line)
    assert line.endswith(' ready blocks=512 url=http://127.0.0.1:8000 load=1.23457 ok=true note="two words"\n')


def test_a_field_may_have_any_name(lines):
    logs.warning(log, "lost", name="x", msg="y", args=1, process=2, level=3)
    assert "lost name=x msg=y args=1 process=2 level=3" in lines.getvalue()


def test_levels_below_are_not_written(lines):
    logs.debug(log, "noise")
    logs.error(log, "trouble")
    assert "noise" not in lines.getvalue()
    assert " error scheduler-0 trouble" in lines.getvalue()


def test_an_exception_stays_on_one_line(lines):
    try:
        raise ValueError("broken\nacross lines")
    except ValueError:
        logs.exception(log, "failed", step=3)
    assert lines.getvalue().count("\n") == 1
    assert 'failed step=3 trace="Traceback' in lines.getvalue()


def test_records_of_libraries_are_lines_too(lines):
    logging.getLogger("some.library").info("Started server process [%d]", 7)
    assert lines.getvalue().endswith(' log message="Started server process [7]" logger=some.library\n')
    logging.getLogger("uvicorn.error").info("what nobody asked")
    assert "nobody" not in lines.getvalue()


def test_a_crash_is_one_line(lines):
    try:
        raise RuntimeError("the end")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert LINE.fullmatch(lines.getvalue())
    assert 'critical scheduler-0 crashed error=RuntimeError trace="Traceback' in lines.getvalue()


def test_warnings_are_lines_too(lines):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    assert LINE.fullmatch(lines.getvalue())
    assert "DeprecationWarning: old thing" in lines.getvalue()


as_json = pytest.mark.parametrize("lines", ["json"], indirect=True)


@as_json
def test_an_event_as_json_is_one_object(lines):
    logs.info(log, "ready", blocks=512, load=1.5, ok=True, note="two words", nothing=None, path=io.SEEK_SET)
    found = json.loads(lines.getvalue())
    assert re.fullmatch(r"[0-9T:.-]+Z", found.pop("time"))
    assert found == {
        "level": "info", "process": "scheduler-0", "event": "ready", "blocks": 512, "load": 1.5, "ok": True,
        "note": "two words", "nothing": None, "path": 0,
    }  # fmt: skip


@as_json
def test_json_has_no_nan_and_no_field_hides_another(lines):
    logs.info(log, "odd", time=1, level=2, process=3, event=4, load=float("nan"), kind=ValueError)
    found = json.loads(lines.getvalue(), parse_constant=pytest.fail)
    assert found["event"] == "odd"
    assert (found["time_"], found["level_"], found["process_"], found["event_"]) == (1, 2, 3, 4)
    assert (found["load"], found["kind"]) == ("nan", "<class 'ValueError'>")


@as_json
def test_records_of_libraries_and_crashes_are_objects_too(lines):
    logging.getLogger("some.library").info("Started\u2028server")
    try:
        raise ValueError("broken\nacross lines")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    library, crash = map(json.loads, lines.getvalue().splitlines())
    assert (library["event"], library["message"], library["logger"]) == ("log", "Started\u2028server", "some.library")
    assert crash["event"] == "crashed"
    assert "broken\nacross lines" in crash["trace"]


@given(value=st.text())
def test_any_text_as_json_is_one_line(value):
    written = logs.as_json(("t", "info", "api-0", "e"), {"value": value})
    assert written.isascii()
    assert written.splitlines() == [written]
    assert json.loads(written)["value"] == value


@given(value=st.text())
def test_a_value_never_breaks_its_line(value):
    written = logs.text(value)
    assert written
    assert written.splitlines() == [written]
    if " " in written or "=" in written:
        assert written.startswith('"')
        assert written.endswith('"')
