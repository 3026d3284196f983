"""What a run survives: listeners that die, a closed terminal, a full disk, too little memory."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import cramnb

from cramnb.train.checkpoint import checkpoints

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
