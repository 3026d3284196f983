"""One trial: encodings, batches, heads, answers."""

# ruff: noqa: F811
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from exam import EV, bert, checkpoint, rows_of, tokenizer, typed  # noqa: F401
from safetensors.torch import load_file, save_file
from transformers import BertConfig

from cramnb.core import CramError
from cramnb.recipe import preset
from cramnb.judge.tasks import TASKS
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
    assert "token_type_ids" not in _inputs(ours, typed, features, EV)  # it has no vectors for them
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


@pytest.mark.parametrize("spoil", [lambda w: None, lambda w: w[:5]], ids=["missing", "cut"])
def test_what_is_missing_is_listed(spoil, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    lost = next(n for n in weights if "layers.1.mlp" in n)
    weights[lost] = spoil(weights[lost])
    weights = {n: w for n, w in weights.items() if w is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CramError, match=lost):
        load_classifier(folder, 2, EV)


def test_a_fine_tuned_model_may_be_fine_tuned_again_on_other_classes(checkpoint, tmp_path):
    ev, kept = replace(EV, epochs=1), tmp_path / "kept"
    rows = dict(train=rows_of("rte", 16), dev=rows_of("rte", 8))
    run_trial(checkpoint, TASKS["rte"], rows, ev, 0, keep=kept)
    names = load_classifier(kept, 2, EV).config.id2label
    assert names == {0: "entailment", 1: "not_entailment"}
    rows = {split: rows_of("mnli", 9) for split in ("train", "dev", "dev_mismatched")}
    trial, _ = run_trial(kept, TASKS["mnli"], rows, ev, 0)
    assert {"accuracy", "accuracy_mm"} == set(trial.metrics)


def test_bert_of_transformers_is_scored_like_ours(bert):
    rows, ev = dict(train=rows_of("rte", 16), dev=rows_of("rte", 8), test=rows_of("rte", 4)), EV
    trial, answers = run_trial(bert, TASKS["rte"], rows, replace(ev, epochs=1), 0)
    assert set(trial.metrics) == {"accuracy"} and len(answers["test"]) == 4
    with pytest.raises(CramError, match="max_seq_length=600 .* has 512 rows"):
        run_trial(bert, TASKS["rte"], rows, replace(ev, max_seq_length=600), 0)


def test_16_bit_products_learn_as_well_and_weights_stay_in_32(checkpoint):
    splits = dict(train=rows_of("cola", 64), dev=rows_of("cola", 32, 1))
    run = lambda kind: run_trial(checkpoint, TASKS["cola"], splits, EV, 0, precision=kind)[0].loss
    full, half = run(torch.float32), run(torch.bfloat16)
    assert half == pytest.approx(full, abs=0.05) and half != full


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


@pytest.mark.parametrize("n", [1, 8, 9, 300])
def test_batches_of_like_length_hold_every_row_once(n):
    lengths, orders = np.random.default_rng(n).integers(1, 60, n), []
    for rng in (None, np.random.default_rng(0), np.random.default_rng(1)):
        batches = list(similar_lengths(lengths, 4, rng))
        assert all(0 < len(b) <= 4 and (np.diff(lengths[b]) >= 0).all() for b in batches)
        orders.append(np.concatenate(batches).tolist())
        assert sorted(orders[-1]) == list(range(n))
    assert (np.diff(lengths[orders[0]]) >= 0).all()
    assert n < 10 or orders[1] != orders[2], "another epoch, another order"


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


def test_other_models_keep_an_option_that_has_the_same_name(tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.ModernBertConfig(vocab_size=90, pad_token_id=0, **sizes)
    transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path)
    assert load_classifier(tmp_path, 2, preset("eval", "GLUE_sane")).config.num_labels == 2
