"""Rows of an exam from every place they come from, and the reader's own tables."""

# ruff: noqa: F811
import csv
import gzip
import json
import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
from conftest import beside, cramnb
from exam import EV, SIX, checkpoint, rows_of, tokenizer, write  # noqa: F401

from cramnb.core import CramError
from cramnb.command import main
from cramnb.exams import check_rows, load_folder, load_hub, load_tasks
from cramnb.judge.finetune import run_trial
from cramnb.glue import GLUE, TASKS, score
from cramnb.judge.score import evaluate_checkpoint
from cramnb.tables import own_task


@pytest.mark.parametrize("name", SIX)
def test_real_tasks_load_and_partial_ones_are_said(name):
    splits = load_folder(name, beside("data") / "glue")
    remark = check_rows(TASKS[name], splits)
    assert (
        (len(splits["train"]), len(splits["dev"])) == TASKS[name].rows
        if name != "mnli"
        else "27,438 of 392,702 training rows" in remark and len(splits["dev_mismatched"]) == 9832
    )
    assert not remark or name == "mnli"


@pytest.mark.parametrize("name", GLUE)
def test_all_nine_load_from_json_lines(name, tmp_path):
    splits = {
        "train": rows_of(name, 6),
        "dev_matched" if name == "mnli" else "dev": rows_of(name, 4, 1),
    }
    if name == "mnli":
        splits["dev_mismatched"] = rows_of(name, 3, 2)
    write(tmp_path / name, splits)
    got = load_folder(name, tmp_path)
    assert (
        got["train"] == splits["train"]
        and len(got["dev"]) == 4
        and ("dev_mismatched" in got) == (name == "mnli")
    )
    assert "not comparable" in check_rows(TASKS[name], got)


