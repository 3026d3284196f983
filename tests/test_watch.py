"""Watching a run: what the machine does, the trackers, the screen, and how a sick run looks."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import cramnb
from toy import SMALL

from cramnb.run import watch as trackers_module
from cramnb.core import CramError
from cramnb.cli import main
from cramnb.run.report import diagnose
from cramnb.recipe import compose
from cramnb.run import report
from cramnb.run.runs import read_log
from cramnb.run.watch import Trackers
from cramnb.run.watch import CLOCKED, Bars, Energy, Log, Meter

TOLD = ["impl.tensorboard=True", "wandb.enabled=True", "wandb.project=trial", "wandb.mode=offline"]


def words(texts, *more) -> list[str]:
    text = ["data=files", f"data.files={texts}", "impl.microbatch_size=16"]
    return ["pretrain", *text, *SMALL, *more]


@pytest.fixture(scope="module")
def done(tmp_path_factory, texts):
    "A finished run, made by the real command."
    folder = tmp_path_factory.mktemp("watched")
    run = cramnb(*words(texts, "name=both", "train.max_updates=5"), cwd=folder)
    assert run.returncode == 0, run.stderr
    return folder


# --- the machine


def test_flops_share_and_memory():
    row = dict(update=10, tokens=1000, elapsed=2.0, tokens_per_second=500.0)
    train = compose(["train.progress=updates", "train.max_updates=40"]).train
    out = Meter(torch.device("cpu"), 2e9)(row, train, 1.0)
    assert (
        out["tflops"] == pytest.approx(1.0)
        and out["peak_share"] is None
        and out["energy_kwh"] is None
        and out["memory_gb"] > 0.05
    )
    assert out["seconds_left"] == pytest.approx(30 * 2 / 10) and set(CLOCKED) - {
        "elapsed",
        "tokens_per_second",
    } == set(out) - set(row)
    assert row.keys() == {"update", "tokens", "elapsed", "tokens_per_second"}, (
        "the row of the loop was changed"
    )


class FakeNVML(types.ModuleType):
    def __init__(self):
        super().__init__("pynvml")
        self.mj = 5_000_000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if "MIG" in uuid:
            raise RuntimeError("a slice of a card")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.mj


def test_energy_by_counter_and_not_at_all(monkeypatch):
    now = [0.0]
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    energy = Energy(["GPU-a", "GPU-b"], clock=lambda: now[0])
    assert energy.joules() == 0
    now[0], nvml.mj = 10.0, 5_300_000
    assert energy.joules() == pytest.approx(600), "two cards, 300 J each"
    nvml.mj = 9_999_999
    assert energy.joules() == pytest.approx(600), "looked more than once a second"
    assert Energy(["MIG-1"]).joules() is None and Energy([]).joules() is None

    def gone(handle):
        raise RuntimeError("driver lost")

    nvml.nvmlDeviceGetTotalEnergyConsumption = gone
    now[0] = 30.0
    assert energy.joules() is None, "a driver that dies must not end the run"


# --- trackers


def wandb_steps(folder: Path) -> list[tuple[str, list[tuple[int, dict]]]]:
    """What W&B's own files hold: (run id, [(step, values)]) for each time the run was opened.
    Records lie in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as pb

    out = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole, rows, ident = path.read_bytes(), 7, b"", [], ""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
            if kind not in (1, 4):
                continue
            record = pb.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "run":
                ident = f"{record.run.project}/{record.run.run_id}"
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    (
                        record.history.step.num,
                        {
                            i.key or ".".join(i.nested_key): json.loads(i.value_json)
                            for i in record.history.item
                        },
                    )
                )
        out.append((ident, rows))
    return out


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    "What TensorBoard shows."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_a_killed_run_goes_on_in_the_same_place_and_doubles_no_step(tmp_path, texts, monkeypatch):
    pytest.importorskip("wandb"), pytest.importorskip("tensorboard")
    updates, save = "train.max_updates=150", "impl.save_every=1e-6"
    command = words(texts, "name=killed", updates, save, *TOLD)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("CRAMNB_DATA", None)
    options = dict(cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = subprocess.Popen([sys.executable, "-m", "cramnb", *command], **options)
    folder, end = tmp_path / "runs/killed", time.monotonic() + 120
    while len(read_log(folder / "metrics.jsonl")) < 40:
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    rows, opened = read_log(folder / "metrics.jsonl"), wandb_steps(folder)
    assert [r["update"] for r in rows] == list(range(1, 151))
    assert len(opened) == 2 and len({ident for ident, _ in opened}) == 1, "another run id"
    told = [s for _, steps in opened for s, _ in steps]
    assert len(set(told)) == len(told) and told == sorted(told) and told[-1] == 150, (
        "a step was told twice"
    )
    gap = [b - a for a, b in zip([0, *told], told) if b != a + 1]
    assert len(gap) <= 1, "W&B may lose the moment before a kill, and nothing else"
    shown = board(folder)["loss"]
    assert [s for s, _ in shown] == list(range(1, 151)) and [v for _, v in shown] == pytest.approx(
        [r["loss"] for r in rows], rel=1e-4
    )


@pytest.mark.parametrize(
    "option, library", [("wandb.enabled=True", "wandb"), ("impl.tensorboard=True", "tensorboard")]
)
def test_a_missing_library_is_told_before_anything_begins(
    option, library, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / library).mkdir()
    monkeypatch.syspath_prepend(
        str(tmp_path)
    )  # wandb leaves a folder of its own name: that is no library
    import importlib.machinery

    monkeypatch.setattr(
        trackers_module, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None)
    )
    assert main(["pretrain", option]) == 2
    err = capsys.readouterr().err
    assert library in err and "pip install 'cramnb[track]'" in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == [library], "something was begun"


