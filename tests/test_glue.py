"""The exam: rows from every place they come from, honest numbers, the protocols, and the reader's own tables."""
import copy
import gzip
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import beside, cramnb
from safetensors.torch import load_file, save_file
from scipy import stats
from sklearn import metrics as sk
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from cramnb.corpus import docstrings
from cramnb.cram import main
from cramnb.finetune import (Trial, encode_task, evaluate_checkpoint, inputs, leak, load_classifier, mean_score, plot_scores, predict, run_trial, score_table, summarise,
                             token_types, within_rules)
from cramnb.glue import GLUE, METRICS, TASKS, GlueMetric, check_rows, load_folder, load_hub, load_tasks, own_task, score
from cramnb.mlm import build_model
from cramnb.recipe import CramError, preset
from cramnb.tokenizer import train_tokenizer

EV = replace(preset("eval", "GLUE_sane"), epochs=2, lr=2e-3, classifier_pooling="mean")
SIX = ("cola", "sst2", "mrpc", "stsb", "rte", "mnli")


@pytest.fixture(scope="module")
def tokenizer():
    import itertools
    data = replace(preset("data", "docstrings"), vocab_size=600)
    return train_tokenizer(list(itertools.islice(docstrings(), 300)), data)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    "A fresh model of ours as a folder."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model(replace(preset("arch", "tiny"), num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128, classifier_hidden_size=64), len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tokenizer, tmp_path_factory):
    "The same for BERT of transformers, which has token types."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(name, n, seed=0):
    "Made-up rows in a task's form."
    rng, task = random.Random(seed), TASKS[name]
    words = "warm cold open shut fast slow bright dark early late".split()
    label = lambda i: round(rng.uniform(0, 5), 2) if task.num_labels == 1 else i % task.num_labels
    return [{f: " ".join(rng.choices(words, k=rng.randint(3, 9))) for f in task.fields} | dict(label=label(i), idx=i) for i in range(n)]


def write(folder, rows):
    for split, content in rows.items():
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(folder/f"{split}.jsonl.gz", "wt", encoding="utf-8") as f: f.writelines(json.dumps(r) + "\n" for r in content)


# --- rows

@pytest.mark.parametrize("name", SIX)
def test_real_tasks_load_and_partial_ones_are_said(name):
    splits = load_folder(name, beside("data")/"glue")
    remark = check_rows(TASKS[name], splits)
    assert (len(splits["train"]), len(splits["dev"])) == TASKS[name].rows if name != "mnli" else "27,438 of 392,702 training rows" in remark and len(splits["dev_mismatched"]) == 9832
    assert not remark or name == "mnli"


@pytest.mark.parametrize("name", GLUE)
def test_all_nine_load_from_json_lines(name, tmp_path):
    splits = {"train": rows_of(name, 6), "dev_matched" if name == "mnli" else "dev": rows_of(name, 4, 1)}
    if name == "mnli": splits["dev_mismatched"] = rows_of(name, 3, 2)
    write(tmp_path/name, splits)
    got = load_folder(name, tmp_path)
    assert got["train"] == splits["train"] and len(got["dev"]) == 4 and ("dev_mismatched" in got) == (name == "mnli")
    assert "not comparable" in check_rows(TASKS[name], got)


