"""A headless Chromium, driven over a pipe with the DevTools protocol that it speaks itself: no package, no driver
program, no port.

What the tests do goes through the browser's own input (key by key, a click where the element is), so that focus,
default actions and the Content-Security-Policy count as they do for a person.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 20.0
ALT, CONTROL, META, SHIFT = 1, 2, 4, 8
_KEYS = {  # key: code, Windows' number, the text that it types
    "Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, ""), " ": ("Space", 32, " "),
}  # fmt: skip
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio", "--hide-scrollbars",
)  # fmt: skip


def find_chromium() -> str | None:
    """The program, if there is one: CHROMIUM, or what Debian and others call it."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Chromium:
    """A context manager. `folder`: its profile and its log. It ends with the pipe, so it outlives nobody."""

    def __init__(self, program: str, folder: Path):
        self._argv = [program, *_FLAGS, f"--user-data-dir={folder / 'profile'}"]
        if os.geteuid() == 0:
            self._argv.append("--no-sandbox")  # which Chromium cannot set up for root
        self._log, self._number, self._rest = folder / "chromium.log", 0, b""
        self._answers = dict[int, dict[str, Any]]()
        self.on_event: Callable[[str, str, dict[str, Any]], None] = lambda session, method, params: None

    def __enter__(self) -> "Chromium":
        ours_in, theirs_out = (_above(fd) for fd in os.pipe())
        theirs_in, ours_out = (_above(fd) for fd in os.pipe())

        def arrange() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False, preexec_fn=arrange
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + WAIT_S
        while number not in self._answers:
            assert time.monotonic() < deadline, f"no answer to {method}"
            self.listen(deadline - time.monotonic())
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, timeout_s: float) -> None:
        """Take in what the browser says, for at most so long."""
        if not select.select([self._in], [], [], max(0.0, timeout_s))[0]:
            return
        data = os.read(self._in, 1 << 20)
        assert data, f"the browser has ended: {self._log.read_text(errors='replace')[-2000:]}"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.on_event(message.get("sessionId", ""), message["method"], message["params"])


def _above(fd: int) -> int:
    """The same file under a number above those that Chromium's end of the pipe needs."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


class Page:
    """A page with a session of its own. `problems`: what the browser complained of; `requests`: URLs it asked for."""

    def __init__(self, browser: Chromium, *, width: int = 1280, height: int = 800, dark: bool = False):
        self._browser, self.problems, self.requests = browser, list[str](), list[str]()
        context = browser.call("Target.createBrowserContext", disposeOnDetach=True)["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._context = context
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.on_event = self._on_event
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        phone = width < 600
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def reload(self) -> None:
        self.evaluate("window.before = true")
        self.call("Page.reload")
        self.wait_for("!window.before && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Its value, awaited if it is a promise. Fails the test for what it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = WAIT_S) -> Any:
        """Poll until it gives something true, and give that. What it throws while the page changes counts as no."""
        deadline = time.monotonic() + timeout_s
        found = None
        while not found:
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {expression}; {self.problems}"
            answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
            found = answer["result"].get("value") if "exceptionDetails" not in answer else None
            self._browser.listen(0.0 if found else 0.03)
        return found

    def text(self, selector: str) -> str:
        """What a person can read of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def is_shown(self, selector: str) -> bool:
        return self.evaluate(
            f"document.querySelector({json.dumps(selector)}).checkVisibility({{visibilityProperty: true}})"
        )

    def focused(self) -> str:
        """The id of the element that has the keyboard, else what it says."""
        return self.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key down and up: "Enter", "Escape", "Tab", or one character."""
        code, number, text = _KEYS.get(key, ("", 0, key))
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **event, **down)
        self.call("Input.dispatchKeyEvent", **event, type="keyUp")

    def type(self, text: str) -> None:
        for character in text:
            self.press(character)

    def paste(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what `selector` names: whatever lies there gets it."""
        self.wait_for(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        where = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _on_event(self, session: str, method: str, params: dict[str, Any]) -> None:
        if session != self._session:
            return
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))
