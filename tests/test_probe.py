"""What a model knows: blanks, losses by kind, attention, checkpoints of one run."""

import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, pipeline

from cramnb.train.checkpoint import checkpoints, save_checkpoint
from cramnb.cli import main
from cramnb.text.masking import MaskedBatch, mask_tokens
from cramnb.model.mlm import build_model
from cramnb.judge.probe import (
    KINDS,
    attention_distance,
    attention_entropy,
    attention_maps,
    compare_checkpoints,
    fill_blank,
    frequency_kinds,
    load_weights,
    loss_by_kind,
    token_kinds,
)
from cramnb.core import CramError
from cramnb.recipe import tiny
from cramnb.text.tokenizer import train_tokenizer
from cramnb.train.loop import Loop, heldout_loss

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


@pytest.fixture(scope="module")
def batches(tokenizer) -> list[MaskedBatch]:
    ids = [i for t in TEXTS for i in tokenizer(t, truncation=False).input_ids]
    rows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    return [
        mask_tokens(
            part,
            mlm_probability=0.25,
            mask_token_id=tokenizer.mask_token_id,
            vocab_size=len(tokenizer),
            generator=torch.Generator().manual_seed(i),
        )
        for i, part in enumerate(rows.split(7))
    ]


# --- blanks


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


# --- kinds


def test_each_token_has_one_kind(tokenizer):
    kinds, names = token_kinds(tokenizer)
    of = {t: names[kinds[i]] for t, i in tokenizer.get_vocab().items()}
    assert len(kinds) == len(tokenizer) and names == KINDS
    assert (of["[MASK]"], of["[SEP]"], of["."], of["("], of["_"]) == (
        "special",
        "special",
        "punctuation",
        "punctuation",
        "punctuation",
    )
    assert (
        of["q"] == "word start"
        and of["1"] == "number"
        and all(
            k == "continuation" for t, k in of.items() if t.startswith("##") and t[2:].isalpha()
        )
    )


@pytest.mark.parametrize(
    "algorithm, start, size", [("BPE", "Ġ", 320), ("Unigram", "▁", 100)]
)  # byte-level BPE begins with 256 bytes
def test_other_alphabets_of_subwords(algorithm, start, size):
    other = train_tokenizer(
        TEXTS, tiny(f"data.tokenizer={algorithm}", f"data.vocab_size={size}").data, size
    )
    kinds, names = token_kinds(other)
    of = {t: names[kinds[i]] for t, i in other.get_vocab().items()}
    assert (
        {of[t] for t in of if t.startswith(start) and t[1:].isalpha()} == {"word start"}
        and "continuation" in of.values()
        and of["."] == "punctuation"
        and of["[PAD]"] == "special"
    )


def test_bins_of_frequency_part_the_vocabulary():
    counts = torch.tensor([5, 100, 0, 7, 7, 1000])
    bins, names = frequency_kinds(counts, (1, 3))
    assert names == ["rank 1 to 1", "rank 2 to 3", "rank 4 to 6"] and bins.tolist() == [
        2,
        1,
        2,
        1,
        2,
        0,
    ]


def test_kinds_part_the_loss(model, tokenizer, batches):
    kinds, names = token_kinds(tokenizer)
    rows = loss_by_kind(model, batches, kinds, names)
    asked = sum((b.labels != -100).sum().item() for b in batches)
    assert (
        sum(r["tokens"] for r in rows) == asked
        and {r["kind"] for r in rows} <= set(KINDS) - {"special"}
        and len(rows) >= 3
    )
    assert sum(r["loss"] * r["tokens"] for r in rows) / asked == pytest.approx(
        heldout_loss(model, batches), abs=1e-5
    )
    bins = frequency_kinds(torch.arange(len(tokenizer)), (30, 60))
    assert sum(
        r["loss"] * r["tokens"] for r in loss_by_kind(model, batches, *bins)
    ) / asked == pytest.approx(heldout_loss(model, batches), abs=1e-5)
    assert all(0 <= r["top1"] <= 1 for r in rows)


# --- attention


