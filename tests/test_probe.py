"""What a model knows: the blanks of a text, asked in Python and from the command line."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, pipeline

from cramnb.cli import main
from cramnb.core import CramError
from cramnb.judge.probe import fill_blank
from cramnb.model.mlm import build_model
from cramnb.recipe import tiny
from cramnb.text.tokenizer import train_tokenizer

TEXTS = [
    "the quick brown fox jumps over 13 lazy dogs , don't you think ? "
    "snake_case and unbelievable things happened in 2019 .",
    "walking talked walker talking running runner : 42 ( 7 ) !",
] * 30


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, tiny("data.vocab_size=120", "data.seq_length=32").data)


def models(tokenizer) -> dict:
    torch.manual_seed(0)
    r = tiny(
        "arch.hidden_size=32",
        "arch.num_hidden_layers=2",
        "arch.num_attention_heads=2",
        "arch.intermediate_size=64",
        "arch.zero_init_residual=False",
    )
    bert = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return dict(ours=build_model(r.arch, len(tokenizer)), bert=BertForMaskedLM(bert))


@pytest.fixture(params=["ours", "bert"])
def model(request, tokenizer):
    return models(tokenizer)[request.param]


def test_blanks_are_filled_as_the_pipeline_fills_them(model, tokenizer):
    text = "the quick [MASK] fox jumps [MASK] dogs"
    ours, theirs = (
        fill_blank(model.eval(), tokenizer, text, 4),
        pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")(text, top_k=4),
    )
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs):
        assert [t for t, _ in a] == [tokenizer.convert_ids_to_tokens(g["token"]) for g in b] and [
            p for _, p in a
        ] == pytest.approx([g["score"] for g in b], abs=1e-6)


def test_probabilities_and_the_state_of_the_model(model, tokenizer):
    model.train()
    (guesses,) = fill_blank(model, tokenizer, "the [MASK] fox", 10_000)
    assert (
        len(guesses) == len(tokenizer)
        and sum(p for _, p in guesses) == pytest.approx(1, abs=1e-5)
        and [p for _, p in guesses] == sorted([p for _, p in guesses], reverse=True)
    )
    assert model.training, "the probe changed the model's mode"
    with pytest.raises(CramError, match=r"write \[MASK\]"):
        fill_blank(model, tokenizer, "no blank here")
    with pytest.raises(CramError, match="longer than the 32 tokens"):
        fill_blank(model, tokenizer, "fox " * 40 + "[MASK]")


def test_the_command(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/asked/model"
    models(tokenizer)["ours"].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "pretrain.json").write_text("{}")
    assert main(["probe", "name=asked", "text=the [MASK] fox jumps over [MASK]"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["probe"]) == 0 and "[MASK]" in capsys.readouterr().out
    for bad, told in (
        (["name=askd"], "asked"),
        (["name=asked", "text=nothing"], "[MASK]"),
        (["name=asked", "colour=1"], "colour"),
    ):
        assert main(["probe", *bad]) == 2 and told in capsys.readouterr().err
