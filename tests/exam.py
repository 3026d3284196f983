"""What the tests of exams share: two small checkpoints and made-up rows."""

import gzip
import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from cramnb.judge.tasks import TASKS
from cramnb.model.mlm import build_model
from cramnb.text.sources import docstrings
from cramnb.recipe import preset
from cramnb.text.tokenizer import train_tokenizer

EV = replace(preset("eval", "GLUE_sane"), epochs=2, lr=2e-3, classifier_pooling="mean")
SIX = ("cola", "sst2", "mrpc", "stsb", "rte", "mnli")


@pytest.fixture(scope="module")
def tokenizer():
    data = replace(preset("data", "docstrings"), vocab_size=600)
    return train_tokenizer(list(itertools.islice(docstrings(), 300)), data)


@pytest.fixture(scope="module")
def typed():
    "A tokenizer that tells first and second text apart."
    data = replace(preset("data", "docstrings"), vocab_size=600, use_type_ids=True)
    return train_tokenizer(list(itertools.islice(docstrings(), 300)), data)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    "A fresh model of ours as a folder."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model(
        replace(
            preset("arch", "tiny"),
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=2,
            intermediate_size=128,
            classifier_hidden_size=64,
        ),
        len(tokenizer),
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tokenizer, tmp_path_factory):
    "The same for BERT of transformers, which has token types."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(name, n, seed=0):
    "Made-up rows in a task's form."
    rng, task = random.Random(seed), TASKS[name]
    words = "warm cold open shut fast slow bright dark early late".split()
    label = lambda i: round(rng.uniform(0, 5), 2) if task.num_labels == 1 else i % task.num_labels
    return [
        {f: " ".join(rng.choices(words, k=rng.randint(3, 9))) for f in task.fields}
        | dict(label=label(i), idx=i)
        for i in range(n)
    ]


def write(folder, rows):
    for split, content in rows.items():
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in content)