TABLES = dict(   # folder, header, line with text a, text b and a label as GLUE's own files hold them
    cola=("CoLA", None, "gj04\t{l}\t*\t{a}"), sst2=("SST-2", "sentence\tlabel", "{a}\t{l}"), mrpc=("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{l}\t702\t703\t{a}\t{b}"),
    qqp=("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "7\t1\t2\t{a}\t{b}\t{l}"),
    stsb=("STS-B", "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore", "0\tmain\tf\t2012\t1\tnone\tnone\t{a}\t{b}\t{l}"),
    mnli=("MNLI", "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
          "0\t1\t1c\tfiction\tp\tp\tp\tp\t{a}\t{b}\tneutral\t{l}"),
    qnli=("QNLI", "index\tquestion\tsentence\tlabel", "0\t{a}\t{b}\t{l}"), rte=("RTE", "index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{l}"), wnli=("WNLI", "index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{l}"))


@pytest.mark.parametrize("name", GLUE)
def test_all_nine_load_from_glues_own_files(name, tmp_path):
    folder, header, line = TABLES[name]
    task, label = TASKS[name], dict(stsb=4.25, mnli=2, rte=1, qnli=1).get(name, 1)
    shown = task.labels[label] if task.labels else str(label)
    texts = [('a "quoted word', "it's"), ("with \u2028 inside", 'b"')]
    body = "\n".join(line.format(a=a, b=b, l=shown) for a, b in texts)
    (tmp_path/folder).mkdir()
    splits = ("train", "dev_matched", "dev_mismatched") if name == "mnli" else ("train", "dev")
    for split in splits: (tmp_path/folder/f"{split}.tsv").write_text((header + "\n" if header else "") + body + "\n", encoding="utf-8", newline="")
    got = load_folder(name, tmp_path)["train"]
    assert [tuple(r[f] for f in task.fields) for r in got] == [t[:len(task.fields)] for t in texts]
    assert [r["label"] for r in got] == [label]*2 and isinstance(got[0]["label"], float if name == "stsb" else int)


def test_torn_lines_of_glues_tables_are_left_out_and_a_wrong_table_is_named(tmp_path):
    (tmp_path/"QQP").mkdir()
    for split in ("train", "dev"): (tmp_path/"QQP"/f"{split}.tsv").write_text("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t1\n2\t3\n3\t4\t5\tc\td\t0\n")
    assert [r["label"] for r in load_folder("qqp", tmp_path)["train"]] == [1, 0]
    (tmp_path/"RTE").mkdir()
    for split in ("train", "dev"): (tmp_path/"RTE"/f"{split}.tsv").write_text("index\ttext\tlabel\n0\ta\tentailment\n")
    with pytest.raises(CramError, match="no column sentence1, sentence2"): load_folder("rte", tmp_path)
    write(tmp_path/"sst2", dict(train=[dict(sentence="x", label="good")], dev=[]))
    with pytest.raises(CramError, match="'good' is none of 0 to 1"): load_folder("sst2", tmp_path)
    write(tmp_path/"cola", dict(train=[dict(sentence="x", label=3)], dev=[dict(sentence="x", label=0)]))
    with pytest.raises(CramError, match="row 0: the label 3 is not one of 0 to 1"): check_rows(TASKS["cola"], load_folder("cola", tmp_path))
    (tmp_path/"wnli").mkdir()
    (tmp_path/"wnli/train.jsonl").write_text('{"sentence1": "a"}\n{"sente')
    (tmp_path/"wnli/dev.jsonl").write_text("")
    with pytest.raises(CramError, match="line 2, is not JSON"): load_folder("wnli", tmp_path)


MSR = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"


@pytest.mark.parametrize("ids", ["dev_ids.tsv", "mrpc_dev_ids.tsv", ""])
def test_mrpc_under_its_publishers_names(ids, tmp_path):
    folder = tmp_path/"MRPC"
    folder.mkdir()
    (folder/"msr_paraphrase_train.txt").write_text("\ufeff" + MSR + '1\t7\t8\ta "b\tc\r\n0\t2\t3\td\te\r\n1\t4\t5\tf\tg"\r\n', encoding="utf-8", newline="")
    (folder/"msr_paraphrase_test.txt").write_text("\ufeff" + MSR + "1\t9\t10\th\ti\r\n", encoding="utf-8", newline="")
    if ids: (folder/ids).write_text("2\t3\n")
    got = load_folder("mrpc", tmp_path)
    if ids: assert [[r["idx"] for r in got[s]] for s in ("train", "dev", "test")] == [[0, 2], [1], [0]] and "label" not in got["test"][0]
    else: assert [r["idx"] for r in got["train"]] == [0, 1, 2] and got["dev"] == [dict(sentence1="h", sentence2="i", label=1, idx=0)] and "test" not in got
    assert got["train"][0]["sentence1"] == 'a "b' and got["train"][-1]["sentence2"] == 'g"' and "not comparable" in check_rows(TASKS["mrpc"], got)


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("layout", ["{split}-00000-of-00001.parquet", "{split}/0000.parquet", "{split}.parquet", "{split}.csv", "{split}.json"])
def test_all_nine_load_from_a_copy_of_the_hub_and_other_tables(name, layout, tmp_path):
    import datasets
    splits = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched") if name == "mnli" else ("train", "validation", "test")
    for split in splits:
        path = tmp_path/name/layout.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = datasets.Dataset.from_list([r | dict(label=-1) if split.startswith("test") else r for r in rows_of(name, 5)])
        if path.suffix == ".json": path.write_text(json.dumps(rows.to_list(), indent=1))
        else: getattr(rows, "to_" + path.suffix[1:])(path)
    got = load_folder(name, tmp_path)
    keep = lambda rows: [{k: r[k] for k in (*TASKS[name].fields, "label")} for r in rows]
    assert keep(got["train"]) == keep(got["dev"]) == keep(rows_of(name, 5)) and len(got["test"]) == 5 and ("test_mismatched" in got) == (name == "mnli")
    check_rows(TASKS[name], got)


def test_two_parts_of_a_split_are_one(tmp_path):
    import datasets
    (tmp_path/"rte").mkdir()
    for n in range(2): datasets.Dataset.from_list(rows_of("rte", 3, n)).to_parquet(tmp_path/f"rte/train-{n:05d}-of-00002.parquet")
    datasets.Dataset.from_list(rows_of("rte", 3)).to_parquet(tmp_path/"rte/validation-00000-of-00001.parquet")
    assert load_folder("rte", tmp_path)["train"] == rows_of("rte", 3) + rows_of("rte", 3, 1)


def test_superglue_names_the_texts_of_rte_otherwise(tmp_path):
    (tmp_path/"RTE").mkdir()
    for split in ("train", "val"): (tmp_path/f"RTE/{split}.jsonl").write_text('\ufeff{"premise": "p", "hypothesis": "h", "label": "not_entailment", "idx": 0}\r\n', encoding="utf-8")
    (tmp_path/"RTE/test.jsonl").write_text('{"premise": "p", "hypothesis": "h", "idx": 0}\n')
    got = load_folder("rte", tmp_path)
    assert [got["dev"][0][k] for k in ("sentence1", "sentence2", "label")] == ["p", "h", 1]
    check_rows(TASKS["rte"], got)


def test_a_test_table_keeps_every_row_because_a_server_counts_them(tmp_path):
    (tmp_path/"QQP").mkdir()
    for split in ("train", "dev"): (tmp_path/f"QQP/{split}.tsv").write_text("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t1\n")
    (tmp_path/"QQP/test.tsv").write_text("id\tquestion1\tquestion2\n0\ta\tb\n1\tc\t\n2\td\n3\te\tf\n")
    got = load_folder("qqp", tmp_path)
    assert [(r["question1"], r["question2"], r["idx"]) for r in got["test"]] == [("a", "b", 0), ("c", "", 1), ("d", "", 2), ("e", "f", 3)]


@pytest.mark.parametrize("content, told", [
    (b'{"sentence": "caf\xe9", "label": 1}', "not text in UTF-8"), (gzip.compress(b'{"sentence": "a", "label": 1}')[:-9], "damaged"),
    (b"[1]", "line 1, is no object"), (b'{"sentence": null, "label": 1}', "row 0: sentence holds None, not text"), (b'{"sentence": "a", "label": 1}\n{"label": 1}', "row 1: sentence holds None"),
    (b'{"sentence": "a", "label": 0.7}', "label 0.7 is none of 0 to 1"), (b'{"sentence": "a", "label": [1]}', "is none of 0 to 1")])
def test_damaged_rows_are_one_message(content, told, tmp_path):
    (tmp_path/"cola").mkdir()
    for split in ("train", "dev"): (tmp_path/f"cola/{split}.jsonl").write_bytes(content)
    with pytest.raises(CramError, match=told): check_rows(TASKS["cola"], load_folder("cola", tmp_path))


@pytest.mark.parametrize("name, label, number", [("boolq", True, 1), ("cb", "neutral", 2), ("wic", False, 0)])
def test_superglue_in_its_own_files(name, label, number, tmp_path):
    task = TASKS[name]
    for split in ("train", "val"):
        (tmp_path/name.upper()).mkdir(exist_ok=True)
        (tmp_path/name.upper()/f"{split}.jsonl").write_text(json.dumps({f: "some text" for f in task.fields} | dict(label=label)) + "\n")
    assert load_folder(name, tmp_path)["dev"][0]["label"] == number


def test_hub_names_and_test_splits(monkeypatch):
    import datasets
    asked = []
    def stand_in(path, name=None, **more):
        asked.append((path, name, more))
        if path == "aps/super_glue" and not more: raise RuntimeError("Dataset scripts are no longer supported, but found super_glue.py")
        task = name or more["data_dir"]
        names = ["train", "validation", "test"] if task != "mnli" else ["train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"]
        return datasets.DatasetDict({n: datasets.Dataset.from_list(rows_of(task, 3)) for n in names})
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert sorted(load_hub("mnli")) == ["dev", "dev_mismatched", "test", "test_mismatched", "train"]
    assert sorted(load_hub("cb")) == ["dev", "test", "train"]
    assert asked == [("nyu-mll/glue", "mnli", {}), ("aps/super_glue", "cb", {}), ("aps/super_glue", None, dict(data_dir="cb", revision="refs/convert/parquet"))]


# --- metrics

def test_metrics_equal_sklearn_and_scipy():
    rng = np.random.default_rng(0)
    for _ in range(5):
        p, r, v, w = rng.integers(0, 2, 200), rng.integers(0, 2, 200), rng.random(200)*5, rng.random(200)*5
        known = dict(accuracy=sk.accuracy_score(r, p), f1=sk.f1_score(r, p), macro_f1=sk.f1_score(r, p, average="macro"), matthews=sk.matthews_corrcoef(r, p))
        for name, value in known.items(): assert abs(score(name, p, r) - value) < 1e-12
        for name, f in dict(pearson=stats.pearsonr, spearman=stats.spearmanr).items(): assert abs(score(name, v, w) - f(v, w)[0]) < 1e-12
        got = GlueMetric(config_name="stsb").compute(predictions=v.tolist(), references=w.tolist())
        assert abs(got["pearson"] - stats.pearsonr(v, w)[0]) < 1e-12 and abs(got["spearman"] - stats.spearmanr(v, w)[0]) < 1e-12
    assert GlueMetric(config_name="accuracy,f1").compute(predictions=[1, 0], references=[1, 1]) == dict(accuracy=.5, f1=pytest.approx(2/3))


@pytest.mark.parametrize("name", METRICS)
def test_constant_and_broken_predictions_are_no_surprise(name, recwarn):
    r = np.array([0, 1, 0, 1])
    assert score(name, np.full(4, np.nan), r) == 0
    assert name not in ("matthews", "pearson", "spearman") or score(name, np.zeros(4), r) == 0
    assert not recwarn.list


@pytest.mark.parametrize("name", METRICS)
def test_numbers_that_cannot_be_scored(name):
    assert score(name, [0.0, 1.0, 1.0], [0.0, 1.0, float("nan")]) == 0
    for p, r in (([1], [1, 0]), ([], [])):
        with pytest.raises(CramError, match="one for each row"): score(name, p, r)


def test_the_mean_is_over_nine_numbers_as_published():
    card = dict(sst2=dict(accuracy=.92), stsb=dict(pearson=.874), rte=dict(accuracy=.585), qnli=dict(accuracy=.902), qqp=dict(f1=.875), mrpc=dict(f1=.889), cola=dict(matthews=.533),
                mnli=dict(accuracy=.841, accuracy_mm=.846), wnli=dict(accuracy=.563))
    scores = summarise([Trial(n, 0, m, 0., 0.) for n, m in card.items()])
    mean, harmonic = mean_score(scores)
    assert f"{100*mean:.1f}" == "80.7" and sum(s.in_mean for s in scores) == 9 and harmonic == pytest.approx(stats.hmean([s.median for s in scores if s.in_mean]))


def test_median_of_five_not_the_best():
    trials = [Trial("rte", i, dict(accuracy=v), .5, 0.) for i, v in enumerate((.5, .9, .6, .55, .58))]
    assert summarise(trials)[0].median == .58
    for word in ("50.0 90.0 60.0 55.0 58.0", "40.0", "median, last epoch; within the rules"): assert word in score_table(trials, replace(EV, trials=5))


# --- encodings

def test_token_types_are_those_of_bert(tokenizer):
    theirs = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer._tokenizer), **{k: getattr(tokenizer, k) for k in ("pad_token", "sep_token", "cls_token", "mask_token", "unk_token")})
    from tokenizers.processors import TemplateProcessing
    theirs._tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    want = theirs(["the list", "a"], ["is empty", "returns the value of it"], padding=True, return_tensors="pt", return_token_type_ids=True)
    assert torch.equal(token_types(want["input_ids"], want["attention_mask"], 3), want["token_type_ids"])


