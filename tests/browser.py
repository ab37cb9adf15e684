"""Chromium without a window, steered through pipes by its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser, or None."""


class Browser:
    """One tab of a browser. Use it in a `with` statement."""

    def __init__(self, folder: Path) -> None:
        """Start the browser, with its files in `folder`."""
        assert CHROMIUM is not None
        commands, answers = os.pipe(), os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        line = (
            f"exec {CHROMIUM} {options} --user-data-dir={folder} --remote-debugging-pipe about:blank "
            f"3<&{commands[0]} 4>&{answers[1]} >{folder}.log 2>&1"
        )
        self.process = subprocess.Popen(["bash", "-c", line], pass_fds=(commands[0], answers[1]))
        os.close(commands[0])
        os.close(answers[1])
        self._commands, self._answers = os.fdopen(commands[1], "wb", 0), os.fdopen(answers[0], "rb")
        self.events: list[dict[str, Any]] = []
        self._number, self._session = 0, None
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "DOM"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self._send("Browser.close")
        self._commands.close()
        self._answers.close()
        self.process.wait(30)

    def open(self, url: str) -> None:
        self.events.clear()
        self._send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Return the value of a script, or of its promise."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 60
        while not self.value(condition):
            assert time.monotonic() < deadline, (condition, self.value("document.body.innerText"))
            time.sleep(0.02)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files as in the dialogue of an input."""
        root = self._send("DOM.getDocument")["root"]["nodeId"]
        node = self._send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._send("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, which is named as in `KeyboardEvent.key`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 8 if shift else 0}
        text = {"text": key} if len(key) == 1 else {}
        self._send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", **about)

    def mouse(self, kind: Literal["move", "press", "release"], x: float, y: float, *, shift: bool = False) -> None:
        """Move the mouse to a place in the window, or press or release its left button there."""
        names = {"move": "mouseMoved", "press": "mousePressed", "release": "mouseReleased"}
        button = {} if kind == "move" else {"button": "left", "clickCount": 1}
        self._send("Input.dispatchMouseEvent", type=names[kind], x=x, y=y, modifiers=8 if shift else 0, **button)

    def touch(self, *places: tuple[float, float]) -> None:
        """Touch the first place, move the finger to the others, and lift it."""
        kinds = ["touchStart", *["touchMove"] * (len(places) - 1)]
        for kind, (x, y) in zip(kinds, places, strict=True):
            self._send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self._send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def show(self, width: int, height: int, scheme: str = "light", **preferences: str) -> None:
        """Set the size of the window, and the colour scheme that the user prefers. Other preferences are media
        features, such as `forced_colors="active"`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        wanted = {"prefers-color-scheme": scheme, **preferences}
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in wanted.items()]
        self._send("Emulation.setEmulatedMedia", features=features)

    def download_to(self, folder: Path) -> None:
        """Save files that the page offers in a folder."""
        self._send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def requests(self) -> list[str]:
        """Return the addresses that were requested since the page was opened."""
        return [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]

    def faults(self) -> list[Any]:
        """Return exceptions, console messages and violations of the policy since the page was opened. Answers that are
        no success are not included."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        found = [one["params"] for one in self.events if one["method"] in kinds]
        return [one for one in found if one.get("entry", {}).get("source") != "network"]

    def _send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            parts += byte
        return json.loads(parts)
