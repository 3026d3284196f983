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

from cramnb.train.tuning import Way
from cramnb.run.watch import CLOCKED

SMALL = [
    "budget=5s",
    "data.vocab_size=1000",
    "data.heldout=0.3",
    "eval.epochs=1",
    "eval.max_train_examples=100",
    "train.eval_rows=64",
]


def start(*words: str, cwd: Path) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("CRAMNB_DATA", None)
    return subprocess.Popen(
        [sys.executable, "-m", "cramnb", *words],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def updates(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def done(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("cram")
    first = cramnb("cram", "data=files", f"data.files={texts}", *SMALL, cwd=folder)
    assert first.returncode == 0, first.stderr
    return folder, first


def test_cram_writes_everything_and_says_where(done):
    folder, first = done
    run = folder / "runs/cram"
    report = (run / "report.md").read_text()
    for word in (
        "tokens seen",
        "tokens per second",
        "FLOPs spent",
        "held-out loss",
        "unigram entropy",
        "acceptability",
        "order",
        "similarity",
        "train.lr",
        "after cutting repeats",
        "run.png",
    ):
        assert word in report
    assert (run / "run.png").read_bytes()[:4] == b"\x89PNG"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"update", "elapsed", "loss", "lr", "batch_size", "tokens"} <= set(rows[0]) and [
        r["update"] for r in rows
    ] == list(range(1, len(rows) + 1))
    for word in ("| task |", "Report:", "Model:", "corpora"):
        assert word in first.stdout
    assert "pretraining" in first.stderr and "Traceback" not in first.stderr


def test_the_model_is_a_hugging_face_folder(done):
    code = """import cramnb, sys
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
fill = pipeline('fill-mask', sys.argv[1])
print(type(model).__name__, len(tokenizer), len(fill('return the [MASK] of the list')))"""
    out = subprocess.run(
        [sys.executable, "-c", code, str(done[0] / "runs/cram/model")],
        text=True,
        capture_output=True,
        check=True,
    )
    assert out.stdout.split() == ["CrammedBertForMaskedLM", "1000", "5"]


def test_notebook_and_command_walk_the_same_path(tmp_path, monkeypatch):
    "The cells of the day, up to its run, and `cramnb cram` with the same words: equal rows."
    monkeypatch.chdir(tmp_path)
    shell = CaptureShell(mpl_format=None)
    for cell in cells(ROOT / "nbs/22_cram.ipynb", "code"):
        code = source(cell)
        if "#| eval: false" in code or "read_data(" in code or "log['" in code:
            continue
        if code.startswith("scale = "):
            code = "scale, budget = 'tiny', '16384 tokens'"
        shell.run(code + ";")
        assert not shell.exc, shell.exc
        if "folder = cram_verb(" in code:
            break
    run, words = Path(str(shell.user_ns["folder"])), shell.user_ns["words"]
    work = Path(shell.user_ns["work"].name)
    mine = cramnb("cram", *words, "name=mine", cwd=work)
    assert mine.returncode == 0, mine.stderr

    def rows(folder):
        log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in CLOCKED} for row in log]

    assert len(rows(run)) > 3 and rows(run) == rows(work / "runs/mine")
    same = "model/model.safetensors"
    assert (run / same).read_bytes() == (work / "runs/mine" / same).read_bytes()
    scores = [json.loads((f / "glue.json").read_text()) for f in (run, work / "runs/mine")]
    assert scores[0]["scores"] == scores[1]["scores"]


def test_a_second_run_reuses_the_corpus_and_takes_the_next_name(done, texts):
    folder, _ = done
    second = cramnb("cram", "data=files", f"data.files={texts}", *SMALL, cwd=folder)
    assert (
        second.returncode == 0
        and "Reusing the prepared corpus" in second.stdout
        and "runs/cram-2" in second.stdout
    )


def test_eval_of_the_best_checkpoint_and_of_a_named_run(done):
    folder, _ = done
    for checkpoint in ("best", "cram"):
        out = cramnb(
            "eval",
            "name=cram",
            f"eval.checkpoint={checkpoint}",
            "eval.tasks=acceptability",
            "eval.epochs=1",
            "eval.max_train_examples=50",
            cwd=folder,
        )
        assert out.returncode == 0 and "| acceptability |" in out.stdout, out.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (folder / "runs/cram/best").iterdir()
    }


def test_eval_continues_with_unfinished_trials(done):
    folder, _ = done
    words = [
        "eval",
        "name=cram",
        "eval=local",
        "eval.tasks=acceptability",
        "eval.epochs=1",
        "eval.max_train_examples=50",
    ]
    assert cramnb(*words, cwd=folder).returncode == 0
    before = {
        p: p.stat().st_mtime_ns
        for p in (folder / "runs/cram/eval").rglob("acceptability.seed0.json")
    }
    more = cramnb(*words, "eval.trials=2", cwd=folder)
    assert "2 trials" in more.stdout and all(p.stat().st_mtime_ns == t for p, t in before.items())
    blank = cramnb(*words, "eval.checkpoint=untrained", cwd=folder)
    assert blank.returncode == 0 and "acceptability" in blank.stdout


