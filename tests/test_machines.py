"""Text on several machines: workers of Dask, in folders of their own, beside one shared folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cramnb.text.store as store
from cramnb.core import CramError, Unfinished
from cramnb.options import Data
from cramnb.text.store import FILES, Corpus, dask_client, each_shard

pytest.importorskip("distributed", reason="the extra `dask` is not installed")
HOW = "--no-dashboard --host 127.0.0.1 --scheduler-file".split()


def start(kind: str, folder: Path, file: Path, *words: str) -> subprocess.Popen:
    folder.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=path)  # they import jobs of this file
    if kind == "worker":
        words = (*words, "--nthreads=1", "--nworkers=1", "--memory-limit=0")
    command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *HOW, str(file), *words]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    "A scheduler with two workers, each in a folder of its own."
    folder = tmp_path_factory.mktemp("dask")
    file = folder / "scheduler.json"
    there = [start("scheduler", folder / "scheduler", file, "--port=0")]
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end and there[0].poll() is None
        time.sleep(0.1)
    there += [start("worker", folder / name, file) for name in ("first", "second")]
    yield json.loads(file.read_text())["address"]
    for process in there:
        process.terminate()
    for process in there:
        process.wait(30)


def options(texts) -> Data:
    base = dict(source="files", files=str(texts), vocab_size=1000, seq_length=64, heldout=0.1)
    return Data(**base, deduplicate=True, trash_cutoff=0.4)


def pids(client) -> list[int]:
    return list(client.run(os.getpid).values())


def test_a_build_on_machines_has_the_bytes_of_one_machine_though_a_worker_dies(
    address, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr(store, "SHARD", 200_000)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    monkeypatch.chdir(tmp_path)
    alone, killed = Corpus.build(options(texts), "alone"), []

    def kill(stage, done, total):
        if stage == "cutting repeats" and done == 2:
            killed.append(pids(client)[0])
            os.kill(killed[0], signal.SIGKILL)

    with dask_client(address) as client:
        client.wait_for_workers(2, timeout=60)
        many = Corpus.build(options(texts), "many", kill)  # a folder relative to this process
        client.wait_for_workers(2, timeout=60)
        assert killed and killed[0] not in pids(client)  # another one took its place
    for name in FILES:
        assert (many.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
    assert many.card["counts"] == alone.card["counts"] and len(many.rows) > 100


def die(n):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(n):
    raise CramError(f"shard {n} is bad.")


def test_a_job_that_kills_each_worker_and_a_job_that_fails_are_reported(address):
    with dask_client(address) as client:
        client.wait_for_workers(1, timeout=60)
        with pytest.raises(CramError, match="shard [0-5] is bad"):
            each_shard(fail, list(range(6)), "cutting", 6, lambda *_: None)
        with pytest.raises(Unfinished, match="A process died while cutting: four workers"):
            each_shard(die, [0], "cutting", 1, lambda *_: None)


def test_a_worker_that_sees_another_disk_or_has_another_version_is_named(
    address, tmp_path, monkeypatch
):
    with dask_client(address) as client:
        client.wait_for_workers(1, timeout=60)
        lost = store.Shards(tmp_path / "here")
        with pytest.raises(Unfinished, match="00003.parquet is not seen on .* the same disk"):
            each_shard(lost.__getitem__, [3], "cutting", 4, lambda *_: None)
        monkeypatch.setattr(store, "version", lambda name: "0")
        with pytest.raises(CramError, match="tcp://.* of Dask has .*: install alike"):
            each_shard(fail, [0], "cutting", 1, lambda *_: None)


def test_an_address_where_nobody_answers_is_named():
    with pytest.raises(CramError, match="impl.dask=tcp://127.0.0.1:9: no scheduler answers"):
        with dask_client("tcp://127.0.0.1:9"):
            pass
    assert store._client() is None  # the next build stays here
