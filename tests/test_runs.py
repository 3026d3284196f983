"""The folder of a run: opened, locked, listed, and the weights that eval.checkpoint means."""

import json
import math

import pytest
from folders import fake_run
from toy import SMALL

from cramnb.core import CramError, write_json
from cramnb.cli import main
from cramnb.recipe import compose, tiny
from cramnb.run.run import Checkpoint, resolve_checkpoint
from cramnb.run.runs import (
    check_folder,
    is_running,
    list_runs,
    lock_run,
    make_folder,
    read_log,
    read_recipe,
    runs_table,
)

RUN = "train.max_updates=4 impl.microbatch_size=8 impl.device=cpu".split()
EVAL = ["eval.tasks=order", "eval.epochs=1", "eval.max_train_examples=32", "eval.max_seq_length=32"]


# --- looking


def test_runs_are_listed_whatever_state_they_are_in(tmp_path):
    base = tmp_path / "runs"
    (
        fake_run(base, "half"),
        fake_run(
            base,
            "ready",
            pretrain=dict(loss=3.21, heldout=3.3, tokens=12_345, device_name="NVIDIA H200"),
        ),
    )
    (
        fake_run(
            base, "judged", pretrain=dict(loss=3.0, heldout=3.1, tokens=1), glue=dict(mean=0.8071)
        ),
        fake_run(base, "torn", pretrain='{"loss": 3'),
        fake_run(base, "odd", pretrain="[1, 2]"),
    )
    (
        fake_run(base, "texts", pretrain=dict(loss="low", tokens=[1], device_name="\x1b[2J\n|")),
        fake_run(base, "scrap", glue='{"mean": {}}'),
    )
    fake_run(base, "empty", rows=0)
    busy = fake_run(base, "busy")
    write_json(fake_run(base, "none") / "recipe.json", [])
    (base / "thesis").mkdir()
    (base / "notes.txt").write_text("x")
    with lock_run(busy):
        assert is_running(busy)
        states = {r["name"]: r["state"] for r in list_runs(base)}
    assert (
        states["half"] == "unfinished at 50 %"
        and states["ready"] == "finished"
        and states["judged"] == "scored"
        and states["busy"] == "running now, 50 %"
    )
    assert (
        states["torn"] == states["odd"] == "damaged (pretrain.json)"
        and states["none"] == "damaged (recipe.json)"
        and states["empty"] == "unfinished at 0 %"
        and "thesis" not in states
    )
    assert (
        not is_running(busy)
        and not is_running(base / "half")
        and not (base / ".half.lock").exists()
    )
    table = runs_table(list_runs(base))
    assert (
        "80.7" in table
        and "12,345" in table
        and "NVIDIA H200" in table
        and "3.210" in table
        and len({len(line) for line in table.splitlines()}) == 1
    )
    assert "\x1b" not in table, "control characters of a file reach the terminal"


def test_looking_does_not_keep_a_run_from_starting(tmp_path):
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    with lock_run(folder):
        pass
    for _ in range(20):
        is_running(folder)
        with lock_run(folder):
            assert is_running(folder)


def test_a_log_holds_numbers_and_nothing_else_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"update": 1, "loss": 2.5}\n{"update": 2, "loss": "low"}\n{"update": "3"}\n'
        + "[" * 100_000
        + '\n{"update": 4, "loss": null, "tokens": 7}\n'
    )
    assert [r["update"] for r in read_log(path)] == [1, 4] and math.isnan(read_log(path)[1]["loss"])
    assert [r["update"] for r in read_log(path, needs=("tokens",))] == [4] and [
        r["update"] for r in read_log(path, last=3)
    ] == [1]


# --- opening


