"""A real browser for tests, where one is installed: Chromium without a window, driven over a pair of pipes.

Source: Chrome DevTools Protocol, as `--remote-debugging-pipe` speaks it: JSON objects that end with a zero byte, read
by the browser from descriptor 3 and written to descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT = 60.0  # seconds for anything that a test waits for
# The browser's ends must be 3 and 4; a shell places them there between fork and exec.
SHELL = 'exec "$@" 3<&"$IN" 4>&"$OUT"'


def installed() -> str:
    """Path of a browser; empty where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), "")


class Browser:
    """A running browser: commands go to one of its pages, events come from all."""

    def __init__(self, process: subprocess.Popen[bytes], sending: int, receiving: int) -> None:
        self._process = process
        self._sending = sending
        self._receiving = receiving
        self._number = 0
        self._buffer = b""
        self.faults: list[str] = []
        self.loaded: set[str] = set()  # sessions of pages that have loaded since they were told to

    def call(self, session: str, method: str, **params: Any) -> Any:
        """The result of one command to a page, or with an empty `session` to the browser."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def load(self, session: str, method: str, **params: Any) -> None:
        """A command that makes a page load, until it has."""
        self.loaded.discard(session)
        self.call(session, method, **params)
        while session not in self.loaded:
            self._note(self._next())

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(str(event["params"]["exceptionDetails"].get("exception", event["params"])))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.faults.append(event["params"]["entry"]["text"])
            case "Page.loadEventFired":
                self.loaded.add(event["sessionId"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receiving], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._receiving, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found


class Page:
    """One page of a browser. `faults` are the errors of all pages and what their policies blocked."""

    def __init__(self, browser: Browser, context: str = "") -> None:
        self._browser = browser
        self._context = context
        place = {"browserContextId": context} if context else {}
        self._target = browser.call("", "Target.createTarget", url="about:blank", **place)["targetId"]
        self._session = browser.call("", "Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.faults = browser.faults
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def tab(self) -> Page:
        """Another page of the same user."""
        return Page(self._browser, self._context)

    def allow(self, *permissions: str) -> None:
        self._browser.call("", "Browser.grantPermissions", permissions=permissions, browserContextId=self._context)

    def front(self) -> None:
        """Make it the tab that is seen; the others stop drawing."""
        self.call("Page.bringToFront")

    def close(self) -> None:
        self._browser.call("", "Target.closeTarget", targetId=self._target)

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command."""
        return self._browser.call(self._session, method, **params)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self._browser.load(self._session, "Page.navigate", url=url)

    def reload(self) -> None:
        self._browser.load(self._session, "Page.reload")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds."""
        deadline = time.monotonic() + LIMIT
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true; {self.faults}"
            select.select([], [], [], 0.02)

    def press(self, key: str, code: str = "", modifiers: int = 0, text: str = "") -> None:
        """One key; modifiers are 1 alt, 2 control, 8 shift."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, modifiers=modifiers,
                      **({"text": text} if text and kind == "keyDown" else {}))  # fmt: skip

    def type(self, text: str) -> None:
        """Text into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def fresh(found: Browser) -> Iterator[Page]:
    """A page of a user who has nothing stored, in a browser that runs already."""
    context = found.call("", "Target.createBrowserContext")["browserContextId"]
    try:
        yield Page(found, context)
    finally:
        found.call("", "Target.disposeBrowserContext", browserContextId=context)
        found.faults.clear()


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile; ended with all of its processes."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    words = [installed(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    words += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        ["/bin/bash", "-c", SHELL, "browser", *words],
        pass_fds=(in_read, out_write),
        env={**os.environ, "IN": str(in_read), "OUT": str(out_write), "HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(process, in_write, out_read)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(in_write)
        os.close(out_read)
