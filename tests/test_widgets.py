"""A slider is moved in JupyterLab, in a real browser; without a browser its callback is called."""

import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest
from conftest import ROOT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PARTS = all(importlib.util.find_spec(name) for name in ("jupyterlab", "websocket", "ipykernel"))
CELL = """from cramnb.book.show import interact, show_tokens
words = 'Every fourth word is hidden from the model .'.split()

def masked(first):
    return show_tokens(words, [first])

view = interact(masked, dict(first=2), first=(0, 7))
view"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait(ask, seconds=120):
    "Ask until there is an answer."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if answer := ask():
                return answer
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError("waited too long")


class Page:
    "A page of the browser, by its debugging protocol."

    def __init__(self, port):
        import websocket

        where = f"http://127.0.0.1:{port}/json"
        pages = wait(lambda: json.load(urllib.request.urlopen(where, timeout=5)))
        page = next(p for p in pages if p["type"] == "page")
        self.socket = websocket.create_connection(
            page["webSocketDebuggerUrl"], timeout=60, suppress_origin=True
        )
        self.number = itertools.count(1)

    def call(self, method, **values):
        number = next(self.number)
        self.socket.send(json.dumps(dict(id=number, method=method, params=values)))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == number:
                return answer.get("result", {})

    def js(self, text):
        answer = self.call("Runtime.evaluate", expression=text, returnByValue=True)
        return answer.get("result", {}).get("value")

    def key(self, name, code):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )


@pytest.fixture
def lab(tmp_path):
    "JupyterLab with one notebook, open in a browser without a window."
    metadata = dict(kernelspec=dict(name="python3", display_name="python3", language="python"))
    cell = dict(cell_type="code", id="aaaa", metadata={}, source=CELL, outputs=[])
    notebook = dict(cells=[cell | dict(execution_count=None)], metadata=metadata)
    text = json.dumps(notebook | dict(nbformat=4, nbformat_minor=5))
    (tmp_path / "w.ipynb").write_text(text, encoding="utf-8")
    port, debug, root = free_port(), free_port(), str(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": root}
    env |= {"JUPYTER_RUNTIME_DIR": root, "HOME": root, "PYTHONWARNINGS": "ignore"}
    words = f"-m jupyterlab --no-browser --allow-root --ServerApp.port={port}".split()
    words += ["--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    words += ["--LabApp.expose_app_in_browser=True"]
    quiet = dict(env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/lab/tree/w.ipynb"
    flags = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-port={debug}".split()
    flags += [f"--user-data-dir={root}/browser", "--window-size=1200,900", url]
    started = [subprocess.Popen([sys.executable, *words], **quiet)]
    try:
        wait(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=5))
        started.append(subprocess.Popen([BROWSER, *flags], **quiet))
        yield Page(debug)
    finally:
        for process in started[::-1]:
            process.terminate()
            process.wait(30)


@pytest.mark.skipif(not (BROWSER and PARTS), reason="no browser, or no JupyterLab")
def test_a_slider_redraws_its_picture_in_jupyterlab(lab):
    wait(lambda: lab.js("!!(window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell'))"))
    kernel = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    wait(lambda: lab.js(kernel))
    lab.js("void jupyterapp.commands.execute('notebook:run-all-cells')")
    pictures = "[...document.querySelectorAll('.jp-OutputArea img')].map(i => i.src).join(' ')"
    shown = f"decodeURIComponent({pictures})"  # JupyterLab shows an SVG as an image
    wait(lambda: "&lt;word&gt;" in (lab.js(shown) or ""))
    wait(lambda: lab.js("!!document.querySelector('.noUi-handle')"))
    lab.js("document.querySelector('.noUi-handle').focus()")
    lab.key("ArrowRight", 39)
    wait(lambda: "&lt;is&gt;" in (lab.js(shown) or ""), 30)
    assert "&lt;word&gt;" not in lab.js(shown)
    text = lab.js("document.querySelector('.jp-OutputArea').innerText")
    assert "Error" not in text and "Traceback" not in text


@pytest.fixture
def shown(monkeypatch):
    "What a kernel was told to show; this one only remembers it."
    pytest.importorskip("ipywidgets")
    from cramnb.book import show

    values = []
    handle = SimpleNamespace(update=values.append)

    def display(*given, display_id=None):
        values.extend(given)
        return handle if display_id else None

    monkeypatch.setattr(show, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(show, "display", display)
    return values


def test_a_slider_redraws_when_it_is_let_go(shown):
    from cramnb.book import show

    view = show.interact(lambda first: f"at {first}", dict(first=2), first=(0, 7))
    slider = view.controls["first"]
    assert shown[-1] == "at 2" and slider.continuous_update is False
    slider.value = 5
    assert shown[-1] == "at 5"


def test_without_a_kernel_the_static_frame_stands_alone(capsys):
    from cramnb.book.show import interact

    view = interact(lambda first: f"at {first}", dict(first=2), first=(0, 7))
    assert "at 2" in capsys.readouterr().out and not view.controls