def test_a_folder_that_cannot_be_used_is_told_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("x")
    for base, told in (("file", "no folder"), ("file/below", "no folder")):
        with pytest.raises(CramError, match=told):
            check_folder(compose([f"base_dir={tmp_path / base}"]))
    (tmp_path / "runs/thesis").mkdir(parents=True)
    (tmp_path / "runs/thesis/chapter.txt").write_text("x")
    with pytest.raises(CramError, match="holds no run"):
        make_folder(compose([f"base_dir={tmp_path / 'runs'}", "name=thesis", "fresh=True"]))
    check_folder(compose([f"base_dir={tmp_path / 'new' / 'deep'}"]))
    assert not (tmp_path / "new").exists() and (tmp_path / "runs/thesis/chapter.txt").exists()


# --- what eval.checkpoint means


@pytest.fixture(scope="module")
def done(tmp_path_factory, texts):
    "A finished run with a kept checkpoint, and the words that made it."
    folder = tmp_path_factory.mktemp("resolved")
    words = [
        "data=files",
        f"data.files={texts}",
        f"impl.path={folder / 'corpora'}",
        f"base_dir={folder / 'runs'}",
        *SMALL,
        *RUN,
    ]
    assert main(["pretrain", "name=mine", *words, "impl.save_every=1e-6"]) == 0
    return folder, words


def test_each_form_of_a_checkpoint_is_resolved_once(done):
    folder, words = done
    run = folder / "runs/mine"
    find = lambda value, name="mine": resolve_checkpoint(folder / "runs" / name, str(value))
    assert find("latest") == Checkpoint(run / "model", run, own=True, label="run mine, latest")
    assert find("untrained").untrained and not find("untrained").own
    best = find("best")
    assert (
        best.where == run / "best"
        and best.run == run
        and not best.own
        and (best.where / "tokenizer.json").exists()
        and (best.where / "model.safetensors").exists()
    )
    assert (
        find("mine", "other") == Checkpoint(run / "model", run, label="mine")
        and find(run / "model", "other").run == run
    )
    foreign = folder / "elsewhere" / "bert"
    if not foreign.exists():
        import shutil

        shutil.copytree(run / "model", foreign)
    found = find(foreign, "other")
    assert (
        found.where == foreign
        and found.run is None
        and not found.own
        and find(f"{foreign}-untrained", "other").untrained
    )
    with pytest.raises(CramError, match="Did you mean 'mine'"):
        find("mien")
    with pytest.raises(CramError, match="no run"):
        find("latest", "other")


@pytest.mark.parametrize("name", ["hf:///nowhere", "hf://./nowhere", "hf://~/nowhere-untrained"])
def test_a_folder_that_is_not_there_is_reported_in_our_words(done, name):
    with pytest.raises(CramError, match=f"eval.checkpoint={name}: there is no such folder"):
        resolve_checkpoint(done[0] / "runs/mine", name)


# --- the whole way


def test_trials_are_found_again_and_never_those_of_other_weights(done, capsys):
    folder, words = done
    run = folder / "runs/mine"
    files = lambda: {p: p.stat().st_mtime_ns for p in run.glob("eval/*/*.seed0.json")}
    assert main(["eval", "name=mine", *words, *EVAL]) == 0
    first = files()
    assert len(first) == 1 and json.loads((run / "glue.json").read_text())["checkpoint"] == str(
        run / "model"
    )
    assert main(["eval", "name=mine", *words, *EVAL]) == 0 and files() == first, (
        "a trial was run again"
    )
    weights = run / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x01
    weights.write_bytes(data)
    assert main(["eval", "name=mine", *words, *EVAL]) == 0
    second = files()
    assert set(first) < set(second) and len(second) == 2, "trials of other weights were reused"
    assert main(["eval", "name=mine", *words, *EVAL, "eval.lr=1e-5"]) == 0 and len(files()) == 3
    data[-1] ^= 0x01
    weights.write_bytes(data)


def test_starting_over_is_said_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tiny("name=a", "fresh=True"))
    (folder / "checkpoints").mkdir()
    make_folder(read_recipe(folder))
    assert (folder / "checkpoints").is_dir(), "the stored recipe would throw its run away"