TABLES = dict(  # folder, header, line with text a, text b and a label as GLUE's own files hold them
    cola=("CoLA", None, "gj04\t{l}\t*\t{a}"),
    sst2=("SST-2", "sentence\tlabel", "{a}\t{l}"),
    mrpc=("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{l}\t702\t703\t{a}\t{b}"),
    qqp=("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "7\t1\t2\t{a}\t{b}\t{l}"),
    stsb=(
        "STS-B",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tmain\tf\t2012\t1\tnone\tnone\t{a}\t{b}\t{l}",
    ),
    mnli=(
        "MNLI",
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t1\t1c\tfiction\tp\tp\tp\tp\t{a}\t{b}\tneutral\t{l}",
    ),
    qnli=("QNLI", "index\tquestion\tsentence\tlabel", "0\t{a}\t{b}\t{l}"),
    rte=("RTE", "index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{l}"),
    wnli=("WNLI", "index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{l}"),
)


@pytest.mark.parametrize("name", GLUE)
def test_all_nine_load_from_glues_own_files(name, tmp_path):
    folder, header, line = TABLES[name]
    task, label = TASKS[name], dict(stsb=4.25, mnli=2, rte=1, qnli=1).get(name, 1)
    shown = task.labels[label] if task.labels else str(label)
    texts = [('a "quoted word', "it's"), ("with \u2028 inside", 'b"')]
    body = "\n".join(line.format(a=a, b=b, l=shown) for a, b in texts)
    (tmp_path / folder).mkdir()
    splits = ("train", "dev_matched", "dev_mismatched") if name == "mnli" else ("train", "dev")
    for split in splits:
        (tmp_path / folder / f"{split}.tsv").write_text(
            (header + "\n" if header else "") + body + "\n", encoding="utf-8", newline=""
        )
    got = load_folder(name, tmp_path)["train"]
    assert [tuple(r[f] for f in task.fields) for r in got] == [t[: len(task.fields)] for t in texts]
    assert [r["label"] for r in got] == [label] * 2 and isinstance(
        got[0]["label"], float if name == "stsb" else int
    )


def test_torn_lines_of_glues_tables_are_left_out_and_a_wrong_table_is_named(tmp_path):
    (tmp_path / "QQP").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "QQP" / f"{split}.tsv").write_text(
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t1\n2\t3\n3\t4\t5\tc\td\t0\n"
        )
    assert [r["label"] for r in load_folder("qqp", tmp_path)["train"]] == [1, 0]
    (tmp_path / "RTE").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "RTE" / f"{split}.tsv").write_text("index\ttext\tlabel\n0\ta\tentailment\n")
    with pytest.raises(CramError, match="no column sentence1, sentence2"):
        load_folder("rte", tmp_path)
    write(tmp_path / "sst2", dict(train=[dict(sentence="x", label="good")], dev=[]))
    with pytest.raises(CramError, match="'good' is none of 0 to 1"):
        load_folder("sst2", tmp_path)
    write(
        tmp_path / "cola",
        dict(train=[dict(sentence="x", label=3)], dev=[dict(sentence="x", label=0)]),
    )
    with pytest.raises(CramError, match="row 0: the label 3 is none of 0 to 1"):
        check_rows(TASKS["cola"], load_folder("cola", tmp_path))
    (tmp_path / "wnli").mkdir()
    (tmp_path / "wnli/train.jsonl").write_text('{"sentence1": "a"}\n{"sente')
    (tmp_path / "wnli/dev.jsonl").write_text("")
    with pytest.raises(CramError, match="line 2, is not JSON"):
        load_folder("wnli", tmp_path)


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize(
    "layout",
    [
        "{split}-00000-of-00001.parquet",
        "{split}/0000.parquet",
        "{split}.parquet",
        "{split}.csv",
        "{split}.json",
    ],
)
def test_all_nine_load_from_a_copy_of_the_hub_and_other_tables(name, layout, tmp_path):
    splits = (
        ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
        if name == "mnli"
        else ("train", "validation", "test")
    )
    for split in splits:
        path = tmp_path / name / layout.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = datasets.Dataset.from_list(
            [r | dict(label=-1) if split.startswith("test") else r for r in rows_of(name, 5)]
        )
        if path.suffix == ".json":
            path.write_text(json.dumps(rows.to_list(), indent=1))
        else:
            getattr(rows, "to_" + path.suffix[1:])(path)
    got = load_folder(name, tmp_path)
    keep = lambda rows: [{k: r[k] for k in (*TASKS[name].fields, "label")} for r in rows]
    assert (
        keep(got["train"]) == keep(got["dev"]) == keep(rows_of(name, 5))
        and len(got["test"]) == 5
        and ("test_mismatched" in got) == (name == "mnli")
    )
    check_rows(TASKS[name], got)


def test_two_parts_of_a_split_are_one(tmp_path):
    (tmp_path / "rte").mkdir()
    for n in range(2):
        datasets.Dataset.from_list(rows_of("rte", 3, n)).to_parquet(
            tmp_path / f"rte/train-{n:05d}-of-00002.parquet"
        )
    datasets.Dataset.from_list(rows_of("rte", 3)).to_parquet(
        tmp_path / "rte/validation-00000-of-00001.parquet"
    )
    assert load_folder("rte", tmp_path)["train"] == rows_of("rte", 3) + rows_of("rte", 3, 1)


def test_superglue_names_the_texts_of_rte_otherwise(tmp_path):
    (tmp_path / "RTE").mkdir()
    for split in ("train", "val"):
        (tmp_path / f"RTE/{split}.jsonl").write_text(
            '\ufeff{"premise": "p", "hypothesis": "h", "label": "not_entailment", "idx": 0}\r\n',
            encoding="utf-8",
        )
    (tmp_path / "RTE/test.jsonl").write_text('{"premise": "p", "hypothesis": "h", "idx": 0}\n')
    got = load_folder("rte", tmp_path)
    assert [got["dev"][0][k] for k in ("sentence1", "sentence2", "label")] == ["p", "h", 1]
    check_rows(TASKS["rte"], got)


