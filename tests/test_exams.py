"""Rows of an exam from every place they come from, and the reader's own tables."""

# ruff: noqa: F811
import gzip
import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
from conftest import beside
from exam import EV, SIX, checkpoint, rows_of, tokenizer, write  # noqa: F401

from cramnb.cli import main
from cramnb.core import CramError
from cramnb.judge.finetune import run_trial
from cramnb.judge.score import evaluate_checkpoint
from cramnb.judge.tasks import GLUE, TASKS, load_folder, load_hub, load_tasks, own_task, remark_on


@pytest.mark.parametrize("name", SIX)
def test_real_tasks_load_and_partial_ones_are_said(name):
    splits = load_folder(name, beside("data") / "glue")
    remark = remark_on(TASKS[name], splits)
    if name == "mnli":
        assert "27,438 of 392,702 training rows" in remark and len(splits["dev_mismatched"]) == 9832
    else:
        assert (len(splits["train"]), len(splits["dev"])) == TASKS[name].rows and not remark


PAIR = "index\tsentence1\tsentence2\tlabel"
MNLI = "index promptID pairID genre a b c d sentence1 sentence2 label1 gold_label".replace(
    " ", "\t"
)
STSB = "index genre filename year old source1 source2 sentence1 sentence2 score".replace(" ", "\t")
TABLES = dict(  # folder, header, line with text a, text b and a label as GLUE's own files hold them
    cola=("CoLA", None, "gj04\t{l}\t*\t{a}"),
    sst2=("SST-2", "sentence\tlabel", "{a}\t{l}"),
    mrpc=("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{l}\t702\t703\t{a}\t{b}"),
    qqp=("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "7\t1\t2\t{a}\t{b}\t{l}"),
    stsb=("STS-B", STSB, "0\tmain\tf\t2012\t1\tnone\tnone\t{a}\t{b}\t{l}"),
    mnli=("MNLI", MNLI, "0\t1\t1c\tfiction\tp\tp\tp\tp\t{a}\t{b}\tneutral\t{l}"),
    qnli=("QNLI", "index\tquestion\tsentence\tlabel", "0\t{a}\t{b}\t{l}"),
    rte=("RTE", PAIR, "0\t{a}\t{b}\t{l}"),
    wnli=("WNLI", PAIR, "0\t{a}\t{b}\t{l}"),
)


@pytest.mark.parametrize("name", GLUE)
def test_all_nine_load_from_glues_own_files(name, tmp_path):
    folder, header, line = TABLES[name]
    task, label = TASKS[name], dict(stsb=4.25, mnli=2).get(name, 1)
    shown = task.labels[label] if task.labels else str(label)
    texts = [('a "quoted word', "it's"), ("with \u2028 inside", 'b"')]
    lines = ([header] if header else []) + [line.format(a=a, b=b, l=shown) for a, b in texts]
    (tmp_path / folder).mkdir()
    for split in ("train", "dev_matched", "dev_mismatched") if name == "mnli" else ("train", "dev"):
        path = tmp_path / folder / f"{split}.tsv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    got = load_folder(name, tmp_path)["train"]
    assert [tuple(r[f] for f in task.fields) for r in got] == [t[: len(task.fields)] for t in texts]
    assert [r["label"] for r in got] == [label] * 2
    assert isinstance(got[0]["label"], float if name == "stsb" else int)


def write_splits(folder, ending, content, splits="train dev"):
    "The same bytes for each split."
    folder.mkdir()
    for split in splits.split():
        (folder / f"{split}.{ending}").write_bytes(content)


def test_torn_lines_are_left_out_but_in_a_test_whose_rows_a_server_counts(tmp_path):
    head, whole, torn = "id\tquestion1\tquestion2\tis_duplicate\n", "1\ta\tb\t1\n", "2\tc\n"
    write_splits(tmp_path / "QQP", "tsv", (head + whole + torn).encode(), "train dev test")
    got = load_folder("qqp", tmp_path)
    assert [r["label"] for r in got["train"]] == [1]
    assert [(r["question1"], r["question2"]) for r in got["test"]] == [("a", "b"), ("c", "")]


@pytest.mark.parametrize(
    "name, layout",
    [
        ("mnli", "{split}-00000-of-00001.parquet"),
        ("mnli", "{split}/0000.parquet"),
        ("stsb", "{split}.csv"),
        ("stsb", "{split}.json"),
    ],
)
def test_a_copy_of_the_hub_and_other_tables(name, layout, tmp_path):
    ends = ("_matched", "_mismatched") if name == "mnli" else ("",)
    for split in ["train", *(kind + end for kind in ("validation", "test") for end in ends)]:
        path = tmp_path / name / layout.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        label = dict(label=-1) if split.startswith("test") else {}
        rows = datasets.Dataset.from_list([r | label for r in rows_of(name, 5)])
        getattr(rows, "to_" + path.suffix[1:])(path)
    got = load_folder(name, tmp_path)
    want = [{k: r[k] for k in (*TASKS[name].fields, "label")} for r in rows_of(name, 5)]
    assert got["train"] == got["dev"] == want
    assert len(got["test"]) == 5 and ("test_mismatched" in got) == (name == "mnli")


def test_two_parts_of_a_split_are_one(tmp_path):
    (tmp_path / "rte").mkdir()
    for n, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "validation")):
        rows = datasets.Dataset.from_list(rows_of("rte", 3, n))
        rows.to_parquet(tmp_path / f"rte/{name}{'-00000-of-00001' * (n == 2)}.parquet")
    got = [r["sentence1"] for r in load_folder("rte", tmp_path)["train"]]
    assert got == [r["sentence1"] for r in rows_of("rte", 3) + rows_of("rte", 3, 1)]


