"""Check HTML files, and all those in folders, in headless Chromium; print a line a finding.

`python tests/support/browser.py [--shots FOLDER] PATH...` exits with 1 if it finds anything: an
error on the console, a request to another host, what overflows or is clipped, text in a picture
that overlaps or is too small, a link or an anchor that leads nowhere. Each page is seen at 1,280
and 390 pixels, light and dark. It needs the packages chromium and chromium-driver, and selenium.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

WIDTHS, HEIGHT = (1280, 390), 900
SCHEMES = ("light", "dark")
LEAST_PX = 10.9  # of text in a picture
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
--disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage"""
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src"}
LOOK = """
const found = [], wide = innerWidth, say = e => '<' + e.tagName.toLowerCase() + '> '
  + (e.textContent || '').trim().replace(/\\s+/g, ' ').slice(0, 40);
const scrolls = document.documentElement.scrollWidth;
if (scrolls > wide) found.push(`the page is ${scrolls} px wide`);
const clips = e => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
  if (getComputedStyle(p).overflowX !== 'visible') return true; };
const waits = e => { for (let p = e; p; p = p.parentElement)  // a drawer beside the screen
  if (getComputedStyle(p).position === 'fixed' && p.getBoundingClientRect().left >= wide)
    return true; };
const shows = e => e.checkVisibility({visibilityProperty: true, opacityProperty: true});
for (const e of document.querySelectorAll('body *')) {
  const box = e.getBoundingClientRect();
  if (box.width && box.right > wide + 0.5 && shows(e) && !clips(e)
      && !waits(e))
    found.push(`${say(e)} ends at ${Math.round(box.right)} px`);
}
for (const svg of document.querySelectorAll('svg')) {
  const outer = svg.getBoundingClientRect(), seen = [];
  for (const e of outer.width ? svg.querySelectorAll('text') : []) {
    const box = e.getBoundingClientRect(), px = parseFloat(getComputedStyle(e).fontSize)
      * e.getScreenCTM().a;
    if (!box.width) continue;
    if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.top < outer.top - 1
        || box.bottom > outer.bottom + 1) found.push(`${say(e)} is clipped`);
    if (px < arguments[0]) found.push(`${say(e)} has ${px.toFixed(1)} px`);
    for (const [other, b] of seen)
      if (box.left < b.right - 1 && b.left < box.right - 1 && box.top < b.bottom - 4
          && b.top < box.bottom - 4) found.push(`${say(e)} lies over ${say(other)}`);
    seen.push([e, box]);
  }
}
return found;
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder without a log. Chromium asks for a favicon, which is empty."""

    def do_GET(self):
        if urlsplit(self.path).path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder):
    """Serve a folder at an address of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def chromium():
    """Start a browser that resolves no host but this one."""
    from selenium import webdriver  # only this function needs it

    options, folder = webdriver.ChromeOptions(), tempfile.mkdtemp()
    for option in (*OPTIONS.split(), f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)


class Page(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = {"", "top"}, []
        self.feed(path.read_text(errors="replace"))

    def handle_starttag(self, tag, attrs):
        attrs = {name: value or "" for name, value in attrs}
        self.anchors |= {attrs[name] for name in ("id", "name") if name in attrs}
        if LINKS.get(tag) in attrs:
            self.links.append(attrs[LINKS[tag]])


read = cache(Page)


def find_broken_links(root, path):
    """Yield the links of a page that lead to no file below the root, or to no anchor of one."""
    here = f"file:///{path.relative_to(root).as_posix()}"
    for link in dict.fromkeys(read(path).links):
        address, anchor = urldefrag(urljoin(here, link))
        if urlsplit(address).scheme != "file" or urlsplit(address).netloc:
            continue
        target = root / unquote(urlsplit(address).path).lstrip("/")
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            yield f"broken link: {link}"
        elif target.suffix == ".html" and unquote(anchor) not in read(target).anchors:
            yield f"broken anchor: {link}"


def look(driver, home, address, width, scheme):
    """Yield what is wrong with a page at a width, in a scheme."""
    metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for kind in ("browser", "performance"):
        driver.get_log(kind)  # of the page before
    driver.get(address)
    yield from driver.execute_script(LOOK, LEAST_PX)
    for entry in driver.get_log("browser"):
        if entry["level"] in {"SEVERE", "WARNING"}:
            yield f"console: {entry['message']}"
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith((home, "data:", "blob:", "about:", "chrome:")):
                yield f"request to another host: {url}"


def find_in_search(driver, home, word):
    """Yield a finding if the search of a folder does not lead to a heading or name of this word."""
    driver.get(f"{home}search.html?q={word}")
    driver.implicitly_wait(10)  # for the first result
    found = driver.find_elements("css selector", f"#search-results a[href$='{word}']")
    driver.implicitly_wait(0)
    if not found:
        yield f"the search does not find {word}"


def shoot(driver, path):
    """Save a picture of the whole page."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.execute_script("return innerWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    options = {"clip": clip, "captureBeyondViewport": True}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(found["data"]))


def main():
    """Look at all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--shots", type=Path, metavar="FOLDER", help="save a picture of each view")
    parser.add_argument("--finds", metavar="WORD", help="what the search of each folder finds")
    args = parser.parse_args()
    missing = [path for path in args.paths if not path.exists()]
    missing += [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    missing += [] if find_spec("selenium") else ["selenium"]
    if missing:
        parser.error(f"not found: {', '.join(map(str, missing))}")
    count = pages = 0
    with chromium() as driver:
        for path in args.paths:
            root = (path if path.is_dir() else path.parent).resolve()
            files = sorted(root.rglob("*.html")) if path.is_dir() else [path.resolve()]
            with serving(root) as home:
                for each in find_in_search(driver, home, args.finds) if args.finds else ():
                    print(f"{path}: {each}")
                    count += 1
                for file in files:
                    name = file.relative_to(root).as_posix()
                    found = list(find_broken_links(root, file))
                    for width in WIDTHS:
                        for scheme in SCHEMES:
                            seen = look(driver, home, home + name, width, scheme)
                            found += [f"{width} px, {scheme}: {each}" for each in seen]
                            if args.shots:
                                shot = f"{name.removesuffix('.html').replace('/', '_')}"
                                shoot(driver, args.shots / f"{shot}-{width}-{scheme}.png")
                    print(*(f"{file}: {each}" for each in found), sep="\n", end="\n" * bool(found))
                    count, pages = count + len(found), pages + 1
    print(f"{pages} pages, {count} findings", file=sys.stderr)
    return 1 if count or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