def test_a_test_table_keeps_every_row_because_a_server_counts_them(tmp_path):
    (tmp_path / "QQP").mkdir()
    for split in ("train", "dev"):
        (tmp_path / f"QQP/{split}.tsv").write_text(
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t1\n"
        )
    (tmp_path / "QQP/test.tsv").write_text(
        "id\tquestion1\tquestion2\n0\ta\tb\n1\tc\t\n2\td\n3\te\tf\n"
    )
    got = load_folder("qqp", tmp_path)
    assert [(r["question1"], r["question2"], r["idx"]) for r in got["test"]] == [
        ("a", "b", 0),
        ("c", "", 1),
        ("d", "", 2),
        ("e", "f", 3),
    ]


@pytest.mark.parametrize(
    "content, told",
    [
        (b'{"sentence": "caf\xe9", "label": 1}', "not text in UTF-8"),
        (gzip.compress(b'{"sentence": "a", "label": 1}', mtime=0)[:-9], "damaged"),
        (b"[1]", "line 1, is no object"),
        (b'{"sentence": null, "label": 1}', "row 0: sentence holds None, not text"),
        (b'{"sentence": "a", "label": 1}\n{"label": 1}', "row 1: sentence holds None"),
        (b'{"sentence": "a", "label": 0.7}', "label 0.7 is none of 0 to 1"),
        (b'{"sentence": "a", "label": [1]}', "is none of 0 to 1"),
    ],
)
def test_damaged_rows_are_one_message(content, told, tmp_path):
    (tmp_path / "cola").mkdir()
    for split in ("train", "dev"):
        (tmp_path / f"cola/{split}.jsonl").write_bytes(content)
    with pytest.raises(CramError, match=told):
        check_rows(TASKS["cola"], load_folder("cola", tmp_path))


@pytest.mark.parametrize(
    "name, label, number", [("boolq", True, 1), ("cb", "neutral", 2), ("wic", False, 0)]
)
def test_superglue_in_its_own_files(name, label, number, tmp_path):
    task = TASKS[name]
    for split in ("train", "val"):
        (tmp_path / name.upper()).mkdir(exist_ok=True)
        (tmp_path / name.upper() / f"{split}.jsonl").write_text(
            json.dumps({f: "some text" for f in task.fields} | dict(label=label)) + "\n"
        )
    assert load_folder(name, tmp_path)["dev"][0]["label"] == number


def test_hub_names_and_test_splits(monkeypatch):
    asked = []

    def stand_in(path, name=None, **more):
        asked.append((path, name, more))
        if path == "aps/super_glue" and not more:
            raise RuntimeError("Dataset scripts are no longer supported, but found super_glue.py")
        task = name or more["data_dir"]
        names = (
            ["train", "validation", "test"]
            if task != "mnli"
            else [
                "train",
                "validation_matched",
                "validation_mismatched",
                "test_matched",
                "test_mismatched",
            ]
        )
        return datasets.DatasetDict(
            {n: datasets.Dataset.from_list(rows_of(task, 3)) for n in names}
        )

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert sorted(load_hub("mnli")) == ["dev", "dev_mismatched", "test", "test_mismatched", "train"]
    assert sorted(load_hub("cb")) == ["dev", "test", "train"]
    assert asked == [
        ("nyu-mll/glue", "mnli", {}),
        ("aps/super_glue", "cb", {}),
        ("aps/super_glue", None, dict(data_dir="cb", revision="refs/convert/parquet")),
    ]


# --- the reader's own tables


def mail(path, n=60, words=("win", "meeting")):
    path.write_text(
        "subject,body,label\n"
        + "".join(
            f'{words[i % 2]} {i},"text, with comma",{"spam" if i % 2 == 0 else "ham"}\n'
            for i in range(n)
        ),
        encoding="utf-8",
    )
    return path


