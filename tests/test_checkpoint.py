"""Stop, kill, damage, resume: a run loses nothing, and what is on disk is whole or not there."""

import itertools
import json
import os
import pickle
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from toy import SMALL, batches, model, recipe, weights
from conftest import server

from cramnb.train.checkpoint import (
    CheckpointManager,
    checkpoints,
    load_checkpoint,
    restore,
    save_checkpoint,
    take_tensors,
    verify,
)
from cramnb.text.store import Corpus
from cramnb.core import CramError
from cramnb.recipe import compose
from cramnb.train.loop import Stopped, Loop


def trainer(seed=0, clock=None, should_stop=lambda: False, budget=1.0, **changes) -> Loop:
    return Loop(
        model(seed),
        recipe(**changes),
        batches,
        budget=budget,
        microbatch_size=8,
        clock=clock or itertools.count().__next__,
        should_stop=should_stop,
    )


def go(t, until=10**9):
    for row in t.updates():
        if row["update"] >= until:
            break
    return t


# --- what is remembered


def test_the_loss_scaler_and_the_extra_values_come_back(tmp_path):
    def scaled():
        t = trainer()
        t.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return t

    t = scaled()
    t.scaler.load_state_dict(t.scaler.state_dict() | dict(scale=2.0, _growth_tracker=5))
    save_checkpoint(tmp_path, t, extra=dict(first_heldout=1.5, recipe=dict(name="x")))
    assert load_checkpoint(tmp_path, again := scaled()) == dict(
        first_heldout=1.5, recipe=dict(name="x")
    )
    assert (
        again.scaler.state_dict()["scale"] == 2.0
        and again.scaler.state_dict()["_growth_tracker"] == 5
    )


def test_averages_that_share_memory_are_saved_each_on_its_own(tmp_path):
    "As the code table of 8-bit AdamW, which all its averages share."
    t, table = go(trainer(optimizer="adamw"), 2), torch.arange(4.0)
    for state in t.optimizer.state.values():
        state["table"] = table
    save_checkpoint(tmp_path, t)
    load_checkpoint(tmp_path, again := trainer(optimizer="adamw"))
    tables = [state["table"] for state in again.optimizer.state.values()]
    assert len(tables) > 1 and all(torch.equal(one, table) for one in tables)


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path):
    (tmp_path / "update_00000007.12345.tmp").mkdir()
    save_checkpoint(tmp_path, go(trainer(), 2))
    assert [p.name for p in tmp_path.iterdir()] == ["update_00000002"]


def test_nothing_is_pickled(tmp_path, monkeypatch):
    made = save_checkpoint(tmp_path, go(trainer(optimizer="adafactor"), 2))
    assert sorted(p.name for p in made.iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "random.json",
        "state.json",
    ]

    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for where, name in (
        (torch, "load"),
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
    ):
        monkeypatch.setattr(where, name, refuse)
    load_checkpoint(tmp_path, t := trainer(optimizer="adafactor"))
    assert t.state.update == 2


# --- damage


def flip(p, at=-3):
    raw = bytearray(p.read_bytes())
    raw[at] ^= 1
    p.write_bytes(raw)


def as_folder(p):
    p.is_file() and p.unlink()
    p.mkdir(exist_ok=True)


DAMAGE = dict(
    flipped_average=lambda c: flip(c / "optimizer.safetensors"),
    flipped_state=lambda c: flip(c / "state.json", 40),
    cut=lambda c: os.truncate(c / "optimizer.safetensors", 100),
    missing=lambda c: (c / "model.safetensors").unlink(),
    empty_folder=lambda c: [p.unlink() for p in c.iterdir()],
    state_is_folder=lambda c: as_folder(c / "state.json"),
    random_is_gone=lambda c: (c / "random.json").unlink(missing_ok=True),
    no_object=lambda c: (c / "state.json").write_text("[]"),
)


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(harm, tmp_path):
    t, told = trainer(), []
    for row in t.updates():
        if row["update"] in (2, 4, 6):
            save_checkpoint(tmp_path, t, keep=2)
        if row["update"] == 4:
            at_four = weights(t)
        if row["update"] == 6:
            break
    assert [c.name for c in checkpoints(tmp_path)] == ["update_00000004", "update_00000006"]
    harm(checkpoints(tmp_path)[-1])
    assert verify(checkpoints(tmp_path)[-1]) and not verify(checkpoints(tmp_path)[0])
    load_checkpoint(tmp_path, t := trainer(seed=1), told.append)
    assert (
        t.state.update == 4
        and torch.equal(weights(t), at_four)
        and len(told) == 1
        and "update_00000006 is damaged" in told[0]
    )
    go(t, 5)
    save_checkpoint(tmp_path, t, keep=2)  # the damaged one has the higher number, and goes
    assert [c.name for c in checkpoints(tmp_path)] == ["update_00000004", "update_00000005"]
    for c in checkpoints(tmp_path):
        harm(c)
    with pytest.raises(CramError, match="All 2 checkpoints .* fresh=True"):
        load_checkpoint(tmp_path, t, told.append)


# --- which ones stay


def test_a_run_that_goes_on_knows_its_checkpoint_and_the_losses_up_to_there(tmp_path):
    t = trainer()
    saved = save_checkpoint(tmp_path, go(t, 2), heldout=3.0)
    save_checkpoint(tmp_path, go(t, 6), heldout=1.0)  # of a future that is to come again
    restore(saved, t)
    keep, written = CheckpointManager(tmp_path, t), (saved / "state.json").stat().st_mtime_ns
    assert keep.is_best(2.0) and not keep.is_best(3.5)
    assert keep() == saved and (saved / "state.json").stat().st_mtime_ns == written


