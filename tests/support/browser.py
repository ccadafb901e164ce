"""A browser for tests: Chromium, driven through its own debugging pipe, with no package at all.

``find()`` gives a Chromium or Chrome: the one that the environment variable CHROME names, one on
the path, or Debian's package, installed if we are root and it can be had. Where there is none the
tests that need it are skipped and say so.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
INSTALL_S = 180  # Debian's package takes 15 s from a near mirror
ANSWER_S = 20


@functools.cache
def find() -> tuple[str | None, str]:
    """The browser, or why there is none."""
    if named := os.environ.get("CHROME"):
        found = shutil.which(named)
        return found, f"CHROME is {named}, and there is no such program"
    for name in NAMES:
        if path := shutil.which(name):
            return path, ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None, "no Chromium or Chrome here, and no root with apt-get to install one"
    limit = time.monotonic() + INSTALL_S
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *command],
                capture_output=True,
                text=True,
                timeout=max(limit - time.monotonic(), 1),
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
        except subprocess.TimeoutExpired:
            return None, f"apt-get {command[0]} did not end within {INSTALL_S} s"
    path = shutil.which("chromium")
    return path, "" if path else f"Debian's chromium could not be installed: {done.stderr[-300:]}"


class Browser:
    """A headless browser without a network. Messages are JSON with a zero byte after each."""

    def __init__(self, program: str, profile: Path) -> None:
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()

        def plumb() -> None:  # Chromium reads file descriptor 3 and writes 4
            high_in, high_out = os.dup(their_in), os.dup(their_out)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self.process = subprocess.Popen(
            [
                program,
                "--headless",
                "--no-sandbox",  # the tests may run as root, where Chromium has no sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            pass_fds=(),
            preexec_fn=plumb,
        )
        os.close(their_in)
        os.close(their_out)
        self._out, self._in = our_out, our_in
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(our_in, selectors.EVENT_READ)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._selector.close()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to one command; what the browser says meanwhile goes to ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + ANSWER_S
        while True:
            answer = self.read(limit)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def read(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not self._selector.select(max(limit - time.monotonic(), 0)):
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise ConnectionError("the browser is gone")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    @contextlib.contextmanager
    def page(self, path: Path, *, dark: bool = False, width: int = 1200) -> Iterator[Page]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        try:
            page.open(path, dark=dark, width=width)
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)


class Page:
    """One tab. ``problems`` is what went wrong in it: errors, warnings, exceptions, requests."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def open(self, path: Path, *, dark: bool, width: int) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0,
                  downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        self.look(dark=dark, width=width)
        self.call("Page.navigate", url=path.resolve().as_uri())
        limit = time.monotonic() + ANSWER_S
        while self.run("document.readyState") != "complete" or self.run("location.href") == (
            "about:blank"
        ):
            assert time.monotonic() < limit, "the page does not load"
            time.sleep(0.02)
        self.settle()

    def look(self, *, dark: bool = False, width: int = 1200) -> None:
        """In this light, at this width: the page may be open already."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def looks_well(self, *widths: int) -> None:
        """In either light, at each width and on paper; with no picture, as text has made none."""
        for dark, width in itertools.product((False, True), widths):
            self.look(dark=dark, width=width)
            self.settle()
            ground = self.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground))) < 150) == dark
            assert self.run("document.documentElement.scrollWidth") <= width
        assert self.run("document.images.length") == 0
        printed = self.call("Page.printToPDF", printBackground=False)["data"]
        assert base64.b64decode(printed).startswith(b"%PDF")
        self.look()
        self.settle()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames: what was asked to be drawn is drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into view."""
        found = json.dumps(selector)
        values = self.run(
            f"(() => {{ const e = document.querySelector({found}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        left, top, width, height = values
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        left, top, width, height = self.box(selector)
        self.click_at(left + width / 2, top + height / 2)

    def click_at(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, **more: Any) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def colours(self, canvas: str) -> set[str]:
        """What is drawn on a canvas, by its id: ``178,56,56``."""
        found = self.run(
            f"(() => {{ const shown = document.getElementById('{canvas}'); "
            "const {width, height} = shown, found = new Set(); "
            "const copy = new OffscreenCanvas(width, height); "
            "const context = copy.getContext('2d', {willReadFrequently: true}); "
            "context.drawImage(shown, 0, 0); "
            "const d = context.getImageData(0, 0, width, height).data; "
            "for (let i = 0; i < d.length; i += 4) found.add(`${d[i]},${d[i + 1]},${d[i + 2]}`); "
            "return [...found]; })()"
        )
        return set(found)

    @property
    def problems(self) -> list[str]:
        self.run("1")  # so that what was said before it has been read
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] != "log":
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded":
                found.append(f"{params['entry']['level']}: {params['entry']['text']}")
            elif event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"request: {url}")
        return found
