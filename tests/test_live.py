"""The page of a run over HTTP, and in a real browser where there is one."""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from cramnb.run import page as live
from cramnb.core import CramError, write_json
from folders import SUMMARY
from cramnb.run.page import LiveServer, curve, live_data, live_page, watch_run
from cramnb.run.runs import lock_run

HOSTILE = "<img src=x onerror=document.title=1>"
CHROMIUM = shutil.which("chromium")


def row(u, **more):
    numbers = dict(update=u, elapsed=10.0 * u, loss=7.0 - u / 10, progress=u / 100, tokens=64 * u)
    return numbers | dict(tokens_per_second=6.4, memory_gb=1.5, seconds_left=90.0) | more


def grow(folder, *rows):
    with (folder / "metrics.jsonl").open("a") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "monday"
    out.mkdir()
    write_json(out / "recipe.json", dict(train=dict(lr=1)))
    grow(out, *(row(u) for u in range(1, 6)))
    return out


@contextmanager
def serving(folder):
    with LiveServer(folder, port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, method="GET", **headers):
    host, port = server.server_address
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_page_and_data_over_http_while_a_run_goes_on(folder):
    with serving(folder) as server, lock_run(folder):
        answer, page = ask(server, "/")
        assert answer.status == 200 and "monday" in page and "://" not in page
        first = json.loads(ask(server, "/data")[1])
        grow(folder, row(6, loss=1.0, heldout=2.0))
        second = json.loads(ask(server, "/data")[1])
    assert first["kind"] == "running" and first["texts"]["left"] == "1m30s"
    assert first["texts"]["memory_gb"] == "1.50 GB" and first["texts"]["heldout"] == "–"
    assert second["texts"]["update"] == "6" and second["texts"]["heldout"] == "2.000"
    assert len(second["line"].split()) == 6 and second["dots"] == "M760.0,260.0h0"


def test_the_page_is_read_only_and_answers_local_names_only(folder):
    before = {p: p.read_bytes() for p in folder.iterdir()}
    with serving(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, "/data", method)[0].status == 501
        assert ask(server, "/../recipe.json")[0].status == 404
        assert ask(server, "/", Host="evil.example:80")[0].status == 403
        assert ask(server, "/", Host="localhost:80")[0].status == 200
        policy = ask(server, "/")[0].headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe-inline'; s" not in policy
    assert {p: p.read_bytes() for p in folder.iterdir()} == before


def test_each_end_of_a_run_is_shown(folder):
    assert live_data(folder)["kind"] == "died"
    with lock_run(folder):
        assert live_data(folder)["kind"] == "running"
    write_json(folder / "pretrain.json", SUMMARY | dict(heldout=2.5))
    ended = live_data(folder)
    assert ended["kind"] == "ended" and ended["texts"]["heldout"] == "2.500"
    assert ended["texts"]["left"] == "–"
    (folder / "pretrain.json").write_text("{")
    assert live_data(folder)["kind"] == "damaged"


def test_a_run_that_hangs_is_told(folder, monkeypatch):
    with lock_run(folder):
        assert "no new update" not in live_data(folder)["texts"]["state"]
        monkeypatch.setattr(live, "_SLOW", -1)
        assert "no new update for" in live_data(folder)["texts"]["state"]


def test_a_killed_process_is_shown_as_died(folder):
    code = (
        "import os, signal; from pathlib import Path; from cramnb.run.runs import lock_run\n"
        f"with lock_run(Path({str(folder)!r})):\n"
        "    print('locked', flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "locked\n"
    assert live_data(folder)["kind"] == "running"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert live_data(folder)["kind"] == "died"


def test_numbers_that_are_none_and_not_finite(folder):
    grow(folder, row(6, loss=None, memory_gb=None, heldout=None), row(7, loss=float("nan")))
    (folder / "metrics.jsonl").open("a").write('{"update": 8, "loss"')  # the machine died here
    told = live_data(folder)
    json.dumps(told, allow_nan=False)
    assert told["texts"]["update"] == "7" and told["texts"]["memory_gb"] == "1.50 GB"
    assert curve([]) == dict.fromkeys(("line", "dots", "high", "low", "end"), "")
    flat = curve([dict(elapsed=0.0, loss=1.0)] * 2)
    assert flat["line"] == "0.0,0.0 0.0,0.0"


def test_hostile_names_are_text():
    page = live_page(HOSTILE + "\x1b[2J")
    assert "<img" not in page and "&lt;img" in page and "\x1b" not in page


def test_mistakes_are_one_line(folder):
    with pytest.raises(CramError, match="Did you mean 'monday'"):
        watch_run(folder.parent, "munday")
    with pytest.raises(CramError, match="holds no run"):
        watch_run(folder)
    with pytest.raises(CramError, match="'tuesday' is not a run in .* There is none"):
        watch_run(folder, "tuesday")
    with serving(folder) as server, pytest.raises(CramError, match="cannot be used"):
        watch_run(folder.parent, "monday", port=server.server_address[1])


def test_ctrl_c_ends_the_page(folder, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", interrupted)
    said = []
    watch_run(folder.parent, port=0, say=said.append)
    assert said[0].startswith("monday: http://127.0.0.1:")
    watch_run(folder.parent, "monday", "0.0.0.0", 0, said.append)
    assert any("Everyone who reaches this address" in line for line in said)


def dom(address, milliseconds):
    "The page as a headless browser has it after so much of its own time."
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={milliseconds}"]
    command = [CHROMIUM, *flags, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def points(text):
    return text.split('<polyline id="line" points="')[1].split('"')[0].split()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here")
def test_in_a_browser_the_chart_appears_and_updates(folder, monkeypatch):
    real, asked = live_data, []

    def next_update(path):  # the run goes on between two questions
        asked.append(path)
        grow(folder, row(5 + len(asked)))
        return real(path)

    monkeypatch.setattr(live, "live_data", next_update)
    with serving(folder) as server, lock_run(folder):
        text = dom(server.address, 9000)
    assert len(asked) >= 3, "the page asks again"
    assert len(points(text)) == 5 + len(asked)
    assert f'<dd id="update">{5 + len(asked)}</dd>' in text and 'class="running"' in text


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here")
def test_in_a_browser_a_dead_run_with_a_hostile_name(folder):
    bad = folder.rename(folder.parent / HOSTILE)
    with serving(bad) as server:
        text = dom(server.address, 1000)
    assert 'class="died"' in text and "its process has ended" in text
    assert "<img" not in text and "<title>1</title>" not in text


def test_a_run_that_is_deleted_meanwhile_is_told(folder, capfd):
    with serving(folder) as server:
        shutil.rmtree(folder)
        answer, told = ask(server, "/data")
        assert answer.status == 200 and "cannot be read" in json.loads(told)["texts"]["state"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_log_that_takes_long_is_read_less_often(folder, monkeypatch):
    reads = []

    def slow(folder):
        reads.append(1)
        time.sleep(0.25)
        return dict(kind="running")

    monkeypatch.setattr(live, "live_data", slow)
    with serving(folder) as server:
        assert [ask(server, "/data")[1] for _ in range(3)] == ['{"kind": "running"}'] * 3
    assert len(reads) == 1


@pytest.mark.parametrize("host", ["", "a" * 99, "x\0", "::1", "no such"])
def test_an_address_that_cannot_be_is_one_line(host, folder):
    with pytest.raises(CramError, match="^host="):
        LiveServer(folder, host, 0)