def test_weights_sum_to_one_and_the_kernel_comes_back(model, batches):
    ids, was = batches[0].input_ids, model.config._attn_implementation
    before = model(ids).logits
    maps = attention_maps(model, ids)
    L, H = model.config.num_hidden_layers, model.config.num_attention_heads
    assert (
        maps.shape == (L, len(ids), H, 16, 16)
        and torch.allclose(maps.sum(-1), torch.ones(L, len(ids), H, 16), atol=1e-5)
        and maps.min() >= 0
    )
    assert model.config._attn_implementation == was == "sdpa" and model(ids).attentions is None
    if not model.training:
        assert torch.equal(before, model(ids).logits)


def test_distance_and_entropy_of_heads_known_by_hand():
    T = 9
    itself, everywhere, before = torch.eye(T), torch.full((T, T), 1 / T), torch.zeros(T, T)
    before[torch.arange(1, T), torch.arange(T - 1)] = 1
    before[0, 0] = 1
    maps = torch.stack([itself, everywhere, before])[None, None]  # one layer, one row, three heads
    mean = sum(abs(i - j) for i in range(T) for j in range(T)) / T**2
    assert attention_distance(maps)[0].tolist() == pytest.approx(
        [0, mean, (T - 1) / T]
    ) and attention_entropy(maps)[0].tolist() == pytest.approx([0, math.log(T), 0], abs=1e-6)


def test_padding_does_not_count(model, tokenizer):
    short = torch.tensor([tokenizer("the quick brown fox jumps").input_ids])
    padded, mask = (
        torch.nn.functional.pad(short, (0, 6)),
        torch.nn.functional.pad(torch.ones_like(short), (0, 6)),
    )
    alone, together = attention_maps(model, short), attention_maps(model, padded, mask)
    assert torch.allclose(
        attention_distance(alone), attention_distance(together, mask), atol=1e-4
    ) and torch.allclose(attention_entropy(alone), attention_entropy(together, mask), atol=1e-4)


# --- checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer, batches):
    folder, model = tmp_path_factory.mktemp("run") / "checkpoints", models(tokenizer)["ours"]
    train = tiny("train.progress=updates", "train.max_updates=60", "train.batch_size=7").train
    trainer, found = (
        Loop(
            model,
            train,
            lambda start, n, number, x: batches[number % len(batches)],
            budget=1,
            microbatch_size=7,
        ),
        {},
    )
    for row in trainer.updates():
        if row["update"] % 20 == 0:
            save_checkpoint(folder, trainer, keep=10)
            found[row["update"]] = heldout_loss(model, batches)
    return folder, found


def test_each_checkpoint_answers_for_itself(run, tokenizer, batches):
    folder, found = run
    model = models(tokenizer)["ours"]
    rows = compare_checkpoints(folder, model, lambda m: dict(loss=heldout_loss(m, batches)))
    assert (
        [r["update"] for r in rows] == [20, 40, 60]
        and {r["update"]: r["loss"] for r in rows} == pytest.approx(found)
        and rows[-1]["loss"] < rows[0]["loss"] - 0.3
    )


def test_only_safetensors_are_read(run, tokenizer, tmp_path):
    "A pickle beside a checkpoint, or in its place, is never opened."
    import shutil

    folder = shutil.copytree(run[0], tmp_path / "checkpoints")
    for place in checkpoints(folder):
        (place / "model.safetensors").unlink()
        torch.save(dict(x=1), place / "pytorch_model.bin")
    with pytest.raises(CramError, match="no sound checkpoint"):
        compare_checkpoints(folder, models(tokenizer)["ours"], lambda m: {}, lambda text: None)


def test_damaged_and_foreign_checkpoints(run, tokenizer, batches, tmp_path):
    import shutil

    folder = shutil.copytree(run[0], tmp_path / "checkpoints")
    (checkpoints(folder)[1] / "model.safetensors").write_bytes(b"x")
    said = []
    rows = compare_checkpoints(folder, models(tokenizer)["ours"], lambda m: {}, said.append)
    assert (
        [r["update"] for r in rows] == [20, 60] and len(said) == 1 and "update_00000040" in said[0]
    )
    with pytest.raises(CramError, match="another model"):
        load_weights(checkpoints(folder)[0], models(tokenizer)["bert"])
    with pytest.raises(CramError, match="no sound checkpoint"):
        compare_checkpoints(tmp_path / "nowhere", models(tokenizer)["ours"], lambda m: {})


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