def test_the_averages_do_not_hang_on_the_file(tmp_path):
    t = trainer()
    saved = save_checkpoint(tmp_path, go(t, 2))
    restore(saved, t := trainer(seed=1))
    take_tensors(t.optimizer.state_dict(), tensors := {})
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    path = saved / "optimizer.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


# --- a full disk


# --- killed


def _recipe(texts, folder):
    words = "train.max_updates=80 train.batch_size=8 train.batch_size_ramp=0.5 train.dropout=True "
    words += "impl.microbatch_size=4 impl.save_every=0.0001 impl.threads=1 impl.device=cpu"
    places = ["data=files", f"data.files={texts}", f"impl.path={folder}"]
    return compose([*SMALL, *words.split(), *places])


def _pretrain(texts, folder, run):
    from cramnb.run.run import Trainer, open_corpus, silent

    recipe = replace(_recipe(texts, folder), base_dir=str(run.parent), name=run.name)
    Trainer.from_recipe(recipe, open_corpus(recipe), silent, silent).fit()


def test_a_whole_run_killed_at_eight_moments_is_the_unbroken_run(texts, tmp_path):
    """Half of the kills fall while a checkpoint is being written, half just after an update was
    logged."""
    from cramnb.run.watch import CLOCKED

    torch.set_num_threads(1)
    Corpus.build(_recipe(texts, tmp_path / "corpora").data, tmp_path / "corpora")
    _pretrain(texts, tmp_path / "corpora", tmp_path / "whole")
    rng, fork, kills = random.Random(1), server(), 0
    log, saved = tmp_path / "broken/metrics.jsonl", tmp_path / "broken/checkpoints"

    def lines():
        return log.read_bytes().count(b"\n") if log.exists() else 0

    while kills < 8:
        where = texts, tmp_path / "corpora", tmp_path / "broken"
        p, before = fork.Process(target=_pretrain, args=where), checkpoints(saved)
        p.start()
        want = (int(before[-1].name[7:]) if before else 0) + rng.randrange(1, 5)
        while p.is_alive() and not (lines() >= want and (kills % 2 or list(saved.glob("*.tmp")))):
            time.sleep(0.001)
        p.kill()  # SIGKILL
        p.join()
        kills += 1
    _pretrain(texts, tmp_path / "corpora", tmp_path / "broken")
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if k not in CLOCKED}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "broken")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 80
    final = [checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("whole", "broken")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (final[0] / file).read_bytes() == (final[1] / file).read_bytes()
    states = [json.loads((c / "state.json").read_text()) for c in final]
    a, b = ({k: v for k, v in s["state"].items() if k != "elapsed"} for s in states)
    assert a == b
    assert (
        states[1]["extra"]["recipe"]["train"]["max_updates"] == 80
        and states[1]["extra"]["log_rows"] == 80
    )


def test_with_a_wall_clock_the_budget_is_one_and_no_row_is_read_twice_or_skipped(tmp_path):
    "Stopped, killed and continued under a clock that also runs between the processes."
    now, rng, kept, spent, t = [0.0], random.Random(2), [], [], None
    for life in range(40):
        now[0] += 10_000  # hours between two lives do not count
        asked, read = [False], []
        t = trainer(
            clock=lambda: now[0],
            progress="time",
            budget=0.5,
            batch_size_ramp=0.5,
            should_stop=lambda: asked[0],
        )
        load_checkpoint(tmp_path, t)
        kept = [
            r for r in kept if r < t.state.sequences
        ]  # what a kill has thrown away is done again
        own = t.batches

        def batches(start, n, number, x=0.0):
            now[0] += rng.uniform(5, 25)
            read.extend(range(start, start + n))
            return own(start, n, number, x)

        t.batches = batches
        death = t.state.update + rng.randrange(4, 9)
        try:
            for row in t.updates():
                if row["update"] % 3 == 0:
                    save_checkpoint(tmp_path, t)
                if row["update"] == death:
                    if life % 2:
                        break  # killed
                    asked[0] = True  # preempted: stops between two passes and saves
        except Stopped:
            save_checkpoint(tmp_path, t)
        kept += [r for r in read if r < t.state.sequences]
        spent.append(t.state.elapsed)
        if t.progress() >= 1:
            break
    assert t.progress() >= 1 and life > 2
    assert kept == list(range(t.state.sequences))  # each row once, in order, over all lives
    assert (
        1800 <= t.state.elapsed < 1800 + 2 * 25 + 1
    )  # the budget, and at most the update that was under way


def _wait_for_a_signal(ready, heard):
    from cramnb.train.distributed import Interruptible

    with Interruptible() as signals:
        ready.set()
        while True:
            if signals.asked:
                heard.set()
            time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(how, tmp_path):
    fork = server()
    ready, heard = fork.Event(), fork.Event()
    p = fork.Process(target=_wait_for_a_signal, args=(ready, heard))
    p.start()
    assert ready.wait(60)
    os.kill(p.pid, how)
    assert heard.wait(60) and p.is_alive()
    os.kill(p.pid, how)
    p.join(10)
    assert p.exitcode == -how