def test_a_tracker_that_does_not_open_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    recipe, said = compose(["wandb.enabled=True"]), []

    def down(**_):
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", down)
    with Trackers(recipe, tmp_path, said.append) as trackers:
        trackers.open(Log(tmp_path / "metrics.jsonl"))
    assert len(said) == 1 and "no network" in said[0]

    def stranger(**_):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", stranger)
    with (
        pytest.raises(CramError, match="wandb login"),
        Trackers(recipe, tmp_path, said.append) as trackers,
    ):
        trackers.open(Log(tmp_path / "metrics.jsonl"))


def test_online_the_server_says_where_to_go_on(tmp_path, monkeypatch):
    logged, asked = [], []
    run = types.SimpleNamespace(
        resumed=True,
        step=41,
        url="https://wandb.ai/x",
        log=lambda values, step: logged.append(step),
        summary={},
        finish=lambda: None,
    )
    fake = types.ModuleType("wandb")
    fake.init, fake.Settings, fake.errors = (
        (lambda **k: asked.append(k) or run),
        dict,
        types.SimpleNamespace(UsageError=KeyError),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with Trackers(
            compose(["wandb.enabled=True", "wandb.project=p"]), tmp_path, lambda text: None
        ) as trackers:
            trackers.open(log := Log(tmp_path / "metrics.jsonl"))
            for u in (39, 40, 41, 42):
                log.write(dict(update=u, loss=1.0))
    assert (
        logged == [41, 42] * 2
        and asked[0]["id"] == asked[1]["id"]
        and asked[0]["resume"] == "allow"
        and asked[0]["project"] == "p"
        and asked[0]["mode"] is None
    )


# --- the screen


def test_a_bar_on_a_terminal(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    bars = Bars()
    for n in range(1, 4):
        bars("pretraining", n, 3, loss=5.0 - n, heldout=None, tokens_per_second=12_345.0)
    bars.close()
    assert (
        "loss 2.00" in screen.getvalue()
        and "12,345 tokens/s" in screen.getvalue()
        and "\r" in screen.getvalue()
    )


# --- runs and pictures of runs


def test_the_commands_runs_and_plot(done, capsys, monkeypatch):
    monkeypatch.chdir(done)
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "| both " in out and "finished" in out and "1 CPU thread " in out
    assert (
        main(["plot", "both", "x=tokens", "out=two.png"]) == 0
        and Path("two.png").read_bytes()[:4] == b"\x89PNG"
        and "two.png" in capsys.readouterr().out
    )
    assert main(["plot"]) == 0 and b"<svg" in Path("runs/plot.svg").read_bytes()
    for bad, told in (
        (["plot", "bth"], "Did you mean 'both'?"),
        (["plot", "both", "x=tokns"], "'tokens'"),
        (["plot", "both", "out=a.doc"], ".svg"),
        (["plot", "both", "colour=red"], "colour"),
        (["runz"], "'runs'"),
    ):
        assert main(bad) == 2 and told in capsys.readouterr().err
    assert (
        main(["runs", "base_dir=nowhere"]) == 0
        and "no runs yet" in capsys.readouterr().out
        and not Path("nowhere").exists()
    )
    assert (
        main(["plot", "base_dir=nowhere"]) == 2 and "no run with a log" in capsys.readouterr().err
    )


def test_a_stage_ends_with_one_line(capsys):
    bars = Bars()
    for n in (0, 1, 2):
        bars("tokens", n, 2)
    bars.close()
    bars.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "100"], "told twice"
    bars("short", 5, 5)
    bars("next", 0, 1)
    bars.close()
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["short", "next"]


def test_sick_runs_are_told_from_healthy_ones():
    def rows(loss, rate=lambda u: 1000.0, skipped=0):
        return [
            dict(update=u, loss=loss(u), tokens_per_second=rate(u), skipped=skipped)
            for u in range(1, 201)
        ]

    healthy = lambda u: 3 + 4 * math.exp(-u / 40) + 0.05 * math.sin(u)
    assert diagnose(rows(healthy)) == [] and diagnose(rows(healthy)[:5]) == []
    assert (
        "diverges" in diagnose(rows(lambda u: healthy(u) + (0.05 * (u - 120) if u > 120 else 0)))[0]
    )
    assert "diverges" in diagnose(rows(lambda u: healthy(u) if u < 190 else float("nan")))[0]
    assert "not moved" in diagnose(rows(lambda u: 7.0 + 0.01 * math.sin(u)))[0]
    assert "tokens a second" in diagnose(rows(healthy, lambda u: 1000.0 if u < 170 else 300.0))[0]
    assert "came back" in diagnose(rows(lambda u: healthy(u) + (3.0 if 60 < u < 90 else 0)))[0]
    assert "diverges" in diagnose(rows(lambda u: 5.0 + 40 * min(1, u / 20)))[0], (
        "it never was better than at the start"
    )
    assert "3 updates were left out" in diagnose(rows(healthy, skipped=3))[0]


def test_a_report_without_its_corpus_keeps_the_data_card(tmp_path):
    assert report._data_part(tmp_path, None) == "", "a first report has no card to keep"
    card = "## Data\n\n### A corpus\n\n| rows | 5 |"
    (tmp_path / "report.md").write_text(f"# Run monday\n\n## Recipe\n\n{card}\n")
    assert report._data_part(tmp_path, None) == card
