"""The main job, as a user runs it: raw text to score report, stopped, killed, continued, on real
data."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, beside, cramnb
from execnb.shell import CaptureShell
from test_repository import cells, source
from toy import SMALL

from cramnb.cli import main
from cramnb.run.watch import CLOCKED
from cramnb.train.tuning import Way

LITTLE = "eval.epochs=1 eval.max_train_examples=50 eval.max_seq_length=32".split()
SMALL = [*SMALL, "impl.microbatch_size=8", "impl.save_every=1e-6", *LITTLE]
FEW = ["eval.tasks=acceptability", *SMALL[-3:]]


def start(*words: str, cwd: Path) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("CRAMNB_DATA", None)
    command = [sys.executable, "-m", "cramnb", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=pipe, stderr=pipe)


def wait_for(condition, run, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None and time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def rows(folder: Path) -> list[dict]:
    "The log of a run."
    path = folder / "metrics.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


@pytest.fixture(scope="module")
def done(tmp_path_factory, texts):
    "What the command leaves and says, run as a user does; 12 updates."
    folder = tmp_path_factory.mktemp("cram")
    words = ["data=files", f"data.files={texts}", *SMALL, "train.max_updates=12"]
    first = cramnb("cram", *words, cwd=folder)
    assert first.returncode == 0, first.stderr
    return folder, first, words


@pytest.fixture
def here(done, monkeypatch):
    "The folder in which the finished run lies, as the working directory."
    monkeypatch.chdir(done[0])
    monkeypatch.delenv("CRAMNB_DATA", raising=False)
    return done[0]


def test_cram_writes_everything_and_says_where(done):
    run, first = done[0] / "runs/cram", done[1]
    report = (run / "report.md").read_text()
    for word in ("held-out loss", "acceptability", "order", "similarity", "train.lr", "run.png"):
        assert word in report
    assert (run / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert {"elapsed", "loss", "lr", "batch_size", "tokens"} <= set(rows(run)[0])
    assert [r["update"] for r in rows(run)] == list(range(1, 13))
    for word in ("| task |", "Report:", "Model:", "corpora"):
        assert word in first.stdout
    assert "pretraining" in first.stderr and "Traceback" not in first.stderr


def test_notebook_and_command_walk_the_same_path(tmp_path, monkeypatch):
    "The cells of the day, up to its run, and `cramnb cram` with the same words: equal rows."
    monkeypatch.chdir(tmp_path)
    shell = CaptureShell(mpl_format=None)
    for cell in cells(ROOT / "nbs/21_cram.ipynb", "code"):
        code = source(cell)
        if "#| eval: false" in code:
            continue
        if code.startswith("scale = "):
            code = "scale, budget = 'tiny', '16384 tokens'"
        shell.run(code + ";")
        assert not shell.exc, shell.exc
        if "run, scores = day(" in code:
            break
    run = shell.user_ns["run"].folder
    words = shell.user_ns["words_of"]("tiny", "16384 tokens")
    work = Path(shell.user_ns["work"].name)
    monkeypatch.chdir(work)
    assert main(["cram", *words, "name=mine"]) == 0
    same = [[{k: r[k] for k in r if k not in CLOCKED} for r in rows(work / f)] for f in (run, MINE)]
    assert len(same[0]) > 3 and same[0] == same[1]
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (work / MINE / weights).read_bytes()
    scores = [json.loads((work / f / "glue.json").read_text())["scores"] for f in (run, MINE)]
    assert scores[0] == scores[1]


MINE = "runs/mine"


def test_a_second_run_reuses_the_corpus_and_takes_the_next_name(here, done, capsys):
    assert main(["pretrain", *done[2], "train.max_updates=2"]) == 0
    out = capsys.readouterr().out
    assert "Reusing the prepared corpus" in out and "runs/cram-2" in out


@pytest.mark.parametrize("checkpoint", ["best", "untrained"])
def test_eval_takes_each_form_of_a_checkpoint(checkpoint, here, capsys):
    assert main(["eval", "name=cram", f"eval.checkpoint={checkpoint}", *FEW]) == 0
    assert "| acceptability |" in capsys.readouterr().out
    best = {p.name for p in (here / "runs/cram/best").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= best


def test_a_run_with_another_recipe_is_not_mixed_up(here, done, capsys):
    assert main(["pretrain", "name=cram", *done[2], "train.lr=1e-3", "data.seq_length=64"]) == 2
    told = capsys.readouterr().err
    assert "train.lr was 0.016 and is now 0.001" in told and "fresh=True" in told
    assert "data.seq_length was 32 and is now 64" in told
    assert main(["eval", "name=nobody"]) == 2 and "nobody" in capsys.readouterr().err


def test_dry_run_keeps_nothing(here, done, capsys):
    before = sorted((here / "runs").iterdir())
    assert main(["pretrain", *done[2], "dryrun=True"]) == 0
    assert "2 updates" in capsys.readouterr().out and sorted((here / "runs").iterdir()) == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on_where_it_was(how, here, done, tmp_path, capsys):
    name = f"name=long{int(how)}"
    words = ["pretrain", name, *done[2], "train.max_updates=300"]
    run, folder = start(*words, cwd=here), here / "runs" / name[5:]
    wait_for(lambda: len(list(folder.glob("checkpoints/update_????????"))) >= 2, run)
    run.send_signal(how)
    out, err = run.communicate(timeout=60)
    assert not (folder / "pretrain.json").exists()
    if how != signal.SIGKILL:
        assert run.returncode == 0 and "checkpoint is saved" in err and "Traceback" not in err
        assert f"Continue with: cramnb pretrain {name}" in err
    newest = sorted((folder / "checkpoints").glob("update_????????"))[-1]
    if how == signal.SIGINT:  # the disk has spoilt it
        os.truncate(newest / "optimizer.safetensors", 1000)
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Going on at" in out
    assert (f"{newest.name} is damaged" in out) == (how == signal.SIGINT)
    assert [r["update"] for r in rows(folder)] == list(range(1, 301))
    assert json.loads((folder / "pretrain.json").read_text())["tokens"] == 300 * 16 * 32
    if how == signal.SIGTERM:
        assert main([*words, "fresh=True", "train.max_updates=3"]) == 0
        assert "Going on at" not in capsys.readouterr().out and len(rows(folder)) == 3


@pytest.mark.parametrize(
    "how, words, seen",
    [
        (signal.SIGINT, ["data", "data.max_megabytes=8"], "corpora/*.partial"),
        (signal.SIGTERM, ["cram", "eval.epochs=50", "eval.max_train_examples=0"], "runs/*/eval/*"),
    ],
)
def test_ctrl_c_and_preemption_while_preparing_and_while_scoring(how, words, seen, done, tmp_path):
    if words[0] == "cram":
        words = ["cram", *done[2], *words[1:], "train.max_updates=2"]
    run = start(*words, cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob(seen)), run)
    run.send_signal(how)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and f"Continue with: cramnb {words[0]}" in err, err
    assert "Traceback" not in err


def test_the_same_command_on_real_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CRAMNB_DATA", str(beside("data")))
    monkeypatch.chdir(tmp_path)
    words = "data=files data.max_megabytes=2 train.max_updates=12 eval=GLUE_sane"
    tasks = ["eval.tasks=cola,rte", *SMALL[-3:]]
    assert main(["cram", *words.split(), *SMALL, *tasks]) == 0
    out = capsys.readouterr().out
    assert "| cola | matthews |" in out and "| rte | accuracy |" in out and "Mean of 2" in out


def planned(words, **world):
    "What `say_plan` says before a run of these words."
    from types import SimpleNamespace as S

    from cramnb.cram import say_plan
    from cramnb.recipe import compose

    told, corpus = [], S(vocab_size=4096, rows=range(50_000))
    say_plan(compose(words), corpus, **world, say=told.append)
    return told


@pytest.fixture
def measured(monkeypatch):
    "A machine that does so many tokens a second, and is not asked twice."
    from cramnb.run import plan

    asked = []

    def rate_here(*words):
        asked.append(words)
        return 10_000.0, Way()

    monkeypatch.setattr(plan, "rate_here", rate_here)
    return asked


@pytest.mark.parametrize(
    "words, processes, head",
    [
        (["budget=3m"], 2, "3m00s: 3.6 million tokens, 0.56 times the corpus"),
        (
            ["train.progress=tokens", "train.max_tokens=36000000"],
            1,
            "train.max_tokens=36000000, about 1 hour: 36.0 million tokens",
        ),
    ],
)
def test_a_long_run_says_its_plan_in_three_lines(words, processes, head, measured, tmp_path):
    told = planned([f"base_dir={tmp_path}", *words], processes=processes)
    assert len(told) == 3 and told[2].startswith(head)


@pytest.mark.parametrize(
    "words", [["budget=45s"], ["train.progress=updates", "train.max_updates=30"]]
)
def test_a_short_run_measures_nothing(words, measured, tmp_path):
    assert planned([f"base_dir={tmp_path}", *words]) == [] and measured == []


@pytest.mark.parametrize("left", ["pretrain.json", "checkpoints/update_00000007/state.json"])
def test_a_run_that_is_over_or_goes_on_is_not_planned_again(left, measured, tmp_path):
    (tmp_path / "old" / left).parent.mkdir(parents=True)
    (tmp_path / "old" / left).write_text("{}")
    assert planned([f"base_dir={tmp_path}", "name=old", "budget=24"]) == [] and measured == []


def test_a_long_fine_tuning_says_its_plan_and_a_short_one_does_not(measured, tmp_path):
    from dataclasses import replace
    from types import SimpleNamespace as S

    from cramnb.cram import say_exams
    from cramnb.recipe import compose, preset

    recipe = compose("eval.trials=5 eval.max_train_examples=0 eval.max_seq_length=128".split())
    exams = [("rte", dict(train=range(2490)), ""), ("cola", dict(train=range(8551)), "")]
    ours, foreign = S(run=tmp_path, where=tmp_path), S(run=None, where="hf://x")
    told = []
    say_exams(recipe, exams, ours, told.append)
    tokens = 11_041 * recipe.eval.epochs * 5 * 128
    assert len(told) == 3 and f"At most {tokens / 1e6:,.1f} million" in told[2]
    told.clear()
    say_exams(recipe, exams, foreign, told.append)
    assert len(told) == 3 and len(measured) == 1
    told.clear()
    say_exams(recipe, [("rte", dict(train=range(50)), "")], ours, told.append)
    assert told == []
    large = replace(recipe, arch=preset("arch", "crammed-bert"))
    large.impl.memory = "100MB"  # too small to pretrain it; to fine-tune it, perhaps not
    say_exams(large, exams, ours, told.append)
    assert len(told) == 3 and "The speed is not known" in told[1]


def test_a_corpus_is_published_beside_itself_and_never_over_something(tmp_path, monkeypatch):
    from types import SimpleNamespace as S

    from cramnb.run import hub as publish
    from cramnb.cli import publish_verb
    from cramnb.core import CramError
    from cramnb.run import run

    rows = S(parts=[S(shape=(7, 64))])
    monkeypatch.setattr(run.Corpus, "load", lambda folder: S(vocab_size=1000, rows=rows))
    monkeypatch.setattr(publish, "publish_corpus", lambda corpus, target, push: target)
    told = []
    publish_verb([f"corpus={tmp_path / 'mine'}"], told.append)
    assert "data.vocab_size=1000 data.seq_length=64" in told[0] and "mine-hub" in told[0]
    (tmp_path / "mine-hub").mkdir()
    with pytest.raises(CramError, match="is there already"):
        publish_verb([f"corpus={tmp_path / 'mine'}"], told.append)