def test_token_types_reach_the_models_that_know_them(checkpoint, bert, tokenizer):
    ids = encode_task(tokenizer, [dict(a="one", b="two")], ("a", "b"), EV)
    ours, theirs = (load_classifier(c, 2, EV) for c in (checkpoint, bert))
    assert "token_type_ids" not in inputs(ours, tokenizer, ids, EV) and inputs(theirs, tokenizer, ids, EV)["token_type_ids"].sum() > 0
    assert "token_type_ids" not in inputs(theirs, tokenizer, ids, replace(EV, token_types=False))


def test_three_columns_are_two_texts(tokenizer):
    ids = encode_task(tokenizer, [dict(word="open", sentence1="open it", sentence2="an open door")], TASKS["wic"].fields, EV)[0]
    assert ids.count(tokenizer.sep_token_id) == 3 and ids[0] == tokenizer.cls_token_id


@pytest.mark.parametrize("which", ["checkpoint", "bert"])
def test_an_answer_depends_on_nothing_else_in_the_batch(which, tokenizer, request):
    torch.manual_seed(0)
    model = load_classifier(request.getfixturevalue(which), 1, replace(EV, checkpoint="untrained"))
    ids = encode_task(tokenizer, rows_of("stsb", 40), TASKS["stsb"].fields, EV)
    alone = [predict(model, [row], tokenizer, EV)[0] for row in ids]
    for size in (7, 40): np.testing.assert_allclose(predict(model, ids, tokenizer, EV, batch_size=size), alone, atol=1e-5)


