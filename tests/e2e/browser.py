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


class Page:
    """One page of a browser. `faults` are its errors and what its policy blocked."""

    def __init__(self, process: subprocess.Popen[bytes], sending: int, receiving: int) -> None:
        self._process = process
        self._sending = sending
        self._receiving = receiving
        self._number = 0
        self._buffer = b""
        self._session = ""
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

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

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(str(event["params"]["exceptionDetails"].get("exception", event["params"])))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.faults.append(event["params"]["entry"]["text"])

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


@contextmanager
def page(folder: Path, *flags: str) -> Iterator[Page]:
    """A browser with an empty profile and one page; ended with all of its processes."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    words = [installed(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    words += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", *flags]
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
        yield Page(process, in_write, out_read)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(in_write)
        os.close(out_read)
