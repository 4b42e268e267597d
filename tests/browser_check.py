"""Open every page of the built site in headless Chromium, as wide as a desktop and as a phone.

::

    PYTHONPATH=tests python -m browser_check build/docs --screenshots build/screenshots

A page must load without a console error, a broken image, a failed request or one to another host,
and must not be wider than the window. Exit with 1 if any page fails, and with 0 if there is no
browser.
Chromium is driven over a pipe by its DevTools protocol: https://chromedevtools.github.io.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS = {1300: 1000, 400: 800}
"""Height of the window by its width."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT = 60.0
_WHAT_IS_WRONG = """
new Promise(resolve => {
  for (const image of document.images) image.loading = "eager";
  setTimeout(() => resolve([
    ...[...document.images].filter(i => !(i.complete && i.naturalWidth)
        && getComputedStyle(i).display != "none").map(i => "broken image " + i.src),
    ...(document.documentElement.scrollWidth > window.innerWidth + 1
        ? ["wider than the window: " + document.documentElement.scrollWidth + " px"] : []),
  ]), 50);
})
"""


class Browser:
    """A headless Chromium with one tab."""

    def __init__(self, executable: str, profile: str) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to descriptor 4.
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
        )
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec 8<&{to_browser} 9>&{from_browser}; exec "$0" "$@" 3<&8 4>&9',
                executable,
                *flags.split(),
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # No page shows the color scheme that an earlier one has stored.
        self.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; keep the events that arrive before it."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Receive events until one of this kind has arrived."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer in {_TIMEOUT:.0f} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self._read)
        os.close(self._write)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Do not log requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; yield the address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def problems_of(browser: Browser, address: str, home: str, width: int) -> list[str]:
    """Open a page and return what is wrong with it."""
    browser.events.clear()
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=WIDTHS[width],
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.call("Page.navigate", url=address)
    browser.wait_for("Page.loadEventFired")
    found = browser.call(
        "Runtime.evaluate", expression=_WHAT_IS_WRONG, awaitPromise=True, returnByValue=True
    )
    events = [problem for event in browser.events if (problem := _problem(event, home))]
    return [*found["result"]["value"], *events]


def _problem(event: dict[str, Any], home: str) -> str | None:
    method, params = event.get("method"), event.get("params", {})
    if method == "Network.requestWillBeSent":
        url = params["request"]["url"]
        if not url.startswith((home, "data:", "blob:", "about:")):
            return f"request to another host: {url}"
    if method == "Network.responseReceived" and params["response"]["status"] >= 400:
        return f"status {params['response']['status']}: {params['response']['url']}"
    if method == "Runtime.exceptionThrown":
        return f"exception: {params['exceptionDetails'].get('text')}"
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return f"console: {[value.get('value') for value in params['args']]}"
    if method == "Log.entryAdded" and params["entry"]["level"] == "error":
        return f"log: {params['entry']['text']}"
    return None


def take_screenshots(browser: Browser, path: Path) -> None:
    """Save what the window shows, in the light color scheme and in the dark one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for scheme, ending in (("dark", "-dark.png"), ("light", ".png")):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        browser.events.clear()
        browser.call("Page.reload")  # the color scheme is chosen when a page is loaded
        browser.wait_for("Page.loadEventFired")
        image = browser.call("Page.captureScreenshot", format="png")
        path.with_name(path.name + ending).write_bytes(base64.b64decode(image["data"]))


def check(site: Path, screenshots: Path | None, only: str) -> int:
    """Check all pages; print and count the problems."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        print(f"none of {', '.join(BROWSERS)} found: the pages have not been opened")
        return 0
    pages = sorted(page.relative_to(site) for page in site.rglob("*.html") if only in str(page))
    count = 0
    with tempfile.TemporaryDirectory() as profile, served(site) as home:
        browser = Browser(executable, profile)
        try:
            for page in pages:
                for width in WIDTHS:
                    for problem in problems_of(browser, f"{home}/{page}", home, width):
                        print(f"{page} ({width} px): {problem}")
                        count += 1
                    if screenshots:
                        name = "-".join(page.with_suffix("").parts).removesuffix("-index")
                        take_screenshots(browser, screenshots / f"{name}-{width}")
        finally:
            browser.close()
    print(f"{len(pages)} pages at {len(WIDTHS)} widths: {count} problems")
    return count


def main() -> None:
    """Run the check from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="also save what is seen here")
    parser.add_argument("--only", default="", help="open pages whose path contains this text")
    options = parser.parse_args()
    sys.exit(check(options.site, options.screenshots, options.only) > 0)


if __name__ == "__main__":
    main()
