"""Open every page of the built site in headless Chromium, as wide as a desktop and as a phone.

::

    PYTHONPATH=tests python -m browser_check build/docs --screenshots build/screenshots

A page must load without a console error, a broken image, a failed request or one to another host,
and must not be wider than the window. Exit with 1 if any page fails or if there is no browser.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS = {1300: 1000, 400: 800}
"""Height of the window by its width."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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


def listen(tab: Any, home: str) -> list[str]:
    """Return a list to which a tab appends what goes wrong in it."""
    found: list[str] = []

    def check_host(request: Any) -> None:
        if not request.url.startswith((home, "data:", "blob:", "about:")):
            found.append(f"request to another host: {request.url}")

    def check_status(response: Any) -> None:
        if response.status >= 400:
            found.append(f"status {response.status}: {response.url}")

    def check_message(message: Any) -> None:
        if message.type in ("error", "assert"):
            found.append(f"console: {message.text}")

    tab.on("request", check_host)
    tab.on("response", check_status)
    tab.on("console", check_message)
    tab.on("pageerror", lambda error: found.append(f"exception: {error}"))
    # No page shows the color scheme that an earlier one has stored.
    tab.add_init_script("localStorage.clear()")
    return found


def take_screenshots(tab: Any, path: Path) -> None:
    """Save what the window shows, in the dark color scheme and in the light one."""
    for scheme, ending in (("dark", "-dark.png"), ("light", ".png")):
        tab.emulate_media(color_scheme=scheme)
        tab.reload()  # the color scheme is chosen when a page is loaded
        tab.screenshot(path=path.with_name(path.name + ending))


def check(site: Path, screenshots: Path | None, only: str) -> int:
    """Check all pages; print and count the problems."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        sys.exit(f"none of {', '.join(BROWSERS)} found: install one to open the pages")
    from playwright.sync_api import sync_playwright

    pages = sorted(page.relative_to(site) for page in site.rglob("*.html") if only in str(page))
    count = 0
    with served(site) as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, chromium_sandbox=False)
        tab = browser.new_page()
        found = listen(tab, home)
        for page in pages:
            for width, height in WIDTHS.items():
                found.clear()
                tab.set_viewport_size({"width": width, "height": height})
                tab.goto(f"{home}/{page}")
                for problem in [*tab.evaluate(_WHAT_IS_WRONG), *found]:
                    print(f"{page} ({width} px): {problem}")
                    count += 1
                if screenshots:
                    name = "-".join(page.with_suffix("").parts).removesuffix("-index")
                    take_screenshots(tab, screenshots / f"{name}-{width}")
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
