"""What a run survives: listeners that die, a closed terminal, a full disk, too little memory."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import cramnb

from cramnb.train.checkpoint import checkpoints
from cramnb.cli import main
from cramnb.core import CramError
from cramnb.run.runs import lock_run
from cramnb.run.watch import Log

WORDS = (
    "data=files data.vocab_size=500 data.seq_length=32 data.heldout=0.3 arch.hidden_size=32 "
    "arch.intermediate_size=64 arch.num_hidden_layers=2 arch.num_attention_heads=2 "
    "train.progress=updates train.batch_size=8 train.eval_rows=16 impl.microbatch_size=4 "
    "impl.device=cpu impl.threads=1"
).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory, texts) -> list[str]:
    "Words that train on a corpus which is prepared already."
    place = tmp_path_factory.mktemp("survival")
    words = [*WORDS, f"data.files={texts}", f"impl.path={place}"]
    done = cramnb("data", *words, "train.max_updates=1", cwd=place)
    assert done.returncode == 0, done.stderr
    return words


def start(*words: str, cwd: Path, **options) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "cramnb", "pretrain", "name=run", *words]
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **options)


def wait_for_updates(run, folder, n=10):
    log, end = folder / "metrics.jsonl", time.monotonic() + 120
    while not log.exists() or log.read_bytes().count(b"\n") < n:
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", [None, signal.SIGINT, signal.SIGTERM])
def test_who_listens_may_die_and_the_run_goes_on(how, home, tmp_path):
    "As in `cramnb … 2>&1 | tee log`, with tee killed alone, or together with the run by Ctrl-C."
    run = start(
        *home,
        f"train.max_updates={10_000 if how else 200}",
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    folder = tmp_path / "runs/run"
    run.stdout.readline()
    if how:
        wait_for_updates(run, folder)
    run.stdout.close()
    if how:
        run.send_signal(how)
    assert run.wait(120) == 0 and checkpoints(folder / "checkpoints")
    assert (folder / "pretrain.json").exists() == (not how)


def test_a_full_disk_under_the_output_is_no_end(home, tmp_path):
    with open("/dev/full", "w") as full:
        run = start(*home, "train.max_updates=20", cwd=tmp_path, stdout=full, stderr=full)
        assert run.wait(120) == 0 and (tmp_path / "runs/run/pretrain.json").exists()


def test_a_closed_terminal_saves_and_nohup_stays_deaf(home, tmp_path):
    run = start(*home, "train.max_updates=10000", cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for_updates(run, tmp_path / "runs/run")
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGHUP)  # the shell repeats what the terminal has sent
    assert "Continue with" in run.communicate(timeout=60)[1] and run.returncode == 0
    assert checkpoints(tmp_path / "runs/run/checkpoints")
    deaf = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    run = start(*home, "fresh=True", "train.max_updates=300", cwd=tmp_path, preexec_fn=deaf)
    time.sleep(1)
    wait_for_updates(run, tmp_path / "runs/run")
    run.send_signal(signal.SIGHUP)
    assert run.wait(120) == 0 and (tmp_path / "runs/run/pretrain.json").exists()


# --- a full disk


def test_rows_that_a_full_disk_refused_follow_when_there_is_room(tmp_path):
    told, path = [], tmp_path / "metrics.jsonl"
    log = Log(path, say=told.append)
    disk = log.file
    for update in range(1, 7):
        log.file = disk if update in (1, 4, 6) else open("/dev/full", "wb", buffering=0)
        log.write(dict(update=update, loss=1.0))
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [*range(1, 7)]
    assert (
        len(told) == 2 and "No space left" in told[0] and [r["update"] for r in log.rows][-1] == 6
    )


def test_a_run_outlives_a_limit_on_the_size_of_files(home, tmp_path):
    "The log outgrows it, weights do not: nothing but rows of the log is lost."
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (110_000, 110_000))
    words = [*home, "arch.hidden_size=16", "train.max_updates=450", "impl.save_every=0.02"]
    run = start(*words, cwd=tmp_path, stdout=subprocess.PIPE, preexec_fn=small)
    out = run.communicate(timeout=300)[0]
    folder = tmp_path / "runs/run"
    assert run.returncode == 0 and (folder / "pretrain.json").exists(), out
    assert out.count("metrics.jsonl cannot be written (File too large)") == 1
    assert (folder / "metrics.jsonl").stat().st_size == 110_000
    assert [c.name for c in checkpoints(folder / "checkpoints")][-1] == "update_00000450"


# --- going on


@pytest.fixture
def stopped(home, tmp_path, monkeypatch):
    "A run that was killed just before its end."
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "name=run", *home, "train.max_updates=60", "impl.save_every=0.0001"]
    assert main(words) == 0
    run = tmp_path / "runs/run"
    (run / "pretrain.json").unlink()
    shutil.rmtree(checkpoints(run / "checkpoints")[-1])
    return words, run


def test_a_checkpoint_of_another_run_is_refused(stopped, capsys):
    words, run = stopped
    other = [word.replace("name=run", "name=other") for word in words] + ["seed=1"]
    assert main(other) == 0
    there = run.parent / "other"
    (there / "pretrain.json").unlink()
    shutil.rmtree(there / "checkpoints")
    shutil.copytree(run / "checkpoints", there / "checkpoints")
    capsys.readouterr()
    assert main(other) == 2
    err = capsys.readouterr().err.strip()
    assert "another run" in err and "fresh=True" in err and err.count("\n") == 0


def test_a_run_that_computes_in_another_way_says_so_and_the_same_way_says_nothing(stopped, capsys):
    words, run = stopped
    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Going on at" in out and "was written with" not in out
    how = ["impl.precision=bfloat16", "impl.attn_implementation=eager", "impl.threads=2"]
    assert main([w.replace("name=run", "name=copy") for w in words] + how) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "was written with" in line]
    for part in ("precision float32 (now bfloat16)", "attention sdpa (now eager)", "threads 1"):
        assert len(told) == 1 and part in told[0]


def test_rows_of_the_log_that_lost_their_numbers_are_left_out(stopped):
    words, run = stopped
    log = run / "metrics.jsonl"
    rows = log.read_text().splitlines()
    rows[-5:-3] = ['{"update": 56}', '{"update": 57, "loss": 5.0, "tokens": null}']
    log.write_text("\n".join(rows) + "\n")
    assert main(words) == 0 and (run / "pretrain.json").exists()
    assert len(log.read_text().splitlines()) >= 58


def test_two_names_of_one_folder_have_one_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with lock_run(tmp_path / "run"), pytest.raises(CramError, match="at work"):
        with lock_run(tmp_path / "link"):
            pass


# --- too little memory


@pytest.mark.parametrize("fits, code", [(1, 0), (0, 2)])
def test_too_little_memory_of_a_processor_is_met_as_that_of_a_card(
    fits, code, home, tmp_path, monkeypatch, capsys
):
    "Passes are halved; where not even one row fits, one line says what to do."
    from cramnb.run import run

    plain, passes = run.mlm_loss, []

    def loss(model, batch):
        passes.append(len(batch.input_ids))
        if len(passes) > 20 and passes[-1] > fits and torch.is_grad_enabled():
            torch.empty(2**60)  # the error that torch itself raises
        return plain(model, batch)

    monkeypatch.setattr(run, "mlm_loss", loss)
    monkeypatch.chdir(tmp_path)
    words = [*home, "train.max_updates=30", "impl.save_every=0.0001"]
    assert main(["pretrain", "name=short", *words]) == code
    out, err = capsys.readouterr()
    assert "passes of 1 sequences" in out
    if code:
        (line,) = [line for line in err.splitlines() if line.startswith("cramnb: ")]
        assert "memory" in line and "impl.microbatch_size" in line
        assert checkpoints(tmp_path / "runs/short/checkpoints")
