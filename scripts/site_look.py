"""Opens every page of a built site in Chromium, light, dark and as wide as a phone.

    python scripts/site_look.py site [--pictures FOLDER]

Exits 1 if a page asks another host for anything, fails to load something, logs an error, or is wider than its window.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

BROWSER = Path(__file__).with_name("browser.sh")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing: what fails is seen in the browser."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each page")
    options = parser.parse_args()
    browser = subprocess.run([BROWSER, "--path"], capture_output=True, text=True, check=False).stdout.strip()
    if not browser:
        print("The pages were not opened: there is no Chromium here. Type make browser.")
        return 0
    wrong = look(options.site, browser, options.pictures)
    print("\n".join(wrong) or "Every page opened, light, dark and on a phone, and asked no other host for anything.")
    return 1 if wrong else 0


def look(site: Path, browser: str, pictures: Path | None = None) -> list[str]:
    """What is wrong with the pages, in sentences."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        with sync_playwright() as playwright:
            sandbox = [] if os.geteuid() else ["--no-sandbox"]
            chromium = playwright.chromium.launch(executable_path=browser, args=[*QUIET, *sandbox])
            for how, scheme, width in (("light", "light", 1280), ("dark", "dark", 1280), ("phone", "light", 390)):
                context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                # 404.html assumes the published address
                for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
                    name, page = path.relative_to(site).as_posix(), context.new_page()
                    wrong += [f"{name} ({how}): {what}" for what in opened(page, home, name)]
                    if pictures is not None:
                        pictures.mkdir(parents=True, exist_ok=True)
                        page.screenshot(path=pictures / f"{name.replace('/', '-')}.{how}.png")
                    page.close()
            chromium.close()
        server.shutdown()
    return wrong


def opened(page: Any, home: str, name: str) -> list[str]:
    """What happened while one page was opened that must not happen."""
    seen: list[str] = []
    page.on("request", lambda request: outside(request.url, home, seen))
    page.on("requestfailed", lambda request: seen.append(f"could not load {request.url}"))
    page.on(
        "response", lambda response: seen.append(f"{response.status} {response.url}") if response.status > 399 else None
    )
    page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.goto(home + name.removesuffix("index.html"), wait_until="networkidle")
    if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
        seen.append("is wider than its window")
    for event in ("request", "requestfailed", "response", "console", "pageerror"):
        page._impl_obj.remove_all_listeners(event)
    return list(dict.fromkeys(seen))


def outside(url: str, home: str, seen: list[str]) -> None:
    if not url.startswith((home, "data:", "blob:")):
        seen.append(f"asked {url}")


if __name__ == "__main__":
    sys.exit(main())