def test_a_csv_of_ones_own_is_learnt(checkpoint, tmp_path):
    [(task, splits, remark)] = load_tasks(
        replace(EV, files=str(mail(tmp_path / "mail.csv", 200)), metric="f1")
    )
    assert (
        task.labels == ("ham", "spam") and task.fields == ("subject", "body") and "tenth" in remark
    )
    trial, _ = run_trial(checkpoint, task, splits, replace(EV, epochs=5), 0)
    assert trial.metrics["f1"] > 0.9


def test_values_make_a_regression_and_whole_numbers_classes(tmp_path):
    (tmp_path / "v.jsonl").write_text(
        "".join(json.dumps(dict(text=f"row {i}", label=i / 2)) + "\n" for i in range(20))
    )
    (tmp_path / "c.jsonl").write_text(
        "".join(
            json.dumps(dict(text=f"row {i}", label=[10, 9, 2][i % 3])) + "\n" for i in range(30)
        )
    )
    assert own_task(str(tmp_path / "v.jsonl"))[0].num_labels == 1
    assert own_task(str(tmp_path / "c.jsonl"))[0].labels == ("2", "9", "10")
    assert own_task(str(tmp_path / "c.jsonl"), metric="pearson")[0].num_labels == 1


@pytest.mark.parametrize("labels", [(1.0, 2.0), (0.0, 2.0, 4.0), ("y" * 120, "z" * 120)])
def test_floats_and_long_names_are_classes_by_their_own_name(labels, tmp_path):
    rows = [dict(text=f"row {i}", label=labels[i % len(labels)]) for i in range(40)]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task, splits, _ = own_task(str(tmp_path / "f.jsonl"))
    assert task.labels == tuple(map(str, labels))
    for row in splits["train"] + splits["dev"]:
        assert row["label"] == int(row["text"].split()[1]) % len(labels)


def test_rows_without_an_answer_or_a_text_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "x,yes\ny,no\n" * 10 + "z,\n")
    (tmp_path / "b.jsonl").write_text(
        "".join(
            json.dumps(dict(text=f"row {i}", label="yes" if i % 2 else "no")) + "\n"
            for i in range(20)
        )
        + '{"text": "no answer"}\n'
    )
    (tmp_path / "c.jsonl").write_text(
        "".join(
            json.dumps(dict(text=f"row {i}", label="yes" if i % 2 else "no")) + "\n"
            for i in range(20)
        )
        + '{"label": "yes"}\n'
    )
    for name in ("a.csv", "b.jsonl"):
        with pytest.raises(CramError, match="row 21 has no label"):
            own_task(str(tmp_path / name))
    with pytest.raises(CramError, match="None in its column text"):
        own_task(str(tmp_path / "c.jsonl"))


