"""A real browser for the tests: Chromium without a window, spoken to over two pipes in the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ADVICE = "no Chromium found: apt-get install chromium, or name one in AIDA_CHROMIUM"


def find_chromium() -> str | None:
    return os.environ.get("AIDA_CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


#: The browser listens on descriptor 3 and answers on 4: the pipes are put there before it takes the process over.
_LAUNCH = """
import fcntl, os, sys
for descriptor, place in [(fcntl.fcntl(int(sys.argv[i]), fcntl.F_DUPFD, 10), i + 2) for i in (1, 2)]:
    os.dup2(descriptor, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in one browser. What the page says on its console, and what it throws, is kept in ``complaints``."""

    def __init__(self, chromium: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="aida-browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
            "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            f"--user-data-dir={self._profile.name}", "about:blank",
        ]  # fmt: skip
        command = [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), chromium, *flags]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._count = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        if phone:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True)

    def open(self, page: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"the page threw: {_thrown(found['exceptionDetails'])}")
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 10.0) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"still not true after {seconds} s: {script}")
            time.sleep(0.05)
        return value

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self._mouse("mouseMoved", start)
        self._mouse("mousePressed", start, button="left", clickCount=1)
        for share in (0.3, 0.6, 1.0):
            at = (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
            self._mouse("mouseMoved", at, button="left")
        self._mouse("mouseReleased", end, button="left", clickCount=1)

    def move(self, at: tuple[float, float]) -> None:
        self._mouse("mouseMoved", at)

    def click(self, at: tuple[float, float]) -> None:
        self.drag(at, at)

    def tap(self, at: tuple[float, float]) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": at[0], "y": at[1]}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        rest = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **rest)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **rest)

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        content = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content["data"]))
        return path

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error'].get('message')}")
                return dict(answer.get("result", {}))
            self._note(answer)

    def _mouse(self, kind: str, at: tuple[float, float], **rest: Any) -> None:
        buttons = 1 if rest.get("button") == "left" and kind != "mouseReleased" else 0
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], buttons=buttons, **rest)

    def _wait_for(self, event: str) -> None:
        while not any(each.get("method") == event for each in self._events):
            self._note(self._read())

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(_thrown(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console.{said['type']}: {[each.get('value') for each in said['args']]}")
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{said['entry']['level']}: {said['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._unread:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise AssertionError(f"the browser has not answered for {seconds:.0f} s")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise AssertionError("the browser has gone")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))