def test_superglue_has_other_names_and_labels(tmp_path):
    rte = dict(premise="p", hypothesis="h", label="not_entailment")
    for folder, row in dict(RTE=rte, BoolQ=dict(question="q", passage="p", label=True)).items():
        line = "\ufeff" + json.dumps(row) + "\r\n"
        write_splits(tmp_path / folder, "jsonl", line.encode(), "train val")
    assert load_folder("rte", tmp_path)["dev"] == [dict(sentence1="p", sentence2="h", label=1)]
    assert load_folder("boolq", tmp_path)["dev"][0]["label"] == 1


LABEL = b'{"sentence": "a", "label": 1'


@pytest.mark.parametrize(
    "ending, content",
    [
        ("jsonl", '{"sentence": "a", "label": 1}'.encode("utf-16")),
        ("jsonl", gzip.compress(LABEL + b"}", mtime=0)[:-9]),
        ("jsonl", b"[" * 100_000),
        ("jsonl", LABEL + b'}\n{"label": 1}'),
        ("jsonl", LABEL + b"0" * 5000 + b"}"),
        ("jsonl", b'{"sentence": "a", "label": "maybe\\u001b[31m"}'),
        ("tsv", b"index\ttext\tlabel\n0\ta\tentailment\n"),
        ("parquet", b"PAR1 this is none PAR1"),
    ],
)
def test_damaged_files_cost_one_line(ending, content, tmp_path):
    write_splits(tmp_path / "cola", ending, content)
    with pytest.raises(CramError) as error:
        load_folder("cola", tmp_path)
    told = str(error.value)
    assert len(told.splitlines()) == 1 and len(told) < 500 and "\x1b" not in told


def test_a_script_on_the_hub_is_read_from_the_hubs_own_copy(monkeypatch):
    asked = []

    def stand_in(path, name=None, **more):
        asked.append((path, name, more))
        if not more:
            raise RuntimeError("Dataset scripts are no longer supported, but found super_glue.py")
        rows = datasets.Dataset.from_list(rows_of("cb", 3))
        return datasets.DatasetDict(dict(train=rows, validation=rows, test=rows))

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert sorted(load_hub("cb")) == ["dev", "test", "train"]
    copy = dict(data_dir="cb", revision="refs/convert/parquet")
    assert asked == [("aps/super_glue", "cb", {}), ("aps/super_glue", None, copy)]


# --- the reader's own tables


def table(path, rows):
    "Rows as JSON lines, or text as it is."
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)


