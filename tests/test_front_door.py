"""The library in the lines of the README: text, model, training, scores, and what goes wrong."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from conftest import ROOT, server

from cramnb import Corpus, Trainer, build_model, evaluate, load
from cramnb.core import CramError, Stopped
from cramnb.run.run import resolve_checkpoint
from cramnb.text.sources import docstrings
from cramnb.recipe import preset

ARCH = replace(toy.ARCH, num_hidden_layers=1)
TRAIN = replace(
    preset("train", "tiny"),
    batch_size=16,
    eval_rows=32,
    progress="updates",
    max_updates=12,
    dropout=True,
)
IMPL = replace(preset("impl", "cpu"), microbatch_size="8", save_every=1e-6)
EXAM = replace(preset("eval", "local"), tasks="order", epochs=1, max_train_examples=64)


def silent(*_, **__):
    "Told everything, and says nothing."


def new_trainer(corpus, folder, **changes) -> Trainer:
    torch.manual_seed(0)
    how = dict(folder=folder, impl=IMPL, progress=silent, say=silent) | changes
    return Trainer(build_model(ARCH, corpus), corpus, TRAIN, **how)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    texts = [text for _, text in zip(range(1500), docstrings())]
    folder = tmp_path_factory.mktemp("texts")
    return Corpus.from_texts(texts, vocab_size=600, seq_length=32, heldout=0.3, folder=folder)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    trainer = new_trainer(corpus, tmp_path_factory.mktemp("runs") / "a")
    return trainer, trainer.fit()


def test_the_python_lines_of_the_readme(tmp_path, monkeypatch, capsys):
    "As they stand there, for two seconds in the place of three minutes."
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert "budget='3m'" in block
    texts = [text for _, text in zip(range(1500), docstrings())]
    exec(block.replace("budget='3m'", "budget='2s'"), dict(texts=texts))
    assert "| order |" in capsys.readouterr().out
    assert (tmp_path / "runs/a/model/model.safetensors").exists()


def test_the_door_opens_before_torch_is_there():
    code = "import sys, cramnb; print('torch' in sys.modules, 'Trainer' in dir(cramnb))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_run_leaves_what_the_command_leaves(trained):
    trainer, done = trained
    kept = {p.name for p in done.folder.iterdir()}
    assert {"recipe.json", "metrics.jsonl", "pretrain.json", "model", "checkpoints"} <= kept
    assert done.summary["updates"] == len(done.rows) == 12
    assert done._repr_png_().startswith(b"\x89PNG")
    model, tokenizer = load(done.folder)
    assert torch.equal(weights(model), weights(trainer.model))
    assert len(tokenizer) == model.config.vocab_size


def test_after_training_a_model_still_answers_with_logits(trained):
    model, ids = trained[0].model, torch.randint(5, 600, (2, 16))
    assert model(ids, labels=ids).logits.shape == (2, 16, 600)


def test_a_second_fit_brings_the_trained_weights_and_trains_nothing(trained, corpus):
    trainer, done = trained
    log = (done.folder / "metrics.jsonl").stat().st_mtime_ns
    again = new_trainer(corpus, done.folder)
    assert again.fit().summary == done.summary
    assert torch.equal(weights(again.model), weights(trainer.model))
    assert (done.folder / "metrics.jsonl").stat().st_mtime_ns == log


def test_an_interrupt_keeps_a_checkpoint_and_the_rest_is_the_same_to_the_bit(
    trained, corpus, tmp_path
):
    def press(stage, done, total, update=0, **notes):
        if update == 5:
            os.kill(os.getpid(), 2)

    with pytest.raises(Stopped, match="checkpoint is saved"):
        new_trainer(corpus, tmp_path / "a", progress=press).fit()
    assert not (tmp_path / "a/pretrain.json").exists()
    again = new_trainer(corpus, tmp_path / "a")
    assert len(again.fit().rows) == 12
    assert torch.equal(weights(again.model), weights(trained[0].model))


def _fit(corpus_folder, folder):
    new_trainer(Corpus.load(corpus_folder), folder).fit()


def test_a_kill_costs_nothing(trained, corpus, tmp_path):
    process = server().Process(target=_fit, args=(corpus.folder, tmp_path / "a"))
    process.start()
    while process.is_alive() and not list((tmp_path / "a/checkpoints").glob("update_*[0-9]")):
        time.sleep(0.01)
    process.kill()
    process.join()
    again = new_trainer(corpus, tmp_path / "a")
    again.fit()
    assert torch.equal(weights(again.model), weights(trained[0].model))


def test_scores_are_numbers_by_task_and_are_found_again(trained, corpus):
    folder = trained[1].folder
    scores = evaluate(folder, EXAM, corpus=corpus, impl=IMPL, progress=silent)
    assert dict(scores) == {"order": scores["order"]} and scores.mean == scores["order"]
    assert "| order |" in scores._repr_markdown_()
    asked = []
    again = evaluate(folder, EXAM, impl=IMPL, progress=lambda *a, **k: asked.append(a))
    assert dict(again) == dict(scores) and not asked  # its own corpus was found, too
    loaded, _ = load(folder)
    alone = evaluate(loaded, EXAM, corpus=corpus, impl=IMPL, progress=silent)
    assert dict(alone) == dict(scores) and alone.folder is None


class Asked(Exception):
    "In place of a fine-tuning: what it was to do."


@pytest.fixture
def asked(monkeypatch):
    def ask(where, exams, ev, folder, *rest):
        raise Asked(ev, folder)

    def what(*words, **options):
        monkeypatch.setattr("cramnb.run.run.evaluate_checkpoint", ask)
        with pytest.raises(Asked) as found:
            evaluate(*words, impl=IMPL, progress=silent, **options)
        return found.value.args

    return what


def test_fresh_weights_are_scored_as_fresh(trained, corpus, asked):
    fresh = resolve_checkpoint(trained[1].folder, "untrained")
    assert asked(fresh, EXAM, corpus=corpus)[0].checkpoint == "untrained"
    own = resolve_checkpoint(trained[1].folder)
    exam = replace(EXAM, checkpoint="untrained")
    assert asked(own, exam, corpus=corpus)[0].checkpoint == "latest"


def test_two_tables_of_one_name_keep_their_scores_apart(trained, asked, tmp_path):
    places = []
    for name in "ab":
        table = tmp_path / name / "train.csv"
        table.parent.mkdir()
        table.write_text("text,label\n" + f"{name} one,0\n{name} two,1\n" * 20)
        places.append(asked(trained[1].folder, replace(EXAM, files=str(table)))[1])
    assert places[0] != places[1]


def test_the_command_goes_on_with_a_run_of_the_library(trained, corpus, capsys):
    from cramnb.cli import main

    folder = trained[1].folder
    words = [f"base_dir={folder.parent}", f"name={folder.name}", "impl.device=cpu"]
    few = ["eval.tasks=order", "eval.epochs=1", "eval.max_train_examples=64"]
    assert main(["eval", *words, *few]) == 0
    assert "| order |" in capsys.readouterr().out and (folder / "report.md").exists()


@pytest.mark.parametrize(
    "wrong, told",
    [
        (dict(model=None), "build_model"),
        (dict(model=torch.nn.Linear(2, 2)), "build_model"),
        (dict(corpus=["a text"]), "Corpus.from_texts"),
        (dict(train=3), "Train options"),
        (dict(train="tinny"), "'tiny'"),
        (dict(budget="soon"), "3m"),
        (dict(budget=-1), "3m"),
        (dict(folder=""), "folder"),
        (dict(folder=7), "folder"),
        (dict(folder=b"a"), "folder"),
        (dict(folder=__file__), "folder"),
        (dict(folder="/"), "runs/a"),
        (dict(seed="x"), "seed"),
        (dict(impl=dict(device="cpu")), "Impl options"),
    ],
)
def test_a_mistake_at_the_door_is_one_line(wrong, told, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = dict(model=build_model(ARCH, corpus), corpus=corpus, train=TRAIN, folder="runs/a")
    with pytest.raises(CramError, match=told) as error:
        Trainer(**given | wrong)
    assert "\n" not in str(error.value) and not list(Path(".").iterdir())


def test_a_model_of_another_vocabulary_is_refused(corpus, tmp_path):
    model = build_model(ARCH, 601)
    with pytest.raises(CramError, match="build_model"):
        Trainer(model, corpus, TRAIN, folder=tmp_path / "a")


@pytest.mark.parametrize("where", ["runs/nowhere", "", None, 7, "~nosuch", "a" * 5000, __file__])
def test_weights_that_are_not_there_are_one_line(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (load, evaluate):
        with pytest.raises(CramError) as error:
            call(where)
        assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(tasks="ordre"),
        dict(tasks=7),
        dict(tasks=[]),
        dict(corpus=3),
        dict(seed=-1),
        dict(seed=None),
        dict(folder=3),
        dict(folder=__file__),
        dict(model=torch.nn.Linear(2, 2)),
    ],
)
def test_wrong_exams_are_one_line(wrong, trained, corpus):
    given = dict(model=trained[1].folder, tasks=EXAM, corpus=corpus) | wrong
    with pytest.raises(CramError) as error:
        evaluate(**given)
    assert "\n" not in str(error.value)


SCRIPT = """
import sys
from test_front_door import ARCH, EXAM, IMPL, TRAIN, silent
from cramnb import Corpus, Trainer, build_model, evaluate
import torch

torch.manual_seed(0)
corpus = Corpus.load(sys.argv[1])
for name in "ab":  # two runs of one program
    folder = f"{sys.argv[2]}/{name}"
    how = dict(impl=IMPL, progress=silent, say=silent)
    Trainer(build_model(ARCH, corpus), corpus, TRAIN, folder=folder, **how).fit()
scores = evaluate(folder, EXAM, corpus=corpus, impl=IMPL, progress=silent)
print(len(scores))
"""


def test_the_same_lines_run_under_torchrun(corpus, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).parent))
    words += [tmp_path / "script.py", corpus.folder, tmp_path / "runs"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0 and done.stdout.split() == ["1", "1"], done.stderr
    assert (tmp_path / "runs/b/pretrain.json").exists()
