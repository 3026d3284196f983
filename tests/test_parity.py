"""The same numbers as the original, on a fixture of the project (fixtures/README.md)."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cramnb.model.original import from_original, sources
from cramnb.book.show import read_data

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "nbs/data" / f"parity_crammed_bert.{kind}" for kind in ("safetensors", "json")]
WANT, FACTS = load_file(FILES[0]), json.loads(FILES[1].read_text(encoding="utf-8"))
STATE = {k.removeprefix("state_dict."): v for k, v in WANT.items() if k.startswith("state_dict.")}
IDS, LABELS, PLACES = (WANT[k] for k in ("input_ids", "labels", "masked_positions"))


def outputs(model):
    hidden = model.model(IDS).last_hidden_state
    return hidden, model.decoder(model.head(hidden)).flatten(0, 1)[PLACES]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_logits_and_loss_are_the_originals(attention):
    model = from_original(FACTS["arch_config"], STATE)
    model.set_attn_implementation(attention)
    hidden, logits = outputs(model)
    torch.testing.assert_close(hidden, WANT["last_hidden_state"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, WANT["masked_logits"], atol=1e-4, rtol=1e-4)
    dense = model(IDS, labels=LABELS).loss.item()
    assert dense == pytest.approx(FACTS["loss"], rel=1e-5)
    columns = PLACES.view(2, 8) % 32
    for chunk in (0, 5):
        model.loss_chunk_size = chunk
        sparse = model(IDS, labels=LABELS, masked_positions=columns).loss.item()
        assert sparse == pytest.approx(FACTS["loss"], rel=1e-5)


def test_every_gradient_is_as_long_as_the_originals():
    model = from_original(FACTS["arch_config"], STATE)
    model(IDS, labels=LABELS).loss.backward()
    names = {n: sources(n, model.config, "self-attention", {})[0] for n in model.state_dict()}
    grads = {names[n]: p.grad for n, p in model.named_parameters()}
    assert grads.keys() == FACTS["grad_norms"].keys()
    for name, norm in FACTS["grad_norms"].items():
        assert grads[name].norm().item() == pytest.approx(norm, rel=1e-3), name
    words = grads["encoder.embedding.word_embedding.weight"]
    for row in (0, 4):
        want = WANT[f"grad_word_embedding_row{row}"]
        torch.testing.assert_close(words[row], want, atol=1e-5, rtol=1e-3)


def test_in_double_precision_the_loss_is_the_originals_too():
    model = from_original(FACTS["arch_config"], STATE).double()
    assert model(IDS, labels=LABELS).loss.item() == pytest.approx(FACTS["loss_float64"], rel=1e-7)


def halves_exchanged(state):
    for name in [n for n in state if "dense_in" in n]:
        state[name] = state[name].roll(len(state[name]) // 2, 0)


def stacked(state):
    for name in [n for n in state if "query_key_value" in n]:
        state[name] = state[name].view(4, 3, 8, 32).transpose(0, 1).reshape(96, 32)


def no_scale(state):
    state["encoder.embedding.pos_embedding.scale_factor"] = torch.tensor([32**-0.5])


def no_bias(state):
    state["encoder.final_norm.bias"] = torch.zeros(32)


@pytest.mark.parametrize("mistake", [halves_exchanged, stacked, no_scale, no_bias])
def test_the_fixture_notices_a_mistake(mistake):
    "Each of these fits every shape, and raises no error."
    state = dict(STATE)
    mistake(state)
    hidden, _ = outputs(from_original(FACTS["arch_config"], state))
    assert (hidden - WANT["last_hidden_state"]).abs().max() > 0.05


def test_the_fixture_is_small_and_described():
    assert sum(path.stat().st_size for path in FILES) < 70_000
    text = (ROOT / "fixtures/README.md").read_text(encoding="utf-8")
    keys = [k for k in WANT if not k.startswith("state_dict.")] + list(FACTS)
    assert [k for k in keys if f"`{k}`" not in text] == []
    for path in FILES:
        assert re.search(rf"`nbs/data/{path.name}` \| {path.stat().st_size:,} ", text), path.name
    assert FACTS["commit"] in text and FACTS["torch"] in text and FACTS["transformers"] in text


def test_the_package_reads_it():
    assert read_data("parity_crammed_bert.json") == FACTS
    tensors = read_data("parity_crammed_bert.safetensors")
    assert tensors.keys() == WANT.keys() and torch.equal(tensors["input_ids"], IDS)