def mail(path, n=60):
    kinds = (("win", "spam"), ("meeting", "ham"))
    lines = (f'{kinds[i % 2][0]} {i},"text, with comma",{kinds[i % 2][1]}' for i in range(n))
    return table(path, "\n".join(["subject,body,label", *lines]))


def test_a_csv_of_ones_own_is_learnt(checkpoint, tmp_path):
    ev = replace(EV, files=mail(tmp_path / "mail.csv", 200), metric="f1")
    [(task, splits, remark)] = load_tasks(ev)
    assert task.labels == ("ham", "spam") and task.fields == ("subject", "body")
    assert "tenth" in remark
    trial, _ = run_trial(checkpoint, task, splits, replace(EV, epochs=5), 0)
    assert trial.metrics["f1"] > 0.9


def test_values_make_a_regression_and_whole_numbers_classes(tmp_path):
    rows = lambda labels: [dict(text=f"row {i}", label=label) for i, label in enumerate(labels)]
    values = table(tmp_path / "v.jsonl", rows([i / 2 for i in range(20)]))
    classes = table(tmp_path / "c.jsonl", rows([10, 9, 2] * 10))
    assert own_task(values)[0].num_labels == own_task(classes, metric="pearson")[0].num_labels == 1
    assert own_task(classes)[0].labels == ("2", "9", "10")


@pytest.mark.parametrize("labels", [(0.0, 2.0, 4.0), ("y" * 120, "z" * 120)])
def test_floats_and_long_names_are_classes_by_their_own_name(labels, tmp_path):
    rows = [dict(text=f"row {i}", label=labels[i % len(labels)]) for i in range(40)]
    task, splits, _ = own_task(table(tmp_path / "f.jsonl", rows))
    assert task.labels == tuple(map(str, labels))
    for row in splits["train"] + splits["dev"]:
        assert row["label"] == int(row["text"].split()[1]) % len(labels)


BODY = "".join(f"text {i},{'ab'[i % 2]}\r\n" for i in range(12))
ROWS = [dict(text="x", label="ab"[i % 2]) for i in range(12)]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a,b.csv", "\ufefftext,label\r\n" + BODY),
        ("s.csv", "text;label\n" + BODY.replace(",", ";")),
        ("e.csv", "text,label\nx,a,,\n" + BODY),
        ("l.json", json.dumps(ROWS, indent=1)),
    ],
)
def test_tables_of_ones_own_as_programs_write_them(name, content, tmp_path):
    task, splits, _ = own_task(table(tmp_path / name, content))
    assert task.fields == ("text",) and task.labels == ("a", "b")
    assert len(splits["train"]) + len(splits["dev"]) in (12, 13)


HALF = "half \ud800 a pair"
NUMBERS = "text,label\n" + "a,1.5\n" * 20 + "b,many\n"


@pytest.mark.parametrize(
    "name, content, metric",
    [
        ("x.csv", "text,label\nhello, world,a\n" + BODY, ""),
        ("x.csv", "text,label\nhello\n" + BODY, ""),
        ("x.jsonl", [*ROWS, dict(label="a")], ""),
        ("x.jsonl", [dict(words=["a"], label=[i % 2] if i != 4 else 1) for i in range(20)], ""),
        ("x.jsonl", [dict(words="a", label=[i % 2]) for i in range(20)], ""),
        ("x.jsonl", [dict(text="x", label=("a", HALF)[i % 2]) for i in range(20)], ""),
        ("x.csv", NUMBERS, "pearson"),
    ],
)
def test_tables_that_cannot_be_right_cost_one_line(name, content, metric, tmp_path):
    with pytest.raises(CramError) as told:
        own_task(table(tmp_path / name, content), metric=metric)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("verb, source", [("cram", "glue_dir"), ("eval", "files")])
