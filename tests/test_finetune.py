"""One trial: encodings, batches, heads, answers."""

# ruff: noqa: F811
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import beside
from exam import EV, bert, checkpoint, rows_of, tokenizer, typed  # noqa: F401
from safetensors.torch import load_file, save_file
from transformers import BertConfig

from cramnb.core import CramError
from cramnb.judge.tasks import load_folder, TASKS
from cramnb.judge.finetune import (
    encode_rows,
    _inputs,
    load_classifier,
    predict,
    run_trial,
    similar_lengths,
    train_classifier,
)


@pytest.mark.parametrize("which", ["checkpoint", "bert"])
def test_an_answer_depends_on_nothing_else_in_the_batch(which, tokenizer, request):
    torch.manual_seed(0)
    unlabelled = [{f: r[f] for f in TASKS["stsb"].fields} for r in rows_of("stsb", 40)]
    model = load_classifier(request.getfixturevalue(which), 1, replace(EV, checkpoint="untrained"))
    ids = encode_rows(tokenizer, unlabelled, TASKS["stsb"], EV)
    alone = [predict(model, [row], tokenizer, EV)[0] for row in ids]
    for size in (7, 40):
        np.testing.assert_allclose(
            predict(model, ids, tokenizer, EV, batch_size=size), alone, atol=1e-5
        )


def test_most_of_what_is_computed_is_text(tokenizer):
    rows = load_folder("cola", beside("data") / "glue")["train"][:2000]
    ids = encode_rows(tokenizer, rows, TASKS["cola"], EV)
    lengths = np.array([len(i["input_ids"]) for i in ids])
    cells = sum(
        len(b) * lengths[b].max() for b in similar_lengths(lengths, 16, np.random.default_rng(0))
    )
    assert lengths.sum() / cells > 0.9 and 128 * len(ids) / cells > 4


def types_of(fields, row, tokenizer):
    task = replace(TASKS["wic"], fields=fields)
    (feature,) = encode_rows(tokenizer, [row], task, EV)
    return feature["input_ids"], feature["token_type_ids"]


def test_token_types_are_the_tokenizers_own(typed):
    row = dict(word="open", sentence1="open it", sentence2="an open door")
    ids, kinds = types_of(TASKS["wic"].fields, row, typed)
    assert ids.count(typed.sep_token_id) == 3 and ids[0] == typed.cls_token_id
    second = typed("an open door", add_special_tokens=False).input_ids
    assert kinds == [0] * (len(ids) - len(second) - 1) + [1] * (len(second) + 1)
    pair = dict(a="the list", b="is empty")
    ids, kinds = types_of(("a", "b"), pair, typed)
    assert kinds == typed("the list", "is empty", return_token_type_ids=True).token_type_ids


def test_token_types_reach_the_models_that_know_them(checkpoint, bert, typed):
    task = replace(TASKS["rte"], fields=("a", "b"))
    features = encode_rows(typed, [dict(a="one", b="two")], task, EV)
    ours, theirs = (load_classifier(c, 2, EV) for c in (checkpoint, bert))
    assert "token_type_ids" not in _inputs(ours, typed, features, EV), (
        "ours has no vectors for them"
    )
    assert _inputs(theirs, typed, features, EV)["token_type_ids"].sum() > 0
    assert "token_type_ids" not in _inputs(theirs, typed, features, replace(EV, token_types=False))


def test_a_single_text_stands_in_the_frame_of_a_pair(tokenizer):
    row = dict(sentence="open the door")
    (feature,) = encode_rows(tokenizer, [row], TASKS["sst2"], EV)
    ids, sep = feature["input_ids"], tokenizer.sep_token_id
    assert ids[0] == tokenizer.cls_token_id and ids[-2:] == [sep, sep]


def test_an_answer_that_is_no_number_is_nan_and_the_others_are_answers(checkpoint, tokenizer):
    def spoil(module, given, out):
        out.logits[-1] = torch.nan

    model = load_classifier(checkpoint, 2, EV)
    rows = [dict(sentence="open " * n) for n in (1, 9, 4)]
    features = encode_rows(tokenizer, rows, TASKS["sst2"], EV)
    model.register_forward_hook(spoil)  # of the longest row, which comes last
    assert np.isnan(predict(model, features, tokenizer, EV)).tolist() == [False, True, False]


def test_no_gradient_is_carried_into_the_next_update(checkpoint, tokenizer):
    model = load_classifier(checkpoint, 2, EV)
    features = encode_rows(tokenizer, rows_of("rte", 4), TASKS["rte"], EV)
    train_classifier(model, features, replace(EV, epochs=1), 0, tokenizer)
    assert all(p.grad is None for p in model.parameters())


def test_untrained_is_fresh(checkpoint):
    trained, fresh = (
        load_classifier(checkpoint, 2, replace(EV, checkpoint=which)).state_dict()
        for which in ("latest", "untrained")
    )
    name = next(n for n in trained if "mlp" in n and trained[n].dim() == 2)
    assert not torch.equal(trained[name], fresh[name])


# --- checkpoints