BODY = "".join(f"text {i},{'ab'[i % 2]}\r\n" for i in range(12))


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.csv", "\ufefftext,label\r\n" + BODY, None),
        ("a,b.csv", "text,label\n" + BODY, None),
        ("s.csv", "text;label\n" + BODY.replace(",", ";"), None),
        ("e.csv", "text,label\nx,a,,\n" + BODY, None),
        (
            "l.json",
            json.dumps([dict(text="x", label="ab"[i % 2]) for i in range(12)], indent=1),
            None,
        ),
        (
            "x.csv",
            "text,label\nhello, world,a\n" + BODY,
            "line 2, has more columns than the header",
        ),
        ("x.csv", "text,label\nhello\n" + BODY, "row 1 has no label"),
        ("x.csv", "text,label\nhello,\n" + BODY, "row 1 has no label"),
        ("x.csv", ("text,label\n" + BODY + "caf\xe9,a\n").encode("latin1"), "not text in UTF-8"),
        (
            "x.jsonl",
            "\n".join(
                json.dumps(dict(text=None if i == 3 else "x", label=i % 2)) for i in range(20)
            ),
            "None in its column text",
        ),
        (
            "x.jsonl",
            "\n".join(
                json.dumps(dict(words=["a"], label=[i % 2] if i != 4 else 1)) for i in range(20)
            ),
            "others with 1",
        ),
        (
            "x.jsonl",
            "\n".join(json.dumps(dict(words="a", label=[i % 2])) for i in range(20)),
            "where a list of words is expected",
        ),
    ],
)
def test_tables_of_ones_own_as_programs_write_them(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if told:
        with pytest.raises(CramError, match=told):
            own_task(str(tmp_path / name))
    else:
        task, splits, _ = own_task(tmp_path / name)
        assert (
            task.fields == ("text",)
            and task.labels == ("a", "b")
            and len(splits["train"]) + len(splits["dev"]) in (12, 13)
        )


def test_tags_of_words_are_learnt(checkpoint, tmp_path):
    rng = random.Random(0)

    def row():
        words = rng.choices(["the", "list", "returns", "Anna", "Bob", "value"], k=rng.randint(3, 8))
        return dict(tokens=words, tags=["NAME" if w in ("Anna", "Bob") else "O" for w in words])

    for split, n in (("train", 200), ("dev", 40)):
        (tmp_path / f"{split}.jsonl").write_text(
            "".join(json.dumps(row()) + "\n" for _ in range(n))
        )
    [(task, splits, _)] = load_tasks(
        replace(
            EV,
            files=f"{tmp_path}/train.jsonl,{tmp_path}/dev.jsonl",
            label_column="tags",
            metric="macro_f1",
        )
    )
    assert task.per_token and task.labels == ("NAME", "O")
    trial, _ = run_trial(checkpoint, task, splits, replace(EV, epochs=5), 0)
    assert trial.metrics["macro_f1"] > 0.95


@pytest.mark.parametrize(
    "words, message",
    [
        (["eval.files=none.csv"], "there is no such file"),
        (
            ["eval.files=mail.csv", "eval.metric=pearson"],
            "choose from accuracy, f1, macro_f1, matthews",
        ),
        (["eval.files=mail.csv", "eval.label_column=labl"], "it has subject, body, label"),
        (["eval.files=mail.csv", "eval.text_columns=subjekt"], "no column subjekt"),
        (["eval.files=mail.csv", "eval.label_column=subject"], "different labels"),
        (["eval.files=mail.txt"], "give .csv, .tsv or .jsonl"),
        (["eval.files=same.csv"], "nothing to learn"),
        (["eval.checkpoint=nowhere"], "is not a run and not a folder"),
    ],
)
def test_mistakes_cost_one_line(words, message, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mail(tmp_path / "mail.csv")
    (tmp_path / "mail.txt").write_text("x")
    mail(tmp_path / "same.csv").write_text("text,label\n" + "a,b\n" * 20)
    words = words if "checkpoint" in words[0] else [*words, f"eval.checkpoint={checkpoint}"]
    assert main(["eval", *words, "eval.epochs=1"]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1


def test_a_name_that_is_not_in_the_cache_of_an_offline_machine(tmp_path):
    done = cramnb("eval", "eval.checkpoint=hf://no/such-model", "eval.tasks=rte", cwd=tmp_path)
    assert (
        done.returncode == 2
        and "no/such-model" in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    )


def test_the_command_scores_a_table_of_ones_own(checkpoint, tmp_path):
    mail(tmp_path / "mail.csv", 120)
    done = cramnb(
        "eval",
        "eval.files=mail.csv",
        f"eval.checkpoint=hf://{checkpoint}",
        "eval.epochs=2",
        "eval.lr=2e-3",
        "eval.trials=2",
        "eval.save_models=True",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "| mail | accuracy |" in done.stdout and "held out for evaluation" in done.stdout
    where = next((tmp_path / "runs/eval/eval").iterdir())
    assert {
        "glue.md",
        "glue.json",
        "glue.png",
        "predictions",
        "mail.seed0.model",
        "mail.seed1.model",
    } <= {p.name for p in where.iterdir()}


def test_words_nobody_asks_about(checkpoint, tmp_path):
    rng = random.Random(0)
    row = lambda n: dict(pos=[1] * n, words=rng.choices(["warm", "cold", "open", "shut"], k=n))
    rows = [row(0) | dict(tags=[]) for _ in range(40)] + [
        row(3) | dict(tags=[-100, "A", "B"]) for _ in range(60)
    ]
    (tmp_path / "tags.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ev = replace(EV, files=str(tmp_path / "tags.jsonl"), label_column="tags", epochs=1)
    task, splits, _ = own_task(ev.files, label_column="tags")
    assert (
        task.fields == ("words",)
        and task.labels == ("A", "B")
        and [-100, 0, 1] in [r["label"] for r in splits["train"]]
    )
    trial = evaluate_checkpoint(checkpoint, load_tasks(ev), ev, tmp_path / "out")[0]
    assert np.isfinite(trial.loss)
    answers = (tmp_path / "out/predictions/tags.dev.tsv").read_text().splitlines()[1:]
    assert [len(a.split("\t")[1].split()) for a in answers] == [
        sum(v != -100 for v in r["label"]) for r in splits["dev"]
    ]


def test_values_that_are_none_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "a,1.5\n" * 20 + "b,many\n")
    with pytest.raises(CramError, match="needs numbers, but label holds 'many'"):
        own_task(str(tmp_path / "a.csv"), metric="pearson")
    (tmp_path / "b.csv").write_text("txt,label\na,1.5\n")
    (tmp_path / "a.csv").write_text("text,label\na,1.5\nb,2\n")
    with pytest.raises(CramError, match="b.csv: no column text; it has txt"):
        own_task(f"{tmp_path / 'a.csv'},{tmp_path / 'b.csv'}")
    with pytest.raises(CramError, match="The predictions hold 'yes'"):
        score("accuracy", ["yes", "no"], [1, 0])
    with pytest.raises(CramError, match="The references hold None"):
        score("f1", [1, 0], [None, 0])


HUGE = b'{"sentence": "a", "label": 1' + b"0" * 400 + b"}"


@pytest.mark.parametrize(
    "ending, content, told",
    [
        ("jsonl", HUGE, "split train, row 0: the label 1000.* is none of 0 to 1"),
        ("jsonl", HUGE.replace(b"0" * 400, b"0" * 5000), "line 1, is not JSON"),
        ("jsonl", b"[" * 100_000, "line 1, is not JSON"),
        ("json", b"[" * 100_000 + b"]" * 100_000, "is not JSON"),
        ("parquet", b"PAR1 this is none PAR1", "is damaged"),
        ("jsonl", '{"sentence": "a", "label": 1}'.encode("utf-16"), "iconv -f utf-16"),
    ],
)
def test_hostile_files_cost_one_line(ending, content, told, tmp_path):
    (tmp_path / "cola").mkdir()
    for split in ("train", "dev"):
        (tmp_path / f"cola/{split}.{ending}").write_bytes(content)
    with pytest.raises(CramError, match=told) as error:
        load_folder("cola", tmp_path)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500


def test_a_label_that_is_none_names_split_and_row(tmp_path):
    rows = [dict(sentence="a", label=1), dict(sentence="b", label="maybe\x1b[31m")]
    write(tmp_path / "cola", dict(train=rows[:1], dev=rows))
    with pytest.raises(CramError, match=r"split dev, row 1: the label 'maybe") as error:
        load_folder("cola", tmp_path)
    assert "\x1b" not in str(error.value)


def test_the_csv_limit_of_the_process_stays(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "long.csv").write_text(
        "text,label\n" + "".join(f"{'x' * 200_000},{i % 2}\n" for i in range(12))
    )
    own_task(str(tmp_path / "long.csv"))
    assert csv.field_size_limit() == before
