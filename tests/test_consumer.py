"""The home run in small: its parts, its Trainer, and what `cramnb eval` makes of its folder."""

import itertools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from cramnb.consumer import Chunks, StopAfter, cut_chunks, home_arguments, home_trainer
from cramnb.consumer import learn_wordpiece
from cramnb.core import quiet
from cramnb.corpus import docstrings

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
    how = home_arguments(folder, updates, rows=4, passes=2, save_steps=4, use_cpu=True, **more)
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
