"""What the loop does when a recipe drives it: options, what is said, rates that change, the same
bits twice."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from cramnb.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from cramnb.cli import main
from cramnb.run.report import pretrain_table
from cramnb.run.run import make_loop, measure, new_model
from cramnb.train.loop import heldout_batches, mlm_loss
from cramnb.text.store import Corpus
from cramnb.recipe import compose
from folders import SUMMARY
from toy import SMALL, weights

RUN = "data.seq_length=128 train.max_updates=6 impl.microbatch_size=8 impl.device=cpu"
SMALL = [*SMALL, *RUN.split()]
ISOLATED = "train.document_isolation=True"


def make_trainer(recipe, corpus):
    return make_loop(recipe, new_model(recipe, corpus), corpus)


@pytest.fixture(scope="module")
def place(tmp_path_factory, texts):
    "A folder with a prepared corpus, and the words that use it."
    folder = tmp_path_factory.mktemp("loop")
    words = [
        "data=files",
        f"data.files={texts}",
        f"impl.path={folder / 'corpora'}",
        f"base_dir={folder / 'runs'}",
        *SMALL,
    ]
    recipe = compose(words)
    return words, Corpus.build(recipe.data, Path(recipe.impl.path)), folder


def test_a_hopeless_run_is_ended_early_with_its_checkpoints(place, capsys):
    words, _, folder = place
    stop = "train.early_termination=True train.early_hours=0 train.early_loss=0.5".split()
    stop += ["impl.save_every=1e-6"]
    assert main(["pretrain", "name=hopeless", *words, *stop]) == 2
    assert "not below 0.5" in capsys.readouterr().err
    assert [c.name for c in checkpoints(folder / "runs/hopeless/checkpoints")] == [
        "update_00000001"
    ]
    assert main(["pretrain", "name=hopeful", *words, *stop[:2], "train.early_loss=100"]) == 0


@pytest.mark.parametrize("counts", [False, True])
def test_measuring_counts_or_not_as_the_recipe_says(place, counts):
    words, corpus, _ = place
    trainer = make_trainer(compose(words), corpus)
    ticks = itertools.count(step=100)
    trainer.clock = lambda: next(ticks)
    trainer.train = dataclasses.replace(trainer.train, count_eval=counts)
    loss = measure(trainer, heldout_batches(corpus, trainer.train))
    assert 3 < loss < 10 and trainer.state.elapsed == 100 * counts


@pytest.mark.parametrize(
    "options, line",
    [
        ([], "Compiling is inside the budget; measuring and saving are outside."),
        (
            ["train.count_eval=True"],
            "Compiling and measuring are inside the budget; saving is outside.",
        ),
        (
            ["train.count_compile=False"],
            "Nothing but training is inside the budget; "
            "compiling, measuring and saving are outside.",
        ),
    ],
)
def test_the_report_says_what_the_budget_holds(options, line):
    assert line in pretrain_table(SUMMARY, compose(options))


def test_the_mask_rate_falls_over_the_budget_and_a_resumed_run_asks_the_same(place, tmp_path):
    words, corpus, _ = place
    recipe = compose([*words, "train.mlm_probability=0.3", "train.mlm_probability_end=0.15"])

    def watched():
        trainer = make_trainer(recipe, corpus)
        asked, draw = [], trainer.batches

        def batches(start, n, number, x):
            batch = draw(start, n, number, x)
            asked.append((number, batch.positions.shape[1], (batch.labels != -100).sum(1).tolist()))
            return batch

        trainer.batches = batches
        return trainer, asked

    whole, asked = watched()
    for row in whole.updates():
        if row["update"] == 3:
            save_checkpoint(tmp_path, whole)
    T = recipe.data.seq_length
    assert {width for _, width, _ in asked} == {round(0.3 * T)}, (
        "one shape from the first to the last pass"
    )
    assert [n for n, _ in itertools.groupby(counts[0] for _, _, counts in asked)] == [
        round((0.3 - 0.15 * u / 6) * T) for u in range(6)
    ]
    again, asked_again = watched()
    load_checkpoint(tmp_path, again)
    for row in again.updates():
        pass
    assert asked_again == asked[6:] and torch.equal(weights(whole), weights(again))


def test_isolated_documents_are_read_as_if_each_stood_alone(place):
    words, corpus, folder = place
    trainer = make_trainer(compose([*words, "arch=tiny", *SMALL, ISOLATED]), corpus)
    model, train = trainer.model.eval(), trainer.train
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # fresh blocks add nothing
    for batch in (trainer.batches(0, 24, 0, 0.0), heldout_batches(corpus, train)[0]):
        total = asked = 0
        for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist()):
            ends = [i + 1 for i, token in enumerate(ids) if token == corpus.tokenizer.sep_token_id]
            for start, stop in itertools.pairwise([0, *ends, len(ids)]):
                if n := sum(y != -100 for y in labels[start:stop]):
                    own = torch.tensor([[ids[start:stop], labels[start:stop]]])[0]
                    total += n * model(own[:1], labels=own[1:]).loss.item()
                    asked += n
        loss = mlm_loss(model, batch)
        torch.testing.assert_close(loss.item(), total / asked, atol=1e-4, rtol=1e-4)
        model.document_end, isolated = None, model.document_end
        assert abs(mlm_loss(model, batch) - loss) > 1e-4  # some row holds two documents
        model.document_end = isolated


def test_a_run_with_isolated_documents_and_its_limits(place, capsys):
    words, _, folder = place
    assert main(["pretrain", "name=isolated", *words, ISOLATED]) == 0
    capsys.readouterr()
    for word, need in (
        ("data.include_sep=False", "data.include_sep=True"),
        ("train.mask_special_tokens=True", "train.mask_special_tokens=False"),
        ("arch=hf-bert-tiny", "arch.model_type=crammed_bert"),
        ("impl.attn_implementation=flash_attention_2", "impl.attn_implementation=sdpa"),
    ):
        assert main(["pretrain", "name=limits", *words, ISOLATED, word]) == 2
        assert f"train.document_isolation=True needs {need}" in capsys.readouterr().err
    assert not (folder / "runs/limits").exists()
