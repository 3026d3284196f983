"""The home run in small: its parts, its Trainer, and what `cramnb eval` makes of its folder."""

import itertools
import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from cramnb.consumer import Chunks, StopAfter, cut_chunks, home_arguments, home_trainer
from cramnb.consumer import learn_wordpiece
from cramnb.cli import main
from cramnb.core import quiet
from cramnb.judge.tasks import PUBLISHED_TASKS
from cramnb.text.sources import docstrings
from cramnb.recipe import preset
from cramnb.book.show import read_data

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)


@pytest.fixture(scope="module")
def chunks():
    return list(itertools.islice(cut_chunks(docstrings(), 300, 100), 200))


@pytest.fixture(scope="module")
def tokenizer(chunks):
    return learn_wordpiece(chunks, 600)


def trainer(chunks, tokenizer, folder, *watchers, updates=8, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), **SIZES)
    rows = Chunks(chunks, tokenizer, 32)
    how = dict(rows=4, passes=2, save_steps=4, use_cpu=True)
    how = home_arguments(folder, updates, **how | more)
    return home_trainer(AutoModelForMaskedLM.from_config(config), rows, tokenizer, how, *watchers)


def test_chunks_end_at_a_blank_and_keep_the_text():
    text = "aa bbb cccc " * 40
    parts = list(cut_chunks([text, "too short"], 50, 20))
    assert all(50 <= len(p) <= 55 for p in parts[:-1])
    assert " ".join(parts).split() == text.split()[: len(" ".join(parts).split())]
    assert len(list(cut_chunks(["x" * 500], 50, 20))) == 1  # no blank: no cut


def test_rows_begin_and_end_as_bert_expects(chunks, tokenizer):
    row = Chunks(chunks, tokenizer, 16)[0]
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert (len(tokens), tokens[0], tokens[-1]) == (16, "[CLS]", "[SEP]")
    assert row["special_tokens_mask"][0] == 1


def test_a_stopped_run_goes_on_from_its_checkpoint(chunks, tokenizer, tmp_path):
    ticks = itertools.count()
    with quiet():
        first = trainer(chunks, tokenizer, tmp_path, StopAfter(3, lambda: next(ticks)))
        first.train()
        assert first.state.global_step == 3
        second = trainer(chunks, tokenizer, tmp_path)
        second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 8
    assert [r["step"] for r in second.state.log_history if "loss" in r] == list(range(1, 9))


@pytest.mark.parametrize("passes", [1, 4])
def test_losses_are_averaged_over_the_passes_of_an_update(passes, chunks, tokenizer, tmp_path):
    "transformers adds them up where a model ignores the number of items (its issue 47688)."
    rows = 8 // passes
    with quiet():
        t = trainer(chunks, tokenizer, tmp_path, updates=1, rows=rows, passes=passes)
        t.train()
    assert t.state.log_history[0]["loss"] == pytest.approx(math.log(len(tokenizer)), abs=0.4)


@pytest.fixture(scope="module")
def folder(chunks, tokenizer, tmp_path_factory):
    "What the Trainer leaves behind."
    where = tmp_path_factory.mktemp("home") / "bert"
    with quiet():
        t = trainer(chunks, tokenizer, where.parent / "run", updates=2)
        t.train()
        t.save_model(str(where))
    return where


def test_eval_takes_the_folder_with_files_of_glue(folder, tmp_path, capsys):
    exam = tmp_path / "glue" / "SST-2"
    exam.mkdir(parents=True)
    for split, numbers in (("train", range(8)), ("dev", range(8, 16))):
        pairs = [(n, y) for n in numbers for y in (0, 1)]
        rows = [dict(sentence=f"{'ab'[y]} {n}", label=y) for n, y in pairs]
        (exam / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = f"eval=GLUE_sane eval.checkpoint={folder} eval.glue_dir={tmp_path / 'glue'}"
    more = f"eval.tasks=sst2 eval.trials=1 eval.epochs=1 base_dir={tmp_path / 'runs'}"
    assert main(["eval", *words.split(), *more.split()]) == 0
    assert "| sst2 | accuracy |" in capsys.readouterr().out


def test_the_table_of_compute_has_sources_and_its_averages_are_possible():
    stored = read_data("compute.json")
    assert stored["glue"]["tasks"] == list(PUBLISHED_TASKS)
    for model in (stored["glue"]["home"], stored["glue"]["bert"]):
        apart = abs(sum(model["scores"]) / 9 - model["average"])
        assert len(model["scores"]) == 9 and apart <= 0.1 and model["source"]
    for t in stored["trainings"]:
        assert all(t[key] for key in ("source", "glue_source", "peak_source", "hours", "glue"))
        assert "recalled" not in json.dumps(t) and preset("arch", t["arch"])
        planned = t["source"].startswith("planned")
        assert planned == (t["tokens"] is None)
    home = stored["home"]
    assert stored["trainings"][1]["tokens"] == [[home["chunks"] * home["tokens_a_chunk"], 126]]
    bert, asked = stored["bert"], stored["trainings"][0]["tokens"]
    whole = bert["updates"] * bert["rows"]
    assert asked == [[round(share * whole * length), length] for share, length in bert["split"]]


def test_the_comparison_says_where_and_when_it_was_made():
    log = read_data("consumer.json")
    assert all(log[key] for key in ("device", "date", "commit", "torch", "transformers", "text"))
    arms = {r["arm"] for r in log["runs"]}
    assert arms == {"trainer_chunks", "trainer_rows", "ours_same", "ours_own"}
    assert all(r["spent"] < 1.05 * log["seconds"] for r in log["runs"])