def test_a_run_with_another_recipe_is_not_mixed_up(done, texts):
    folder, _ = done
    clash = cramnb(
        "pretrain",
        "name=cram",
        "data=files",
        f"data.files={texts}",
        *SMALL,
        "train.lr=1e-3",
        cwd=folder,
    )
    assert clash.returncode == 2 and "train.lr" in clash.stderr and "fresh=True" in clash.stderr
    missing = cramnb("eval", "name=nobody", cwd=folder)
    assert missing.returncode == 2 and "nobody" in missing.stderr


def test_dry_run_keeps_nothing(tmp_path, texts):
    dry = cramnb(
        "pretrain", "data=files", f"data.files={texts}", *SMALL, "dryrun=True", cwd=tmp_path
    )
    assert dry.returncode == 0 and "2 updates" in dry.stdout and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on_where_it_was(how, tmp_path, texts):
    words = [
        "pretrain",
        "name=long",
        "data=files",
        f"data.files={texts}",
        *SMALL,
        "train.progress=updates",
        "train.max_updates=60",
        "impl.save_every=0.01",
    ]
    run = start(*words, cwd=tmp_path)
    folder = tmp_path / "runs/long"
    wait_for(lambda: updates(folder) >= 20)
    run.send_signal(how)
    began = time.monotonic()
    out, err = run.communicate(timeout=60)
    if how != signal.SIGKILL:
        assert run.returncode == 0 and time.monotonic() - began < 60
        assert (
            "checkpoint is saved" in err
            and "Continue with: cramnb pretrain name=long" in err
            and "Traceback" not in err
        )
    assert not (folder / "pretrain.json").exists()
    if how == signal.SIGTERM:  # another recipe is not mixed with it
        other = cramnb(*words, "train.lr=1e-3", "arch.hidden_size=64", cwd=tmp_path)
        assert (
            other.returncode == 2
            and "train.lr was 0.016 and is now 0.001" in other.stderr
            and "arch.hidden_size was 128 and is now 64" in other.stderr
            and "fresh=True" in other.stderr
        )
    if how == signal.SIGINT:  # the disk has spoilt the newest
        there = sorted((folder / "checkpoints").glob("update_*"))
        assert len(there) >= 2
        os.truncate(there[-1] / "optimizer.safetensors", 1000)
    again = cramnb(*words, cwd=tmp_path)
    if how == signal.SIGINT:
        assert f"{there[-1].name} is damaged" in again.stdout
    assert again.returncode == 0, again.stderr
    rows = [
        json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        rows == list(range(1, 61))
        and json.loads((folder / "pretrain.json").read_text())["tokens"] == 60 * 32 * 128
    )
    assert "Going on at" in again.stdout
    if how == signal.SIGTERM:
        afresh = cramnb(*words, "fresh=True", "train.max_updates=3", cwd=tmp_path)
        assert (
            afresh.returncode == 0
            and "Going on at" not in afresh.stdout
            and len((folder / "metrics.jsonl").read_text().splitlines()) == 3
        )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_preemption_while_preparing_and_while_scoring(how, tmp_path, texts):
    run = start("data", "data.max_megabytes=8", cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("corpora/*.partial")))
    run.send_signal(how)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and "Continue with: cramnb data" in err and "Traceback" not in err
    words = [
        "cram",
        "data=files",
        f"data.files={texts}",
        *SMALL,
        "eval.epochs=5",
        "eval.max_train_examples=0",
    ]
    run = start(*words, cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("runs/cram/eval/*")))
    run.send_signal(how)
    out, err = run.communicate(timeout=120)
    assert (
        run.returncode == 0
        and "Continue with: cramnb cram name=cram" in err
        and "Traceback" not in err
    )
    again = cramnb(*words, "name=cram", "eval.epochs=1", "eval.max_train_examples=60", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_the_same_command_on_real_data(tmp_path):
    data = beside("data")
    done = cramnb(
        "cram",
        "data=files",
        "data.max_megabytes=2",
        "data.vocab_size=2000",
        "eval=GLUE_sane",
        "eval.tasks=cola,rte",
        "budget=5s",
        "eval.epochs=1",
        "eval.max_train_examples=64",
        "train.eval_rows=64",
        cwd=tmp_path,
        CRAMNB_DATA=str(data),
    )
    assert done.returncode == 0, done.stderr
    assert (
        "| cola | matthews |" in done.stdout
        and "| rte | accuracy |" in done.stdout
        and "Mean of 2" in done.stdout
    )


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
        (["budget=3m"], 1, "3m00s: 1.8 million tokens, 0.28 times the corpus"),
        (["budget=3m"], 2, "3m00s: 3.6 million tokens, 0.56 times the corpus"),
        (
            ["train.progress=tokens", "train.max_tokens=36000000"],
            1,
            "train.max_tokens=36000000, about 1 hours: 36.0 million tokens",
        ),
        (
            ["train.progress=updates", "train.max_updates=1000"],
            1,
            "train.max_updates=1000, about 6m50s: 4.1 million tokens",
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


def test_a_finished_run_is_not_planned_again(measured, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/pretrain.json").write_text("{}")
    assert planned([f"base_dir={tmp_path}", "name=old", "budget=24"]) == [] and measured == []


def test_a_long_fine_tuning_says_its_plan_and_a_short_one_does_not(measured, tmp_path):
    from types import SimpleNamespace as S

    from cramnb.cram import say_exams
    from cramnb.recipe import compose

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
