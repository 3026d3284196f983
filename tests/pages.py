"""Faults of the rendered site, a line each: `python tests/pages.py _docs` (needs Chromium).

With pages as further arguments (`attention.html`), only those are opened.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import closing
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import websocket  # of jupyterlab

HEAVY = 400_000  # bytes of a page and its pictures; what all pages share is not counted
WIDE = """
const faults = [], main = document.querySelector('main');
for (const pre of main.querySelectorAll('pre'))
  if (pre.offsetParent && pre.scrollWidth > pre.clientWidth + 1)
    faults.push('code does not fit: ' + pre.innerText.trim().slice(0, 50));
let level = 0;
for (const h of main.querySelectorAll('h1, h2, h3, h4, h5, h6')) {
  const now = +h.tagName[1];
  if (now > level + 1 || (now === 1 && level))
    faults.push(`h${now} after h${level}: ` + h.innerText.slice(0, 40));
  level = now;
}
for (const img of document.images)
  if (!img.alt && !img.closest('[aria-hidden]')) faults.push('no alt text: ' + img.src);
for (const svg of main.querySelectorAll('svg'))
  if (!svg.ariaLabel && !svg.closest('[aria-hidden]')) faults.push('no words for an inline SVG');
if (document.querySelector('a.colab')) {
  const long = p => p.innerText.length > 60 && !p.closest('header') && !p.querySelector('a.colab');
  const first = [...main.querySelectorAll('p')].find(long);
  if (first.getBoundingClientRect().bottom > innerHeight)
    faults.push('first sentence ends at ' + Math.round(first.getBoundingClientRect().bottom));
}
return faults;
"""

NARROW = """
const width = document.documentElement.clientWidth, faults = [];
if (document.documentElement.scrollWidth <= width) return faults;
const boxed = e => e && e !== document.body &&
  (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(e).overflowX)
   || getComputedStyle(e).position === 'fixed' || boxed(e.parentElement));
for (const e of document.body.querySelectorAll('*'))
  if (e.getBoundingClientRect().right > width + 1 && !boxed(e) && !e.closest('svg'))
    faults.push(`${Math.round(e.getBoundingClientRect().right)} px: <${e.tagName} `
      + `class="${e.className}"> ` + e.innerText?.slice(0, 40));
