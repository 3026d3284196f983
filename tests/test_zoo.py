"""The relatives of crammed-BERT: walks between them, what they weigh, and whether one of them is
BERT."""

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from cramnb.model.mlm import build_model, count_parameters
from cramnb.options import PRESETS, PROVENANCE, diff
from cramnb.recipe import preset
from cramnb.model.zoo import STEPS, size, steps

SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
)
NAMES = {
    "word_embeddings": "model.embeddings.word_embeddings",
    "position_embeddings": "model.embeddings.position.table",
    "bert.embeddings.LayerNorm": "model.embeddings.norm",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.input",
    "output.dense": "mlp.output",
    "output.LayerNorm": "mlp_norm",
    "transform.dense": "head.dense",
    "transform.LayerNorm": "head.norm",
}


def source(name, ours):
    "The tensor of ours behind one of transformers' BERT; None for token types."
    module, _, end = name.rpartition(".")
    if "token_type" in module:
        return None
    if module.startswith("cls.predictions") and "transform" not in module:
        return ours[f"decoder.{end}"]
    layer = (
        module.removeprefix("bert.encoder.layer.").split(".")[0]
        if "encoder.layer" in module
        else None
    )
    last = module.rpartition(".")[2]
    if last in ("query", "key", "value"):
        return ours[f"model.layers.{layer}.attention.qkv.{end}"].chunk(3)[
            ("query", "key", "value").index(last)
        ]
    found = next(v for k, v in NAMES.items() if module.endswith(k))
    return ours[(f"model.layers.{layer}." if layer is not None else "") + f"{found}.{end}"]


def twins(seed):
    "Our bert-original and transformers' BERT with the same random weights."
    torch.manual_seed(seed)
    ours = build_model(replace(preset("arch", "bert-original"), **SMALL), 50).eval()
    theirs = BertForMaskedLM(BertConfig(vocab_size=50, layer_norm_eps=1e-12, **SMALL)).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1 if p.ndim == 1 else 0) * 0.5)
        for name, p in theirs.named_parameters():
            tensor = source(name, dict(ours.named_parameters()))
            p.zero_() if tensor is None else p.copy_(tensor)
    return ours, theirs


def test_bert_original_is_bert():
    ours, theirs = twins(0)
    ids, mask = torch.randint(1, 50, (3, 20)), torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = mask[2, 5:] = 0
    labels = torch.where((torch.rand(3, 20) < 0.3) & (mask == 1), ids, -100)
    given = dict(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    a, b = ours(**given), theirs(**given)
    for x, y in zip([*a.hidden_states, a.logits], [*b.hidden_states, b.logits], strict=True):
        torch.testing.assert_close(x[mask == 1], y[mask == 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    found = {n: (source(n, gradients), q.grad) for n, q in theirs.named_parameters()}
    compared = [(n, p, q) for n, (p, q) in found.items() if p is not None]
    assert len(compared) == 41
    for name, p, q in compared:
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("a, b", [("crammed-bert", "bert-original"), ("tiny", "modern")])
def test_a_walk_ends_at_its_end_and_each_step_changes_its_fields(a, b):
    a, b = preset("arch", a), preset("arch", b)
    walk = steps(a, b)
    assert walk[0] == ("start", a) and walk[-1][1] == b
    changed = []
    for (_, x), (label, y) in zip(walk, walk[1:]):
        assert set(diff(x, y)) <= set(STEPS.get(label, (label,))) and diff(x, y)
        changed += diff(x, y)
    assert sorted(changed) == sorted(diff(a, b))  # each once


def test_weights_of_the_walk():
    counts = [
        size(a)["parameters"]
        for _, a in steps(preset("arch", "bert-original"), preset("arch", "crammed-bert"))
    ]
    assert counts[0] == 111_239_936 and counts[-1] == 119_589_889
    assert counts[3] - counts[2] == -(12 * (5 * 768 + 3072) + 768 + 32768)  # biases
    assert counts[5] - counts[4] == -12 * 1536 * 768  # the gate halves the second matrix
    assert counts[6] - counts[5] == 4 * 5_901_312  # four layers


def test_size_is_that_of_the_built_model_and_follows_its_arguments():
    small = replace(preset("arch", "tiny"), **SMALL)
    s = size(small, vocab_size=99)
    assert s["parameters"] == count_parameters(build_model(small, 99)) and s["words"] == 99 * 32
    dense = size(small, vocab_size=99, mlm_probability=1.0)["flops"]
    assert dense > s["flops"] > size(small, vocab_size=99, seq_length=16)["flops"]


def test_every_architecture_says_where_it_comes_from():
    assert PROVENANCE["arch"].keys() == PRESETS["arch"].keys()
    assert all(PROVENANCE["arch"].values())
