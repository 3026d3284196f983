"""The front door, held by a user who is not kind."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
import toy

from cramnb import Corpus, Trainer, build_model, evaluate, load
from cramnb.cli import main
from cramnb.core import CramError
from cramnb.recipe import preset
from cramnb.text.sources import docstrings

ARCH = replace(toy.ARCH, num_hidden_layers=1)
TRAIN = replace(
    preset("train", "tiny"), batch_size=8, eval_rows=8, progress="updates", max_updates=2
)
IMPL = replace(preset("impl", "cpu"), microbatch_size="8")
EXAM = replace(preset("eval", "local"), tasks="order", epochs=1, max_train_examples=16)
TEXTS = [text for _, text in zip(range(400), docstrings())]
OPTIONS = dict(vocab_size=400, seq_length=32, heldout=0.3, deduplicate=False)


def silent(*_, **__):
    "Told everything, and says nothing."


def fit(corpus, folder, arch=ARCH):
    torch.manual_seed(0)
    how = dict(impl=IMPL, progress=silent, say=silent)
    return Trainer(build_model(arch, corpus), corpus, TRAIN, folder=folder, **how).fit()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A corpus of texts, and a run on it."
    home, here = tmp_path_factory.mktemp("doors"), os.getcwd()
    os.chdir(home)
    corpus = Corpus.from_texts(TEXTS, "corpora", **OPTIONS)
    os.chdir(here)  # a program may go elsewhere
    return corpus, fit(corpus, home / "runs" / "a")


def test_a_run_on_texts_finds_its_corpus_again(made):
    scores = evaluate(made[1].folder, EXAM, impl=IMPL, progress=silent)
    assert list(scores) == ["order"]


def test_texts_are_one_corpus_however_often_they_are_given(made, monkeypatch):
    corpus, done = made
    monkeypatch.chdir(corpus.place.parents[1])
    shutil.rmtree(corpus.place)
    again = Corpus.from_texts(iter(TEXTS), "corpora", **OPTIONS)
    assert again.place == corpus.place and again.card["data"] == corpus.card["data"]
    assert fit(again, done.folder).summary == done.summary


def test_a_run_finds_its_corpus_when_the_text_is_gone(tmp_path, monkeypatch, capsys):
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(TEXTS))
    corpus = Corpus.from_files(file, tmp_path / "corpora", **OPTIONS)
    done = fit(corpus, tmp_path / "runs" / "a")
    file.unlink()
    assert list(evaluate(done.folder, EXAM, impl=IMPL, progress=silent)) == ["order"]
    words = [f"base_dir={tmp_path}/runs", "impl.device=cpu", "eval.tasks=order", "eval.epochs=1"]
    assert main(["eval", "name=a", *words]) == 0 and "| order |" in capsys.readouterr().out
    shutil.rmtree(corpus.folder)
    with pytest.raises(CramError, match="texts.txt.*Corpus.load"):
        evaluate(done.folder, EXAM, impl=IMPL, progress=silent)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_asks_nothing_of_the_gradients_outside(mode, made, tmp_path):
    model = build_model(ARCH, made[0])
    trainer = Trainer(model, made[0], TRAIN, folder=tmp_path / "a", impl=IMPL, progress=silent)
    before = model.get_input_embeddings().weight.clone()
    with mode():
        trainer.fit()
    assert not torch.equal(before, model.get_input_embeddings().weight)
    with torch.inference_mode(), pytest.raises(CramError, match="inference_mode"):
        fit(made[0], tmp_path / "b")


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_the_default_device_of_the_program_changes_nothing(device, made, tmp_path):
    model, before = build_model(ARCH, made[0]), torch.random.get_rng_state()
    torch.set_default_device(device)
    try:
        how = dict(impl=IMPL, progress=silent, say=silent)
        summary = Trainer(model, made[0], TRAIN, folder=tmp_path / "a", **how).fit().summary
    finally:
        torch.set_default_device(None)
    assert summary["updates"] == 2 and torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(CramError, match="device meta"):
        Trainer(build_model(ARCH, made[0]).to("meta"), made[0], TRAIN, folder=tmp_path / "b")


def test_a_budget_of_less_than_one_update_is_said(made, tmp_path):
    told, long = [], replace(TRAIN, progress="time", batch_size=512)
    how = dict(budget="0.001s", folder=tmp_path / "a", impl=IMPL, progress=silent)
    Trainer(build_model(ARCH, made[0]), made[0], long, say=told.append, **how).fit()
    assert any("whole budget" in line for line in told)


def test_a_finished_run_is_not_handed_out_for_other_text(tmp_path):
    file = tmp_path / "texts.txt"
    for n in (300, 400):  # the same words for the corpus, other text in its file
        file.write_text("\n\n".join(TEXTS[:n]))
        corpus = Corpus.from_files(file, tmp_path / "corpora", **OPTIONS)
        if n == 300:
            fit(corpus, tmp_path / "a")
    with pytest.raises(CramError, match="another corpus"):
        fit(corpus, tmp_path / "a")


def test_a_folder_that_cannot_be_made_is_one_line(made, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for call in (
        lambda: fit(made[0], tmp_path / "loop" / "a"),
        lambda: evaluate(made[1].folder, EXAM, folder=tmp_path / "loop", progress=silent),
        lambda: Corpus.from_texts(TEXTS, tmp_path / "loop", **OPTIONS),
    ):
        with pytest.raises(CramError, match="cannot be made"):
            call()


MISTAKES = {
    "no texts": lambda: Corpus.from_texts(None, "c"),
    "a number": lambda: Corpus.from_texts(5, "c"),
    "one text": lambda: Corpus.from_texts("one text", "c"),
    "bytes": lambda: Corpus.from_texts(b"bytes", "c"),
    "too short": lambda: Corpus.from_texts(["too short"], "c"),
    "bytes for a folder": lambda: Corpus.from_texts(TEXTS, b"c"),
    "no folder": lambda: Corpus.from_texts(TEXTS, None),
    "a file for a folder": lambda: Corpus.from_texts(TEXTS, __file__),
    "in a file": lambda: Corpus.from_files(__file__, f"{__file__}/c"),
    "not the user's": lambda: Corpus.from_texts(TEXTS, "c", source="hub"),
    "no paths": lambda: Corpus.from_files(None, "c"),
    "no such file": lambda: Corpus.from_files("nowhere.txt", "c"),
    "no judge": lambda: Corpus.from_texts(TEXTS, "c", judge="nowhere.txt"),
    "a short judge": lambda: Corpus.from_texts(TEXTS, "c", judge=__file__),
    "a whole disk": lambda: Corpus.from_hub("/", folder="c"),
    "a whole home": lambda: Corpus.from_hub("~", folder="c"),
    "files of a disk": lambda: Corpus.from_files("/", "c"),
    "no data": lambda: Corpus.build(None, "c"),
    "no corpus": lambda: Corpus.load("nowhere"),
    "load nothing": lambda: Corpus.load(None),
    "no words": lambda: build_model(ARCH, 0),
    "no attention": lambda: build_model(ARCH, 99, "fast"),
    "which": lambda: load("nowhere", None),
}


@pytest.mark.parametrize("call", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CramError) as error:
        call()
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