return faults.slice(-1);
"""

CONTRAST = """
const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const known = {}, faults = {};
function rgba(colour) {
  pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
  return known[colour] ??= [...pen.getImageData(0, 0, 1, 1).data].map(x => x / 255);
}
function over(top, below) { return [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])); }
function ground(e) {
  if (!e) return [1, 1, 1];
  const colour = rgba(getComputedStyle(e).backgroundColor);
  return colour[3] === 1 ? colour : over(colour, ground(e.parentElement));
}
function light(c) {
  const [r, g, b] = c.map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b + .05;
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
  if (!text || e.closest('svg, script, style, noscript') || !e.checkVisibility()) continue;
  const style = getComputedStyle(e), below = ground(e), size = parseFloat(style.fontSize);
  const pair = [light(over(rgba(style.color), below)), light(below)];
  const ratio = Math.max(...pair) / Math.min(...pair);
  if (ratio < (size >= 24 ? 3 : 4.49))
    faults[e.tagName + e.className] ??=
      `contrast ${ratio.toFixed(1)}: <${e.tagName} class="${e.className}"> ` + text.slice(0, 40);
}
return Object.values(faults);
"""


class Page(HTMLParser):
    "The places of a page, and where its links go."

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links = {"", "top"}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found.get("id"), found.get("name")}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


class Browser:
    "One tab of a headless Chromium, driven by the DevTools protocol."

    def __init__(self, folder: str):
        words = "chromium --headless --no-sandbox --disable-gpu --remote-debugging-port=0".split()
        words += ["--remote-allow-origins=*", f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        host = next(urlsplit(x.split()[-1]).netloc for x in self.process.stderr if "ws://" in x)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        new = urllib.request.Request(f"http://{host}/json/new", method="PUT")
        address = json.load(urllib.request.urlopen(new))["webSocketDebuggerUrl"]
        self.socket = websocket.create_connection(address, timeout=60)
        self.number, self.events = 0, []
        self("enable", "Page"), self("enable", "Network")

    def __call__(self, method: str, domain: str, **params) -> dict:
        self.number += 1
        words = dict(id=self.number, method=f"{domain}.{method}", params=params)
        self.socket.send(json.dumps(words))
        while (answer := json.loads(self.socket.recv())).get("id") != self.number:
            self.events.append(answer)
        return answer["result"]

    def size(self, width: int, height: int):
        how = dict(deviceScaleFactor=1, mobile=False)
        self("setDeviceMetricsOverride", "Emulation", width=width, height=height, **how)

    def open(self, url: str, dark: bool = False) -> list[dict]:
        "Load a page; what happened meanwhile."
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        self("setEmulatedMedia", "Emulation", features=[scheme])
        self.events = []
        self("navigate", "Page", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(json.loads(self.socket.recv()))
        return self.events

    def ask(self, script: str) -> list[str]:
        wait = "await new Promise(r => requestAnimationFrame(() => setTimeout(r, 200)));"
        code = f"(async () => {{ {wait} {script} }})()"
        done = self("evaluate", "Runtime", expression=code, returnByValue=True, awaitPromise=True)
        return done["result"].get("value", [str(done)])

    def close(self):
        self.process.terminate()
        self.process.wait()


def dead_links(site: Path, name: str, pages: dict[str, Page]) -> list[str]:
    "Links of a page to files or fragments of the site that are not there."
    faults = []
    for link in sorted(x for x in set(pages[name].links) if not re.match(r"[a-z]+:", x)):
        goal = urlsplit(urljoin(f"/{name}", link))
        where = unquote(goal.path).lstrip("/") or "index.html"
        there = unquote(goal.fragment) in pages[where].ids if where in pages else True
        if not there or not (site / where).is_file():
            faults.append(f"dead link: {link}")
    return faults


def main(site: Path, only: list[str]) -> int:
    away = {"site_libs", "404.html"}  # the addresses of 404.html begin with the site's own folder
    paths = [p for p in sorted(site.rglob("*.html")) if not away & set(p.parts)]
    pages = {p.relative_to(site).as_posix(): Page(p) for p in paths}
    SimpleHTTPRequestHandler.log_message = ThreadingHTTPServer.handle_error = lambda *words: None
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    start, faults = f"http://127.0.0.1:{server.server_port}/", 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with closing(Browser(folder)) as browser:
            for name in only or pages:
                browser.size(1400, 900)
                asked = browser.open(start + name)
                sent = [e for e in asked if e.get("method") == "Network.requestWillBeSent"]
                urls = {e["params"]["request"]["url"] for e in sent}
                found = dead_links(site, name, pages)
                found += [f"asks {u}" for u in sorted(urls) if not u.startswith((start, "data:"))]
                files = {site / name, *(site / unquote(urlsplit(u).path).lstrip("/") for u in urls)}
                own = [f for f in files if f.is_file() and "site_libs" not in f.parts]
                weight = sum(f.stat().st_size for f in own if f.name != "search.json")
                found += [f"weighs {weight:,} bytes"] * (weight > HEAVY)
                found += browser.ask(WIDE) + browser.ask(CONTRAST)
                browser.size(390, 844)
                found += [f"phone, {x}" for x in browser.ask(NARROW)]
                browser.open(start + name, dark=True)
                found += [f"dark, {x}" for x in browser.ask(CONTRAST)]
                for fault in found:
                    print(f"{name}: {fault}", flush=True)
                faults += len(found)
    print(f"{len(only or pages)} pages, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