def test_most_of_what_is_computed_is_text(tokenizer):
    from cramnb.finetune import similar_lengths
    rows = load_folder("cola", beside("data")/"glue")["train"]
    ids = encode_task(tokenizer, rows, ("sentence",), EV)
    lengths = np.array([len(i) for i in ids])
    cells = sum(len(b)*lengths[b].max() for b in similar_lengths(lengths, 16, np.random.default_rng(0)))
    assert lengths.sum()/cells > .9 and 128*len(ids)/cells > 4


# --- checkpoints

def test_what_is_missing_is_listed(checkpoint, tmp_path):
    for f in checkpoint.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    weights = load_file(tmp_path/"model.safetensors")
    lost = next(n for n in weights if "layers.1.mlp" in n)
    save_file({n: w for n, w in weights.items() if n != lost}, tmp_path/"model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CramError, match=lost): load_classifier(tmp_path, 2, EV)
    save_file({n: (w[:5] if n == lost else w) for n, w in weights.items()}, tmp_path/"model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CramError, match=lost): load_classifier(tmp_path, 2, EV)


def test_a_fine_tuned_model_may_be_fine_tuned_again_on_other_classes(checkpoint, tmp_path):
    run_trial(checkpoint, TASKS["rte"], dict(train=rows_of("rte", 16), dev=rows_of("rte", 8)), replace(EV, epochs=1), 0, keep=tmp_path/"kept")
    trial, _ = run_trial(tmp_path/"kept", TASKS["mnli"], dict(train=rows_of("mnli", 18), dev=rows_of("mnli", 9), dev_mismatched=rows_of("mnli", 9)), replace(EV, epochs=1), 0)
    assert {"accuracy", "accuracy_mm"} == set(trial.metrics)
    assert load_classifier(tmp_path/"kept", 2, EV).config.id2label == {0: "entailment", 1: "not_entailment"}


def test_texts_longer_than_the_position_table(bert):
    with pytest.raises(CramError, match="max_seq_length=600 .* has 512 rows"): run_trial(bert, TASKS["rte"], dict(train=rows_of("rte", 4), dev=rows_of("rte", 4)), replace(EV, max_seq_length=600), 0)


def test_bert_of_transformers_is_scored_like_ours(bert):
    trial, answers = run_trial(bert, TASKS["rte"], dict(train=rows_of("rte", 16), dev=rows_of("rte", 8), test=rows_of("rte", 4)), replace(EV, epochs=1), 0)
    assert set(trial.metrics) == {"accuracy"} and len(answers["test"]) == 4


def test_folders_that_are_no_checkpoints(tmp_path):
    with pytest.raises(CramError, match="cannot be loaded|tokenizer"): run_trial(tmp_path, TASKS["rte"], dict(train=[], dev=[]), EV, 0)


# --- protocols

def test_protocols_of_the_reference_and_the_rules():
    sane = preset("eval", "GLUE_sane")
    assert (sane.lr, sane.betas, sane.eps, sane.weight_decay, sane.batch_size, sane.epochs, sane.warmup, sane.max_seq_length, sane.classifier_pooling) == (4e-5, [.9, .98], 1e-6, 0, 16, 5, .1, 128, "first")
    assert within_rules(sane) == within_rules(preset("eval", "local")) == "within the rules"
    assert "10 epochs" in within_rules(preset("eval", "GLUE")) and "best of 4 learning rates" in within_rules(preset("eval", "bert-sweep"))


def test_the_leak_is_the_originals():
    sane = preset("eval", "GLUE_sane")
    for name, updates, share in (("cola", 2675, .0998), ("mnli", 122720, .0022), ("mrpc", 1150, .232), ("rte", 780, .342)):
        got = leak(sane, TASKS["cola"].rows[0], TASKS[name].rows[0])
        assert round(got.warmup*updates) == 267 and got.warmup == pytest.approx(share, abs=1e-3)


def test_a_sweep_takes_each_tasks_best_and_says_so(checkpoint, tmp_path):
    write(tmp_path/"glue/rte", dict(train=rows_of("rte", 32), dev=rows_of("rte", 16, 1)))
    ev = replace(EV, tasks="rte", glue_dir=str(tmp_path/"glue"), sweep_lr=[1e-5, 2e-3], trials=2, epochs=1)
    trials = evaluate_checkpoint(checkpoint, ev, tmp_path/"eval")
    assert len(trials) == 4 and {t.setting for t in trials} == {"lr 1e-05", "lr 0.002"}
    best = summarise(trials)[0]
    assert best.median == max(np.median([t.metrics["accuracy"] for t in trials if t.setting == s]) for s in {t.setting for t in trials})
    table = score_table(trials, ev)
    assert "not within the rules" in table and f"rte {best.setting}" in table


def test_interrupted_trials_are_run_again_and_others_are_not(checkpoint, tmp_path):
    write(tmp_path/"glue/rte", dict(train=rows_of("rte", 32), dev=rows_of("rte", 16, 1)))
    ev = replace(EV, tasks="rte", glue_dir=str(tmp_path/"glue"), trials=3, epochs=1)
    ran, lefts = [], []
    def stop(stage, done, total, **notes):
        ran.append(stage); lefts.append(notes['seconds_left'])
        if "trial 2" in stage and ran.count(stage) > 1: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): evaluate_checkpoint(checkpoint, ev, tmp_path/"eval", progress=stop)
    assert all(s > 0 for s in lefts) and len(list((tmp_path/"eval").glob("*.json"))) == 1
    again = []
    trials = evaluate_checkpoint(checkpoint, ev, tmp_path/"eval", progress=lambda stage, *_, **__: again.append(stage))
    assert not any("trial 1" in s for s in again) and [t.seed for t in trials] == [0, 1, 2]
    alone = run_trial(checkpoint, TASKS["rte"], load_folder("rte", tmp_path/"glue"), ev, 1)[0]
    assert trials[1].metrics == alone.metrics


def test_predictions_in_glues_submission_format(checkpoint, tmp_path):
    test = [{k: v for k, v in r.items() if k != "label"} for r in rows_of("mnli", 5)]
    write(tmp_path/"glue/mnli", dict(train=rows_of("mnli", 12), dev_matched=rows_of("mnli", 6), dev_mismatched=rows_of("mnli", 6), test_matched=test, test_mismatched=test))
    write(tmp_path/"glue/stsb", dict(train=rows_of("stsb", 12), dev=rows_of("stsb", 6)))
    evaluate_checkpoint(checkpoint, replace(EV, tasks="mnli,stsb", glue_dir=str(tmp_path/"glue"), epochs=1), tmp_path/"eval")
    where = tmp_path/"eval/predictions"
    assert sorted(p.name for p in where.iterdir()) == ["MNLI-m.tsv", "MNLI-mm.tsv", "STS-B.dev.tsv"]
    lines = (where/"MNLI-mm.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 6 and all(line.split("\t")[1] in TASKS["mnli"].labels for line in lines[1:])
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in (where/"STS-B.dev.tsv").read_text().splitlines()[1:])


def test_answers_that_are_no_numbers_count_as_nothing_and_are_said(checkpoint):
    trial, _ = run_trial(checkpoint, TASKS["stsb"], dict(train=rows_of("stsb", 16), dev=rows_of("stsb", 8)), replace(EV, lr=1e30, epochs=1, batch_size=2), 0)
    assert trial.metrics == dict(pearson=0.0, spearman=0.0) and "not numbers" in trial.remark


def test_picture_of_scores():
    figure = plot_scores(summarise([Trial("rte", i, dict(accuracy=.5+i/50), .53, 0.) for i in range(3)] + [Trial("cola", 0, dict(matthews=-.05), 0., 0.)]))
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert sum("published" in w for w in words) == 4 and figure.axes[0].get_ylim()[0] <= -5


# --- the reader's own tables

def mail(path, n=60, words=("win", "meeting")):
    path.write_text("subject,body,label\n" + "".join(f'{words[i % 2]} {i},"text, with comma",{"spam" if i % 2 == 0 else "ham"}\n' for i in range(n)), encoding="utf-8")
    return path


def test_a_csv_of_ones_own_is_learnt(checkpoint, tmp_path):
    [(task, splits, remark)] = load_tasks(replace(EV, files=str(mail(tmp_path/"mail.csv", 200)), metric="f1"))
    assert task.labels == ("ham", "spam") and task.fields == ("subject", "body") and "tenth" in remark
    trial, _ = run_trial(checkpoint, task, splits, replace(EV, epochs=5), 0)
    assert trial.metrics["f1"] > .9


def test_values_make_a_regression_and_whole_numbers_classes(tmp_path):
    (tmp_path/"v.jsonl").write_text("".join(json.dumps(dict(text=f"row {i}", label=i/2)) + "\n" for i in range(20)))
    (tmp_path/"c.jsonl").write_text("".join(json.dumps(dict(text=f"row {i}", label=[10, 9, 2][i % 3])) + "\n" for i in range(30)))
    assert own_task(str(tmp_path/"v.jsonl"))[0].num_labels == 1
    assert own_task(str(tmp_path/"c.jsonl"))[0].labels == ("2", "9", "10")
    assert own_task(str(tmp_path/"c.jsonl"), metric="pearson")[0].num_labels == 1


def test_rows_without_an_answer_or_a_text_are_named(tmp_path):
    (tmp_path/"a.csv").write_text("text,label\n" + "x,yes\ny,no\n"*10 + "z,\n")
    (tmp_path/"b.jsonl").write_text("".join(json.dumps(dict(text=f"row {i}", label="yes" if i % 2 else "no")) + "\n" for i in range(20)) + '{"text": "no answer"}\n')
    (tmp_path/"c.jsonl").write_text("".join(json.dumps(dict(text=f"row {i}", label="yes" if i % 2 else "no")) + "\n" for i in range(20)) + '{"label": "yes"}\n')
    for name in ("a.csv", "b.jsonl"):
        with pytest.raises(CramError, match="row 21 has no label"): own_task(str(tmp_path/name))
    with pytest.raises(CramError, match="None in its column text"): own_task(str(tmp_path/"c.jsonl"))


BODY = "".join(f"text {i},{'ab'[i % 2]}\r\n" for i in range(12))


@pytest.mark.parametrize("name, content, told", [
    ("a.csv", "\ufefftext,label\r\n" + BODY, None), ("a,b.csv", "text,label\n" + BODY, None), ("s.csv", "text;label\n" + BODY.replace(",", ";"), None), ("e.csv", "text,label\nx,a,,\n" + BODY, None),
    ("l.json", json.dumps([dict(text="x", label="ab"[i % 2]) for i in range(12)], indent=1), None), ("x.csv", "text,label\nhello, world,a\n" + BODY, "line 2, has more columns than the header"),
    ("x.csv", "text,label\nhello\n" + BODY, "row 1 has no label"), ("x.csv", "text,label\nhello,\n" + BODY, "row 1 has no label"), ("x.csv", ("text,label\n" + BODY + "caf\xe9,a\n").encode("latin1"), "not text in UTF-8"),
    ("x.jsonl", "\n".join(json.dumps(dict(text=None if i == 3 else "x", label=i % 2)) for i in range(20)), "None in its column text"),
    ("x.jsonl", "\n".join(json.dumps(dict(words=["a"], label=[i % 2] if i != 4 else 1)) for i in range(20)), "others with 1"),
    ("x.jsonl", "\n".join(json.dumps(dict(words="a", label=[i % 2])) for i in range(20)), "where a list of words is expected")])
def test_tables_of_ones_own_as_programs_write_them(name, content, told, tmp_path):
    (tmp_path/name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if told:
        with pytest.raises(CramError, match=told): own_task(str(tmp_path/name))
    else:
        task, splits, _ = own_task(tmp_path/name)
        assert task.fields == ("text",) and task.labels == ("a", "b") and len(splits["train"]) + len(splits["dev"]) in (12, 13)


def test_tags_of_words_are_learnt(checkpoint, tmp_path):
    rng = random.Random(0)
    def row():
        words = rng.choices(["the", "list", "returns", "Anna", "Bob", "value"], k=rng.randint(3, 8))
        return dict(tokens=words, tags=["NAME" if w in ("Anna", "Bob") else "O" for w in words])
    for split, n in (("train", 200), ("dev", 40)): (tmp_path/f"{split}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(n)))
    [(task, splits, _)] = load_tasks(replace(EV, files=f"{tmp_path}/train.jsonl,{tmp_path}/dev.jsonl", label_column="tags", metric="macro_f1"))
    assert task.per_token and task.labels == ("NAME", "O")
    trial, _ = run_trial(checkpoint, task, splits, replace(EV, epochs=5), 0)
    assert trial.metrics["macro_f1"] > .95


@pytest.mark.parametrize("words, message", [
    (["eval.files=none.csv"], "there is no such file"), (["eval.files=mail.csv", "eval.metric=pearson"], "choose from accuracy, f1, macro_f1, matthews"),
    (["eval.files=mail.csv", "eval.label_column=labl"], "it has subject, body, label"), (["eval.files=mail.csv", "eval.text_columns=subjekt"], "no column subjekt"),
    (["eval.files=mail.csv", "eval.label_column=subject"], "different labels"), (["eval.files=mail.txt"], "give .csv, .tsv or .jsonl"), (["eval.files=same.csv"], "nothing to learn"),
    (["eval.checkpoint=nowhere"], "is not a run and not a folder")])
def test_mistakes_cost_one_line(words, message, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mail(tmp_path/"mail.csv")
    (tmp_path/"mail.txt").write_text("x")
    mail(tmp_path/"same.csv").write_text("text,label\n" + "a,b\n"*20)
    words = words if "checkpoint" in words[0] else [*words, f"eval.checkpoint={checkpoint}"]
    assert main(["eval", *words, "eval.epochs=1"]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1


def test_a_name_that_is_not_in_the_cache_of_an_offline_machine(tmp_path):
    done = cramnb("eval", "eval.checkpoint=hf://no/such-model", "eval.tasks=rte", cwd=tmp_path)
    assert done.returncode == 2 and "no/such-model" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_command_scores_a_table_of_ones_own(checkpoint, tmp_path):
    mail(tmp_path/"mail.csv", 120)
    done = cramnb("eval", "eval.files=mail.csv", f"eval.checkpoint=hf://{checkpoint}", "eval.epochs=2", "eval.lr=2e-3", "eval.trials=2", "eval.save_models=True", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| mail | accuracy |" in done.stdout and "held out for evaluation" in done.stdout
    where = next((tmp_path/"runs/eval/eval").iterdir())
    assert {"glue.md", "glue.json", "glue.png", "predictions", "mail.seed0.model", "mail.seed1.model"} <= {p.name for p in where.iterdir()}


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_products_learn_as_well_and_weights_stay_in_32(checkpoint, precision):
    splits, scores, losses = dict(train=rows_of("cola", 64), dev=rows_of("cola", 32, 1)), {}, {}
    for kind in (torch.float32, precision):
        trial, _ = run_trial(checkpoint, TASKS["cola"], splits, replace(EV, epochs=2), 0, precision=kind)
        scores[kind], losses[kind] = trial.metrics["matthews"], trial.loss
    assert losses[precision] == pytest.approx(losses[torch.float32], abs=0.05) and losses[precision] != losses[torch.float32]


def test_a_training_set_that_is_cut_is_said_and_each_half_of_mnli_has_its_blind_answer(checkpoint, tmp_path):
    rows = lambda n, kind: [r | dict(label=kind) for r in rows_of("mnli", n)]
    write(tmp_path/"mnli", dict(train=rows_of("mnli", 60), dev_matched=rows(3, 0) + rows(1, 1), dev_mismatched=rows(1, 0) + rows(1, 1)))
    trials = evaluate_checkpoint(checkpoint, replace(EV, tasks="mnli", glue_dir=str(tmp_path), max_train_examples=20, epochs=1), tmp_path/"out")
    assert "trained on the first 20 of 60 rows" in trials[0].remark and "60 of 392,702 training rows" in score_table(trials, EV)
    assert [s.baseline for s in summarise(trials)] == [.75, .5]


def test_words_nobody_asks_about(checkpoint, tmp_path):
    rng = random.Random(0)
    row = lambda n: dict(pos=[1]*n, words=rng.choices(["warm", "cold", "open", "shut"], k=n))
    rows = [row(0) | dict(tags=[]) for _ in range(40)] + [(r := row(3)) | dict(tags=[-100, "A", "B"]) for _ in range(60)]
    (tmp_path/"tags.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ev = replace(EV, files=str(tmp_path/"tags.jsonl"), label_column="tags", epochs=1)
    task, splits, _ = own_task(ev.files, label_column="tags")
    assert task.fields == ("words",) and task.labels == ("A", "B") and [-100, 0, 1] in [r["label"] for r in splits["train"]]
    trial = evaluate_checkpoint(checkpoint, ev, tmp_path/"out")[0]
    assert np.isfinite(trial.loss)
    answers = (tmp_path/"out/predictions/tags.dev.tsv").read_text().splitlines()[1:]
    assert [len(a.split("\t")[1].split()) for a in answers] == [sum(v != -100 for v in r["label"]) for r in splits["dev"]]


def test_values_that_are_none_are_named(tmp_path):
    (tmp_path/"a.csv").write_text("text,label\n" + "a,1.5\n"*20 + "b,many\n")
    with pytest.raises(CramError, match="needs numbers, but label holds 'many'"): own_task(str(tmp_path/"a.csv"), metric="pearson")
    (tmp_path/"b.csv").write_text("txt,label\na,1.5\n")
    (tmp_path/"a.csv").write_text("text,label\na,1.5\nb,2\n")
    with pytest.raises(CramError, match="b.csv: no column text, which the training file has; it has txt"): own_task(f"{tmp_path/'a.csv'},{tmp_path/'b.csv'}")
    with pytest.raises(CramError, match="The predictions hold 'yes'"): score("accuracy", ["yes", "no"], [1, 0])
    with pytest.raises(CramError, match="The references hold None"): score("f1", [1, 0], [None, 0])