def test_a_text_that_no_tokenizer_reads_is_told_before_training(
    verb, source, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [dict(sentence="good", label=i % 2) for i in range(30)] + [dict(sentence=HALF, label=1)]
    write(tmp_path / "cola", dict(train=rows, dev=rows[:9]))
    table(tmp_path / "own.jsonl", rows)
    words = dict(glue_dir="eval=GLUE_sane eval.tasks=cola eval.glue_dir=. budget=5s")
    words["files"] = f"eval.files=own.jsonl eval.checkpoint={checkpoint}"
    assert main([verb, *words[source].split()]) == 2
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "\ud800" not in told
    assert not (tmp_path / "runs").exists() and not (tmp_path / "data").exists()


def test_tags_of_words_are_learnt_and_some_words_are_not_asked(checkpoint, tmp_path):
    rng = np.random.default_rng(0)

    def row(n):
        words = rng.choice(["the", "list", "returns", "Anna", "Bob", "value"], n).tolist()
        tags = ["NAME" if w in ("Anna", "Bob") else "O" for w in words]
        return dict(pos=[1] * n, tokens=words, tags=[-100, *tags[1:]] if n else [])

    path = table(tmp_path / "tags.jsonl", [row(n) for n in rng.integers(3, 8, 200)] + [row(0)] * 40)
    ev = replace(EV, files=path, label_column="tags", metric="macro_f1", epochs=5)
    [(task, splits, remark)] = load_tasks(ev)
    assert task.per_token and task.labels == ("NAME", "O") and task.fields == ("tokens",)
    trial = evaluate_checkpoint(checkpoint, [(task, splits, remark)], ev, tmp_path / "out")[0]
    assert trial.metrics["macro_f1"] > 0.95 and np.isfinite(trial.loss)
    answers = (tmp_path / "out/predictions/tags.dev.tsv").read_text().splitlines()[1:]
    asked = [sum(v != -100 for v in r["label"]) for r in splits["dev"]]
    assert [len(a.split("\t")[1].split()) for a in answers] == asked


@pytest.mark.parametrize(
    "words",
    [
        "eval.files=none.csv",
        "eval.files=mail.csv eval.metric=pearson",
        "eval.files=mail.csv eval.label_column=labl",
        "eval.files=mail.csv eval.text_columns=subjekt",
        "eval.files=mail.csv eval.label_column=subject",
        "eval.files=mail.txt",
        "eval.files=same.csv",
        "eval.checkpoint=nowhere",
        "eval.checkpoint=hf://no/such-model eval.tasks=rte",
    ],
)
def test_mistakes_cost_one_line(words, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    mail(tmp_path / "mail.csv")
    table(tmp_path / "mail.txt", "x")
    table(tmp_path / "same.csv", "text,label\n" + "a,b\n" * 20)
    given = [] if "checkpoint" in words else [f"eval.checkpoint={checkpoint}"]
    assert main(["eval", *words.split(), *given, "eval.epochs=1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_command_scores_a_table_of_ones_own(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mail(tmp_path / "mail.csv")
    words = f"eval.files=mail.csv eval.checkpoint=hf://{checkpoint} eval.epochs=1 eval.trials=2"
    assert main(["eval", *words.split(), "eval.save_models=True"]) == 0
    said = capsys.readouterr().out
    assert "| mail | accuracy |" in said and "held out for evaluation" in said
    kept = {p.name for p in next((tmp_path / "runs/eval/eval").iterdir()).iterdir()}
    assert kept >= {"glue.md", "glue.json", "glue.png", "predictions", "mail.seed1.model"}


def test_one_class_is_spelt_in_one_way_in_both_tables(tmp_path):
    train = table(tmp_path / "wnli.csv", "text,label\n" + "a b,0\nc d,1\n" * 6)
    judge = table(tmp_path / "judge.csv", "text,label\n" + "a b,0.0\nc d, 1\n" * 6)
    task, splits, _ = own_task(f"{train},{judge}")
    assert task.labels == ("0", "1") and {r["label"] for r in splits["dev"]} == {0, 1}
    assert task.name == "own-wnli" and task.in_mean, "a table is not the task of that name"


def test_what_is_read_of_a_table_is_told(tmp_path):
    lines = "text,kind,label\n" + "a b,x,fraud\nc d,y,normal\n" * 6
    remark = own_task(table(tmp_path / "t.csv", lines), metric="f1")[2]
    assert "read as text: text, kind" in remark and "f1 counts normal" in remark
    rows = [dict(text="a b", label=n % 2) for n in range(12)]
    rows[6]["text"] = None
    with pytest.raises(CramError, match="row 7"):
        own_task(table(tmp_path / "t.jsonl", rows))
