"""A real browser without a window, driven over its debugging protocol: no driver and no package of its own."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_START_S, _ANSWER_S = 60.0, 30.0


def find() -> str | None:
    """Path of a Chromium; None when there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page in a browser of its own. Skips the test where no Chromium is installed.

    Args:
        profile: folder for the browser's files; made when missing.
    """
    program = find()
    if program is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    # Root has no sandbox, and a container's /dev/shm is small.
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    process = subprocess.Popen(
        [program, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port, path = _endpoint(profile / "DevToolsActivePort", process)
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=_START_S) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _endpoint(file: Path, process: subprocess.Popen) -> list[str]:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"Chromium ended with {process.returncode} at its start")
        if file.is_file() and len(lines := file.read_text().splitlines()) == 2:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start within {_START_S:g} s")


class Page:
    """One page.

    Attributes:
        messages: errors and warnings of the page's console and of its loading since `open`.
        requests: addresses that the page asked for since `open`.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; keeps what the page says meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=_ANSWER_S))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a file at a window's size in CSS pixels, in the light or dark scheme; a narrow one is a phone."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.messages, self.requests, self._events = [], [], []
        self.call("Page.navigate", url=file.resolve().as_uri())
        until = time.monotonic() + _ANSWER_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert time.monotonic() < until, f"{file} did not load"
            self._note(json.loads(self._socket.recv(timeout=_ANSWER_S)))

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path, *, height: int | None = None) -> None:
        """Writes a PNG of the whole page, or of its upper part."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height or 16000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(data))

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(parameters["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.messages.append(str(parameters["args"]))
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
