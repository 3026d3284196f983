"""Several processes, one run: same numbers, one clock, one voice, and nobody left waiting."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import cramnb, server
from toy import ARCH, SMALL
from torch.distributed import DistStoreError, HashStore

from cramnb.train.checkpoint import checkpoints, load_checkpoint, restore, save_checkpoint
from cramnb.core import LostRank
from cramnb.train.distributed import World, noticing, parallelise
from cramnb.train.distributed import (
    agreed_checkpoint,
    first_then_rest,
    fresh_store,
    join_world,
    share,
)
from cramnb.text.masking import mask_tokens, microbatch_generator
from cramnb.model.mlm import build_model
from cramnb.options import Impl
from cramnb.recipe import preset
from cramnb.train.loop import Stopped, Loop

DATA = 5 + (torch.arange(256)[:, None] + torch.arange(16)) % 12  # rows that count up: easy to learn
DATA[7, 2:] = 0  # a row with fewer tokens to ask for than others


def batches(start, n, number, x):
    rows = torch.arange(start, start + n) % len(DATA)
    return mask_tokens(
        DATA[rows],
        mlm_probability=0.25,
        mask_token_id=4,
        vocab_size=100,
        generator=microbatch_generator(0, number),
    )


def make(
    world=None,
    microbatch_size=8,
    clock=time.monotonic,
    should_stop=bool,
    progress="updates",
    budget=1.0,
    **changes,
) -> Loop:
    torch.manual_seed(0)
    usual = dict(
        batch_size=44,
        batch_size_ramp=0.5,
        progress=progress,
        max_updates=8,
        lr=1e-3,
        gradient_clipping=0.5,
        optimizer="adamw",
        eps=1e-6,
    )
    train = replace(preset("train", "tiny"), **usual | changes)
    options = dict(
        budget=budget, microbatch_size=microbatch_size, clock=clock, should_stop=should_stop
    )
    return parallelise(world or World(), build_model(ARCH, 100), train, batches, **options)


def numbers(t) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.model.parameters()])


def averages(t) -> list:
    return [
        v
        for o in getattr(t.optimizer, "parts", [t.optimizer])
        for s in o.state.values()
        for v in s.values()
        if torch.is_tensor(v)
    ]


def together(
    work, folder: Path, *args, size: int = 2, timeout: float = 60, minutes: float = 1.0
) -> list:
    """Run `work(world, *args)` in processes that meet as under torchrun; what each returned, or
    the name of its error."""
    fork, at = server(), port()
    ps = [
        fork.Process(target=_one, args=(work, folder, rank, size, at, minutes, args))
        for rank in range(size)
    ]
    for p in ps:
        p.start()
    end = time.monotonic() + timeout
    for p in ps:
        p.join(max(0.1, end - time.monotonic()))
    left = [p for p in ps if p.is_alive()]
    for p in left:
        p.kill()
    assert not left, "processes wait for ever"
    return [
        torch.load(f, weights_only=True) if (f := folder / f"{rank}.pt").exists() else None
        for rank in range(size)
    ]


def _one(work, folder, rank, size, port, minutes, args):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        with join_world(Impl(dist_timeout=minutes, device="cpu")) as world:
            result = work(world, *args)
    except Exception as e:
        result = dict(error=type(e).__name__, text=str(e))
    torch.save(result, folder / f"{rank}.pt")


# --- the same numbers


def _train(world, changes):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    t, sent, reads = make(world, **changes), [], []

    def count(state, bucket):
        sent.append(1)
        return allreduce_hook(state, bucket)

    t.ddp.register_comm_hook(None, count)
    own = t.ddp.module.loss

    def look(model, batch):
        reads.append(batch.input_ids.shape[0])
        return own(model, batch)

    t.ddp.module.loss = look
    rows = list(t.updates())
    return dict(
        weights=numbers(t),
        averages=averages(t),
        losses=[r["loss"] for r in rows],
        sizes=[r["batch_size"] for r in rows],
        sent=len(sent),
        reads=reads,
        tokens=t.state.tokens,
        sequences=t.state.sequences,
        norms=[r["grad_norm"] for r in rows],
    )


@pytest.mark.parametrize(
    "changes", [dict(), dict(optimizer="muon", lr=4e-3)], ids=["adamw", "muon"]
)
def test_two_processes_equal_one_with_twice_the_microbatch(changes, tmp_path):
    a, b = together(_train, tmp_path, changes)
    assert torch.equal(a["weights"], b["weights"]) and all(
        map(torch.equal, a["averages"], b["averages"])
    )  # the ranks agree to the last bit
    t = make(microbatch_size=16, **changes)
    rows = list(t.updates())
    torch.testing.assert_close(a["weights"], numbers(t), atol=1e-5, rtol=0)
    assert a["losses"] == b["losses"] == pytest.approx([r["loss"] for r in rows], abs=1e-5) and a[
        "norms"
    ] == pytest.approx([r["grad_norm"] for r in rows], rel=1e-3)
    assert (
        a["sizes"] == [r["batch_size"] for r in rows]
        and a["sizes"][0] == 16
        and a["sizes"][-1] == 44
    )  # the ramp counts passes of all together
    assert (a["tokens"], a["sequences"]) == (t.state.tokens, t.state.sequences)
    passes = t.state.microbatch
    assert (
        len(a["reads"]) == passes > 8 and a["sent"] % 8 == 0 and a["sent"] < 2 * passes
    )  # gradients travel once an update, not once a pass
    assert sum(a["reads"]) + sum(b["reads"]) == t.state.sequences


# --- one decision for all


def _spoilt(world):
    t = make(world, max_skipped=5)
    if world.rank == 1:  # only one of the two meets something that is not finite
        own = t.ddp.module.loss
        t.ddp.module.loss = lambda model, batch: (
            own(model, batch) * (float("nan") if t.state.update == 2 else 1)
        )
    return dict(skipped=[r["skipped"] for r in t.updates()], weights=numbers(t))


def test_an_update_that_is_not_finite_on_one_is_left_out_on_all(tmp_path):
    a, b = together(_spoilt, tmp_path)
    assert a["skipped"] == b["skipped"] == [0, 0, 1, 1, 1, 1, 1, 1] and torch.equal(
        a["weights"], b["weights"]
    )


def _clocks(world):
    ticks = iter(range(0, 10**9, 700 if world.is_first else 7))  # the clocks of two machines
    t = make(world, progress="time", clock=lambda: next(ticks))
    return dict(rows=[[r["elapsed"], r["lr"], r["batch_size"]] for r in t.updates()])


def test_the_clock_of_the_first_is_the_clock_of_all(tmp_path):
    a, b = together(_clocks, tmp_path)
    assert a == b and [r[0] for r in a["rows"]] == [700, 1400, 2100, 2800, 3500, 4200]


def _asked(world):
    calls = []
    t = make(world, should_stop=lambda: calls.append(1) or world.rank == 1 and len(calls) > 6)
    try:
        for row in t.updates():
            pass
    except Stopped:
        return dict(update=t.state.update, sequences=t.state.sequences, weights=numbers(t))


def test_a_stop_asked_of_one_stops_all_at_the_same_pass(tmp_path):
    a, b = together(_asked, tmp_path)
    assert (
        a["update"] == b["update"] > 0
        and a["sequences"] == b["sequences"]
        and torch.equal(a["weights"], b["weights"])
    )


def _talk(world):
    made = first_then_rest(
        world, lambda: time.sleep(3 * world.is_first) or world.rank
    )  # longer than the timeout of the group
    return dict(
        made=made,
        shared=share(world, dict(rank=world.rank, text="é", rows=[1.5, None])),
        any=[world.any(world.rank == 1), world.any(False)],
        smallest=world.smallest(5 + world.rank),
        first=world.from_first(world.rank + 0.25),
    )


def test_agreements_and_a_wait_longer_than_any_timeout(tmp_path):
    for rank, r in enumerate(together(_talk, tmp_path, minutes=0.03)):
        assert r == dict(
            made=rank,
            shared=dict(rank=0, text="é", rows=[1.5, None]),
            any=[True, False],
            smallest=5,
            first=0.25,
        )


def _go_on(t, world, folder, until):
    "From the last checkpoint of a folder to an update, which is saved there."
    if found := agreed_checkpoint(folder, world):
        restore(found, t)
    for row in t.updates():
        if row["update"] == until:
            break
    if world.is_first:
        save_checkpoint(folder, t, extra=dict(microbatch_size=t.microbatch_size))


def _dropout(world, folder, until):
    t = make(world, dropout=True, batch_size_ramp=0.0)
    _go_on(t, world, folder, until)
    return dict(weights=numbers(t))


def test_resume_is_exact_with_dropout_although_only_the_first_has_saved(tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = together(_dropout, tmp_path / "whole", tmp_path / "whole/checkpoints", 6)
    together(_dropout, tmp_path / "parts", tmp_path / "parts/checkpoints", 3)
    parts = together(_dropout, tmp_path / "parts", tmp_path / "parts/checkpoints", 6)
    assert torch.equal(whole[0]["weights"], parts[0]["weights"]) and torch.equal(
        parts[0]["weights"], parts[1]["weights"]
    )
    told, alone = [], make(dropout=True, batch_size_ramp=0.0)
    load_checkpoint(tmp_path / "parts/checkpoints", alone, told.append)  # one goes on for two
    assert (
        torch.equal(numbers(alone), parts[0]["weights"]) and "microbatch_size 16 (now 8)" in told[0]
    )


def _updates(world, folder, until):
    t = make(world, microbatch_size=16 // world.size)
    _go_on(t, world, folder, until)
    return dict(weights=numbers(t), sequences=t.state.sequences, passes=t.state.microbatch)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["one then two", "two then one"])
def test_a_run_goes_on_with_another_number_of_processes(sizes, tmp_path):
    "Same rows, masks and batches; weights differ by rounding: 1e-5 after eight updates."
    kept = tmp_path / "checkpoints"
    for size, until in zip(sizes, (4, 8)):
        if size == 2:
            there = together(_updates, tmp_path, kept, until)[0]
        else:
            there = _updates(World(), kept, until)
    whole = _updates(World(), tmp_path / "whole", 8)
    assert (there["sequences"], there["passes"]) == (whole["sequences"], whole["passes"])
    torch.testing.assert_close(there["weights"], whole["weights"], atol=1e-5, rtol=0)


# --- the dead and the silent


def test_processes_that_were_restarted_read_nothing_of_those_before():
    "torchrun gives them the same store, with addresses of the dead in it."
    store = HashStore()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            new = list(pool.map(lambda rank: fresh_store(store, rank, 3, 0.5), range(3)))
        assert not new[2].check(["address"])
        new[0].set("address", "of this time")
        assert new[1].get("address") == new[2].get("address") == b"of this time"
    with pytest.raises(DistStoreError, match="process 1 has not come"):
        fresh_store(store, 0, 2, 0.001)  # an old question is no answer


def _dies(world, how):
    t = make(world, max_updates=10**6)
    for row in t.updates():
        if row["update"] == 3 and world.rank == 1:
            os.kill(os.getpid(), how) if how else time.sleep(8)


@pytest.mark.parametrize("how", [signal.SIGKILL, 0], ids=["killed", "silent"])
def test_nobody_waits_for_the_dead_or_the_silent(how, tmp_path):
    first, second = together(_dies, tmp_path, how, timeout=30, minutes=0.05)
    assert (
        first["error"] == "LostRank"
        and "Process 0 of 2" in first["text"]
        and "impl.dist_timeout" in first["text"]
    )
    assert (
        second is None if how else second["error"] == "LostRank"
    )  # who wakes up late finds the others gone


def test_a_lost_process_is_told_by_torchs_own_errors_and_by_nothing_else():
    from torch import distributed as dist

    lost = [
        dist.DistBackendError("aborted"),
        dist.DistNetworkError("reset"),
        dist.DistStoreError("wait timeout"),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ]
    other = [
        RuntimeError("Cannot restore state"),
        RuntimeError("timed out waiting for the store"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("gloo/"),
    ]
    for error in lost:
        with pytest.raises(LostRank, match="Process 1 of 2"), noticing(World(1, 2)):
            raise error
    for error in other:
        with pytest.raises(type(error)) as e, noticing(World(1, 2)):
            raise error
        assert e.value is error


# --- the command


ALONE = "--nproc_per_node=2 --standalone"


def torchrun(*words: str, cwd: Path, how: str = ALONE) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != "CRAMNB_DATA"} | dict(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
    )
    run = f"-m torch.distributed.run {how} -m cramnb".split()
    options = dict(cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, *run, *words], **options)


def port() -> int:
    "One that nobody uses."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(pid: int) -> list[int]:
    "The processes that torchrun has started, by rank."
    return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def small(texts: Path) -> list[str]:
    words = "arch=hf-bert-tiny impl.dist_backend=gloo impl.device=cpu impl.microbatch_size=4"
    return ["data=files", f"data.files={texts}", *words.split(), *SMALL]


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def updates(folder: Path) -> int:
    return len(p.read_text().splitlines()) if (p := folder / "metrics.jsonl").exists() else 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_the_command_prepares_once_stops_together_goes_on_and_ends(tmp_path, texts):
    words = ["pretrain", "name=two", *small(texts), "train.max_updates=300", "impl.save_every=0.02"]
    run, folder = torchrun(*words, cwd=tmp_path), tmp_path / "runs/two"
    wait_for(lambda: updates(folder) >= 10)
    os.kill(children(run.pid)[1], signal.SIGTERM)  # one of the two is asked to stop
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and err.count("checkpoint is saved") == 1 and "Traceback" not in err
    assert (
        "Continue with: torchrun --nproc_per_node=2 --standalone -m cramnb pretrain name=two" in err
    )
    assert (
        out.count("Corpus prepared") == 1
        and len(list((tmp_path / "corpora").glob("*/card.json"))) == 1
    )
    stopped = updates(folder)
    assert (
        checkpoints(folder / "checkpoints")[-1].name == f"update_{stopped:08d}"
        and not (folder / "pretrain.json").exists()
    )

    run = torchrun(*words, cwd=tmp_path)  # goes on, and one of the two dies
    wait_for(lambda: updates(folder) >= stopped + 10)
    began = time.monotonic()
    os.kill(children(run.pid)[1], signal.SIGKILL)
    out, err = run.communicate(timeout=60)
    assert run.returncode != 0 and time.monotonic() - began < 40 and "Going on at" in out
    assert "another process of this run has ended" in err and "Continue with: torchrun" in err

    done = cramnb(*words, cwd=tmp_path)  # one process may finish it
    assert done.returncode == 0, done.stderr
    assert "microbatch_size 8 (now 4)" in done.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in rows] == list(range(1, 301)) and rows[-1][
        "tokens"
    ] == 300 * 16 * 32


def test_two_machines_train_one_run_in_a_folder_that_both_see(tmp_path, texts):
    "Two torchruns meet at the loopback address, each in a working folder of its own."
    shared = [f"base_dir={tmp_path}/runs", f"impl.path={tmp_path}/corpora"]
    words = ["pretrain", "name=two", *shared, *small(texts), "train.max_updates=4"]
    meet = "--nnodes=2 --nproc_per_node=1 --rdzv_id=bert --rdzv_backend=c10d "
    meet += f"--rdzv_endpoint=127.0.0.1:{port()} --local_addr=127.0.0.1"
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    machines = [torchrun(*words, cwd=place, how=meet) for place in places]
    ends = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert not any(list(place.iterdir()) for place in places)
    assert len(list((tmp_path / "corpora").glob("*/card.json"))) == 1
    out, host = ends[0][0] + ends[1][0], socket.gethostname()
    assert out.count("Corpus prepared") == out.count(f"2 processes train on {host}.") == 1
    summary = json.loads((tmp_path / "runs/two/pretrain.json").read_text())
    assert summary["hosts"] == [host, host] and summary["updates"] == updates(tmp_path / "runs/two")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_torchrun_restarts_a_run_and_it_goes_on_from_its_checkpoint(tmp_path, texts):
    words = ["pretrain", "name=two", *small(texts), "train.max_updates=200", "impl.save_every=0.01"]
    folder = tmp_path / "runs/two"
    run = torchrun(*words, cwd=tmp_path, how=f"{ALONE} --max_restarts=1")
    wait_for(lambda: checkpoints(folder / "checkpoints"))
    os.kill(children(run.pid)[0], signal.SIGKILL)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert out.count("Going on at") == 1 and out.count("2 processes train on") == 2
    assert (folder / "pretrain.json").exists() and updates(folder) == 200