def test_what_is_missing_is_listed(checkpoint, tmp_path):
    for f in checkpoint.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(n for n in weights if "layers.1.mlp" in n)
    save_file(
        {n: w for n, w in weights.items() if n != lost},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(CramError, match=lost):
        load_classifier(tmp_path, 2, EV)
    save_file(
        {n: (w[:5] if n == lost else w) for n, w in weights.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(CramError, match=lost):
        load_classifier(tmp_path, 2, EV)


def test_a_fine_tuned_model_may_be_fine_tuned_again_on_other_classes(checkpoint, tmp_path):
    run_trial(
        checkpoint,
        TASKS["rte"],
        dict(train=rows_of("rte", 16), dev=rows_of("rte", 8)),
        replace(EV, epochs=1),
        0,
        keep=tmp_path / "kept",
    )
    trial, _ = run_trial(
        tmp_path / "kept",
        TASKS["mnli"],
        dict(train=rows_of("mnli", 18), dev=rows_of("mnli", 9), dev_mismatched=rows_of("mnli", 9)),
        replace(EV, epochs=1),
        0,
    )
    assert {"accuracy", "accuracy_mm"} == set(trial.metrics)
    assert load_classifier(tmp_path / "kept", 2, EV).config.id2label == {
        0: "entailment",
        1: "not_entailment",
    }


def test_texts_longer_than_the_position_table(bert):
    with pytest.raises(CramError, match="max_seq_length=600 .* has 512 rows"):
        run_trial(
            bert,
            TASKS["rte"],
            dict(train=rows_of("rte", 4), dev=rows_of("rte", 4)),
            replace(EV, max_seq_length=600),
            0,
        )


def test_bert_of_transformers_is_scored_like_ours(bert):
    trial, answers = run_trial(
        bert,
        TASKS["rte"],
        dict(train=rows_of("rte", 16), dev=rows_of("rte", 8), test=rows_of("rte", 4)),
        replace(EV, epochs=1),
        0,
    )
    assert set(trial.metrics) == {"accuracy"} and len(answers["test"]) == 4


def test_folders_that_are_no_checkpoints(tmp_path):
    with pytest.raises(CramError, match="cannot be loaded|tokenizer"):
        run_trial(tmp_path, TASKS["rte"], dict(train=[], dev=[]), EV, 0)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_products_learn_as_well_and_weights_stay_in_32(checkpoint, precision):
    splits, scores, losses = dict(train=rows_of("cola", 64), dev=rows_of("cola", 32, 1)), {}, {}
    for kind in (torch.float32, precision):
        trial, _ = run_trial(
            checkpoint, TASKS["cola"], splits, replace(EV, epochs=2), 0, precision=kind
        )
        scores[kind], losses[kind] = trial.metrics["matthews"], trial.loss
    assert (
        losses[precision] == pytest.approx(losses[torch.float32], abs=0.05)
        and losses[precision] != losses[torch.float32]
    )


def test_a_trial_depends_on_its_seed_alone_and_the_callers_random_numbers_go_on(checkpoint):
    rows = dict(train=rows_of("rte", 8), dev=rows_of("rte", 4))
    torch.manual_seed(7)
    want = torch.rand(3)
    losses = {}
    for start, seed in ((7, 0), (8, 0), (7, 1)):
        torch.manual_seed(start)
        trial, _ = run_trial(checkpoint, TASKS["rte"], rows, replace(EV, epochs=1), seed)
        losses[start, seed] = trial.loss
    assert torch.equal(torch.rand(3), want)
    assert losses[7, 0] == losses[8, 0] != losses[7, 1], "the seed of a trial decides"


def test_weights_come_from_safetensors_and_no_code_is_run(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(BertConfig(), folder / "pytorch_model.bin")
    with pytest.raises(CramError, match="cannot be loaded"):
        load_classifier(folder, 2, EV)
    folder = shutil.copytree(bert, tmp_path / "remote")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text()) | dict(model_type="foreign")
    config["auto_map"] = dict(AutoConfig="code.C", AutoModelForSequenceClassification="code.M")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CramError, match="cannot be loaded"):
        load_classifier(folder, 2, EV)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("n, size", [(1, 4), (8, 4), (9, 4), (300, 4)])
def test_batches_of_like_length_hold_every_row_once(n, size):
    lengths = np.random.default_rng(n).integers(1, 60, n)
    for rng in (None, np.random.default_rng(0)):
        batches = list(similar_lengths(lengths, size, rng))
        assert sorted(np.concatenate(batches).tolist()) == list(range(n))
        assert all(0 < len(b) <= size for b in batches)
        assert all((np.diff(lengths[b]) >= 0).all() for b in batches)
        if rng is None:
            assert (np.diff(lengths[np.concatenate(batches)]) >= 0).all()
    if n > 2 * size:
        first, other = (
            np.concatenate(list(similar_lengths(lengths, size, np.random.default_rng(s))))
            for s in (0, 1)
        )
        assert first.tolist() != other.tolist(), "another epoch, another order"


@pytest.mark.parametrize("which", ["checkpoint", "bert"])
def test_the_kernel_of_a_run_reaches_a_trial(which, request, monkeypatch):
    seen = []

    def spy(model, *_):
        seen.append(model.config._attn_implementation)
        return 0.0

    monkeypatch.setattr("cramnb.judge.finetune.train_classifier", spy)
    rows = dict(train=rows_of("rte", 4), dev=rows_of("rte", 4))
    where = request.getfixturevalue(which)
    for attention in ("sdpa", "eager"):
        run_trial(where, TASKS["rte"], rows, EV, 0, attention=attention)
    assert seen == ["sdpa", "eager"]
