"""The front door, held by a user who is not kind."""

import shutil
from dataclasses import replace

import pytest
import torch

from cramnb import Corpus, Trainer, build_model, evaluate
from cramnb.core import CramError
from cramnb.recipe import preset
from cramnb.text.sources import docstrings

ARCH = replace(
    preset("arch", "tiny"),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
)
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
    home = tmp_path_factory.mktemp("doors")
    corpus = Corpus.from_texts(TEXTS, home / "corpora", **OPTIONS)
    return corpus, fit(corpus, home / "runs" / "a")


def test_a_run_on_texts_finds_its_corpus_again(made):
    scores = evaluate(made[1].folder, EXAM, impl=IMPL, progress=silent)
    assert list(scores) == ["order"]


def test_texts_are_one_corpus_however_often_they_are_given(made, tmp_path):
    corpus, done = made
    shutil.copytree(corpus.folder.parent, tmp_path / "copy")
    shutil.rmtree(corpus.folder)
    again = Corpus.from_texts(iter(TEXTS), corpus.folder.parent, **OPTIONS)
    assert again.folder == corpus.folder and again.card["data"] == corpus.card["data"]
    assert fit(again, done.folder).summary == done.summary


def test_a_finished_run_is_not_handed_out_for_other_text(tmp_path):
    file = tmp_path / "texts.txt"
    for n in (300, 400):  # the same words for the corpus, other text in its file
        file.write_text("\n\n".join(TEXTS[:n]))
        corpus = Corpus.from_files(file, tmp_path / "corpora", **OPTIONS)
        if n == 300:
            fit(corpus, tmp_path / "a")
    with pytest.raises(CramError, match="another corpus"):
        fit(corpus, tmp_path / "a")


@pytest.mark.parametrize("texts", [None, 5, "one text", b"bytes"])
def test_what_is_no_list_of_texts_is_one_line_and_leaves_nothing(texts, tmp_path):
    with pytest.raises(CramError, match="give a list of texts"):
        Corpus.from_texts(texts, tmp_path / "c")
    assert not list(tmp_path.iterdir())
