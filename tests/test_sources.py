"""Every kind of file and source, every kind of damage, and what is held out."""

import bz2
import csv
import gzip
import json
import tracemalloc
import os
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from cramnb.core import CramError
from cramnb.text import sources
from cramnb.text.sources import Report, choose_files, find_files, read_file
from cramnb.options import Data
from cramnb.recipe import compose, preset
from cramnb.text.sources import LEAST, LONGEST, documents, hold_out
from cramnb.text.sources import mix_parts
from cramnb.text.sources import read_hub, source_version, split_files, split_long

DOCS = [
    "A first text, with \u2028 inside.",
    "Zweiter Text: Grüße.",
    "third\nwith a second line",
    'a "quoted" one, with commas',
]


def lines(docs, **more) -> bytes:
    records = (json.dumps({"text": d, **more}, ensure_ascii=False) for d in docs)
    return "".join(f"{record}\n" for record in records).encode()


def texts_of(data: Data, report: Report | None = None) -> list[str]:
    return [t for t, _ in documents(data, report)]


# --- files


def table(docs, sep) -> bytes:
    rows = (f'{i}{sep}"' + d.replace('"', '""') + '"\n' for i, d in enumerate(docs))
    return f"id{sep}text\n{''.join(rows)}".encode()


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", lines(DOCS)),
        ("a.json", lines(DOCS)),
        ("list.json", json.dumps([{"text": d} for d in DOCS], indent=1).encode()),
        ("a.jsonl.gz", gzip.compress(lines(DOCS))),
        ("joined.jsonl.gz", gzip.compress(lines(DOCS[:2])) + gzip.compress(lines(DOCS[2:]))),
        ("renamed.jsonl", gzip.compress(lines(DOCS))),
        ("unpacked.jsonl.gz", lines(DOCS)),
        ("a.jsonl.zst", zstandard.compress(lines(DOCS))),
        (
            "frames.jsonl.zst",
            zstandard.compress(lines(DOCS[:2])) + zstandard.compress(lines(DOCS[2:])),
        ),
        ("a.csv", table(DOCS, ",")),
        ("a.tsv", table(DOCS, "\t")),
        ("a.csv.gz", gzip.compress(table(DOCS, ","))),
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(DOCS)),
        ("bom.csv", b"\xef\xbb\xbf" + table(DOCS, ",").replace(b"id,", b"nr,", 1)),
        ("crlf.jsonl", lines(DOCS).replace(b"\n", b"\r\n")),
    ],
)
def test_every_kind_of_file_gives_the_same_documents(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert list(read_file(tmp_path / name)) == DOCS


def test_parquet_reads_the_wanted_columns_only(tmp_path):
    columns = {"text": DOCS, "meta": [{"set": s} for s in "abab"], "junk": [b"\xff"] * 4}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert list(read_file(tmp_path / "a.parquet")) == DOCS
    with pytest.raises(CramError, match="data.text_key to one of: text, meta, junk"):
        list(read_file(tmp_path / "a.parquet", Data(text_key="body")))


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    rng = random.Random(0)
    sizes = (rng.randrange(1, 80) for _ in range(200))
    paragraphs = [" ".join(f"word{rng.randrange(50)}" for _ in range(n)) for n in sizes]
    for newline in ("\n", "\r\n"):
        (tmp_path / "book.txt").write_bytes((newline * 2).join(paragraphs).encode())
        docs = list(read_file(tmp_path / "book.txt"))
        assert "\n\n".join(docs) == "\n\n".join(paragraphs) and len(docs) > 5


def test_folders_globs_and_lists_of_them(tmp_path):
    for name in ("b/x.txt", "a.jsonl.zst", "c.md", ".hidden/y.txt", "b/.z.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = lambda spec: [p.name for p in find_files(spec)]
    assert names(str(tmp_path)) == ["a.jsonl.zst", "x.txt", "c.md"]
    assert names(f"{tmp_path}/*.md, {tmp_path}/b") == ["c.md", "x.txt"]
    assert names(str(tmp_path / "**" / "*.txt")) == ["x.txt"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "p.png").write_bytes(b"x")
    with pytest.raises(CramError, match="names no text"):
        find_files(str(tmp_path / "only"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no such file.*Did you mean '.*c\.md'\?"):
        find_files(str(tmp_path / "c.mb"))


@pytest.mark.parametrize("path", ["hf:///nowhere", "/nowhere/at/all", "./nowhere"])
@pytest.mark.parametrize("name", ["wikipedia", "pile-readymade"])
def test_a_folder_that_is_not_there_is_called_so(path, name):
    with pytest.raises(CramError, match=f"data.hub_path={path}: there is no such folder"):
        source_version(replace(preset("data", name), hub_path=path))


# --- damage


def test_bad_lines_are_counted_and_skipped_up_to_the_stated_share(tmp_path):
    good = [f"text {i}" for i in range(500)]
    bad = b'{"text": "torn\n{"other": 1}\n["a"]\n{"text": 7}\n'
    (tmp_path / "a.jsonl").write_bytes(lines(good[:250]) + bad + lines(good[250:]))
    report = Report()
    assert list(read_file(tmp_path / "a.jsonl", report=report)) == good
    assert report.counts["bad_lines"] == 4
    assert "a.jsonl, line 251: not JSON" in report.examples["bad_lines"][0]
    with pytest.raises(CramError, match="line 251: not JSON .*4 of 504 .*data.max_bad_lines=0"):
        list(read_file(tmp_path / "a.jsonl", Data(max_bad_lines=0.005)))
    with pytest.raises(CramError, match="line 251"):
        list(read_file(tmp_path / "a.jsonl", Data(max_bad_lines=0.0)))


def test_a_file_of_damage_ends_early(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["good"]) + b"nonsense\n" * 1_000_000)
    report = Report()
    with pytest.raises(CramError, match="line 2: not JSON"):
        list(read_file(tmp_path / "a.jsonl", report=report))
    assert report.counts["bad_lines"] < 20


def test_empty_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["", "  \n", "a"]) + b'{"text": null}\n')
    report = Report()
    assert list(read_file(tmp_path / "a.jsonl", report=report)) == ["a"]
    assert report.counts["empty"] == 3
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert list(read_file(tmp_path / "empty.jsonl")) == []


def test_bytes_that_are_no_characters_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and \xff\xfe end \xef\xbf\xbd" + b" word" * 100)
    report = Report()
    (text,) = read_file(tmp_path / "a.txt", report=report)
    assert text.startswith("caf\ufffd and \ufffd\ufffd end \ufffd word")
    assert report.counts["not_utf8"] == 3 and "caf" in report.examples["not_utf8"][0]


def test_nul_bytes_are_removed_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\0two \0\0three" + b" word" * 1000)
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "raw\0 nul and \\u0000 written, \\ud800 half a pair"}\n'
    )
    report = Report()
    found = texts_of(Data(source="files", files=str(tmp_path)), report)
    assert found[0].startswith("onetwo three")
    assert "raw nul and  written, ? half a pair" in found
    assert report.counts["nul_bytes"] == 5 and report.counts["half_surrogates"] == 1
    assert "\0" not in "".join(found)


def test_a_document_of_20_megabytes_is_split_between_paragraphs(tmp_path):
    paragraph = "The ferry costs a coin, and nobody minds but the moles. " * 20
    (tmp_path / "huge.jsonl").write_bytes(lines(["\n\n".join([paragraph] * 18_000), "small"]))
    assert (tmp_path / "huge.jsonl").stat().st_size > 20e6
    report, sizes, ends = Report(), [], set()
    tracemalloc.start()
    for text, _ in documents(Data(source="files", files=str(tmp_path), heldout=0.02), report):
        sizes.append(len(text))
        ends.add(text[-1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) <= LONGEST and sizes[-1] == 5 and report.counts["long_documents_split"] == 1
    assert ends <= {".", "l"}
    assert sum(sizes) >= 18_000 * (len(paragraph) - 1) and peak < 140e6


@pytest.mark.parametrize("mark", ["\n\n", "\n", ". ", " ", ""])
def test_splitting_loses_nothing_but_blanks(mark):
    text = mark.join("abcdefg%d" % i for i in range(400))
    pieces = list(split_long(text, 100))
    squeeze = lambda t: "".join(t.split())
    assert squeeze("".join(pieces)) == squeeze(text) and max(map(len, pieces)) <= 100
    assert list(split_long("short", 100)) == ["short"]


# --- mixes


@pytest.fixture
def three(tmp_path):
    rng = random.Random(0)
    for name, n in (("a", 300), ("b", 100), ("c", 400)):
        (tmp_path / f"{name}.jsonl").write_bytes(
            lines([name + " word" * rng.randrange(5, 60) for _ in range(n)])
        )
    return lambda *weights, **more: Data(
        source="mix",
        mix=",".join(f"{tmp_path}/{n}.jsonl:{w}" for n, w in zip("abc", weights)),
        **more,
    )


def test_a_mix_keeps_to_its_weights_and_loses_nothing(three):
    report = Report()
    found = texts_of(three(3, 1, 2), report)
    early = measure_by_letter(found[:150])
    total = sum(early.values())
    assert abs(early["a"] / total - 3 / 6) < 0.02 and abs(early["b"] / total - 1 / 6) < 0.02
    assert len(found) == 800 and found == texts_of(three(3, 1, 2)), (
        "all documents, and the same order each time"
    )
    assert sum(s["documents"] for s in report.sources.values()) == 800 and len(report.sources) == 3
    assert found != texts_of(three(1, 1, 1))


def measure_by_letter(texts):
    out = dict.fromkeys("abc", 0)
    for t in texts:
        out[t[0]] += len(t)
    return out


def test_a_mix_stops_at_the_limits_and_marks_heldout_text(three):
    assert len(texts_of(three(1, 1, 1, max_documents=50))) == 50
    marks = dict(documents(three(1, 1, 1, heldout=0.3)))
    assert marks == dict(documents(three(5, 1, 1, heldout=0.3)))
    assert 0.2 < sum(marks.values()) / len(marks) < 0.4


@pytest.mark.parametrize(
    "mix, told",
    [
        ("", "empty"),
        ("wikipedia", "NAME:WEIGHT"),
        ("wikipedia:0", "above zero"),
        ("wikipedia:-1", "NAME:WEIGHT"),
        ("wikpedia:1", "'wikipedia'"),
        ("bookcorpus-wikipedia:1", "is a mix itself"),
        ("sanity-check-1:1", "no text"),
        ("wikipedia:1,wikipedia:2", "twice"),
        ("oscar:1", "fineweb-edu"),
    ],
)
def test_a_mistake_in_a_mix_is_told(mix, told):
    with pytest.raises(CramError, match=told):
        mix_parts(Data(source="mix", mix=mix))


def test_a_mix_reads_where_its_parts_come_from_and_cleans_as_it_is_told(tmp_path, monkeypatch):
    data = compose(
        [
            "data=mix",
            "data.mix=bookcorpus:1,files:2.5",
            f"data.files={tmp_path}",
            "data.trash_cutoff=0.3",
        ]
    ).data
    (_, one, books), (_, two, files) = mix_parts(data)
    assert (one, two) == (1.0, 2.5) and books.join_rows == 16
    assert books.hub_path == "bookcorpus/bookcorpus" and books.trash_cutoff == 0.3
    assert files.source == "files" and files.files == str(tmp_path)
    with pytest.raises(CramError, match="add data=mix"):
        compose(["data=docstrings", "data.mix=wikipedia:1"])
    monkeypatch.setenv("CRAMNB_DATA", str(tmp_path))
    assert compose(["data=mix", "data.mix=wikipedia:1,files:1"]).data.files == str(
        tmp_path / "text"
    )
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    before = source_version(compose(["data=mix", "data.mix=docstrings:1,files:1"]).data)
    (tmp_path / "text" / "a.txt").write_text("more words")
    assert before != source_version(compose(["data=mix", "data.mix=docstrings:1,files:1"]).data)


# --- the hub


def test_hub_presets_ask_for_their_sets_as_streams(monkeypatch):
    asked, report = [], Report()

    def load_dataset(path, name=None, **more):
        asked.append((path, name, more))
        return [{"text": f"sentence {i} ."} for i in range(60)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = texts_of(preset("data", "bookcorpus"))
    assert [t.count("sentence") for t in found] == [16, 16, 16, 12]
    texts_of(preset("data", "bookcorpus-wikipedia"), report)
    assert {n: s["documents"] for n, s in report.sources.items()} == dict(
        bookcorpus=4, wikipedia=60
    )
    books, wikipedia = (
        ("bookcorpus/bookcorpus", "plain_text"),
        ("wikimedia/wikipedia", "20231101.en"),
    )
    how = dict(split="train", streaming=True, revision=None)
    assert asked == [(*place, how) for place in (books, books, wikipedia)]


def hub_folder(folder, config, docs):

    (folder / config / "train").mkdir(parents=True)
    for k in range(2):
        pq.write_table(
            pa.table({"id": list(range(len(docs[k::2]))), "text": docs[k::2]}),
            folder / config / "train" / f"{k:04d}.parquet",
        )
    return docs[::2] + docs[1::2]


def test_a_set_that_is_a_script_is_read_from_the_hubs_own_conversion(tmp_path, monkeypatch):
    import datasets

    expected, real = (
        hub_folder(tmp_path / "export", "plain_text", [f"text {i}" for i in range(9)]),
        datasets.load_dataset,
    )

    def load_dataset(path, name=None, revision=None, **more):
        if revision != "refs/convert/parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found bookcorpus.py")
        return real(str(tmp_path / "export"), name, **more)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    report = Report()
    assert (
        list(read_hub(Data(hub_path="bookcorpus/bookcorpus", hub_name="plain_text"), report))
        == expected
    )
    assert report.counts["hub_conversion"] == 1


def test_local_folders_in_the_hubs_layout_stream(tmp_path):
    (tmp_path / "wiki").mkdir()
    expected = hub_folder(tmp_path / "wiki", "20231101.en", [f"text {i}" for i in range(9)])
    (tmp_path / "wiki" / "README.md").write_text(
        "---\nconfigs:\n- config_name: 20231101.en\n  data_files:\n  - split: train\n"
        "    path: 20231101.en/train/*\n---\n"
    )
    data = Data(source="hub", hub_path=str(tmp_path / "wiki"), hub_name="20231101.en")
    assert texts_of(data) == expected
    before = source_version(data)
    (tmp_path / "wiki" / "README.md").write_text("")
    assert source_version(data) != before
    (tmp_path / "pile" / "train").mkdir(parents=True)
    records = [
        {"text": f"text {i}", "meta": {"pile_set_name": s}}
        for i, s in enumerate(["Pile-CC", "Wikipedia (en)"] * 5)
    ]
    (tmp_path / "pile" / "train" / "00.jsonl.zst").write_bytes(
        zstandard.compress("".join(json.dumps(r) + "\n" for r in records).encode())
    )
    pile = Data(hub_path=str(tmp_path / "pile"))
    assert list(read_hub(pile)) == [r["text"] for r in records]
    with pytest.raises(
        CramError, match="no text under 'body'; set data.text_key to one of: text, meta"
    ):
        next(read_hub(Data(hub_path=str(tmp_path / "pile"), text_key="body")))


@pytest.mark.parametrize(
    "name, place",
    [
        ("wikipedia", "20231101.en/train-00000-of-00001"),
        ("openweb", "plain_text/train-00000-of-00080"),
        ("fineweb-edu", "sample/10BT/000_00000"),
        ("bookcorpus", "plain_text/train/0000"),
    ],
)
def test_a_copy_of_the_hubs_folders_streams_without_its_readme(name, place, tmp_path):

    for where, words in (
        (
            (place, "wanted"),
            ("20231101.de/train-00000-of-00001", "other"),
            ("data/CC-MAIN/train-00000-of-00001", "other"),
        )
        if name != "openweb"
        else ((place, "wanted"),)
    ):
        (tmp_path / f"{where}.parquet").parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"text": [f"{words} {i}" for i in range(3)]}), tmp_path / f"{where}.parquet"
        )
    data = replace(preset("data", name), hub_path=str(tmp_path), join_rows=1)
    assert list(read_hub(data)) == ["wanted 0", "wanted 1", "wanted 2"]
    if data.hub_name:
        with pytest.raises(CramError, match="'nowhere' not found"):
            list(read_hub(replace(data, hub_name="nowhere")))


def test_files_are_named_as_text_or_as_paths(tmp_path):
    path = tmp_path / "one, two.txt"
    path.write_text("some text")
    assert find_files(path) == find_files(str(path)) == [path]
    assert list(read_file(str(path))) == list(read_file(path)) == ["some text"]


def test_empty_cells_behind_the_header_are_no_damage(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,hello,\n2,fine,,\n")
    assert list(read_file(path)) == ["hello", "fine"]


def test_without_a_network_the_way_out_is_named(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError(
            "Couldn't reach 'wikimedia/wikipedia' on the Hub (LocalEntryNotFoundError)"
        )

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(
        CramError, match="(?s)Couldn't reach.*data=files data.files=FOLDER.*CRAMNB_DATA"
    ) as error:
        texts_of(preset("data", "wikipedia"))
    assert "\n" not in str(error.value)

    def breaks():
        yield {"text": "one"}
        raise OSError("connection reset")

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: breaks())
    with pytest.raises(
        ConnectionError, match="ended after 1 records: connection reset. .*reads the set again"
    ):
        texts_of(preset("data", "wikipedia"))


# --- what is held out


def names(paths) -> list[str]:
    return [p.name for p in paths]


def test_no_file_is_held_out_because_of_its_name():
    lonely = [Path(n) for n in ("dev-notes.md", "test_plan.md", "val d Isere.md", "dev.txt")]
    assert choose_files(lonely) == (lonely, [])
    other = [Path("a.train.txt"), Path("b.val.txt"), Path("c/a.val.txt"), Path("a.val.csv")]
    assert choose_files(other) == (other, []), "another stem, folder or kind is no layout"


def test_held_out_files_are_reported_and_never_trained_on(tmp_path):
    (tmp_path / "a.train.txt").write_text("trained on")
    (tmp_path / "a.dev.txt").write_text("held out")
    (tmp_path / "dev-notes.md").write_text("also trained on")
    report = Report()
    pairs = list(documents(Data(source="files", files=str(tmp_path), heldout=0.5), report))
    assert sorted(pairs) == [("also trained on", False), ("held out", True), ("trained on", False)]
    assert report.examples["files_held_out"] == ["a.dev.txt"]
    chosen = Data(source="files", files=str(tmp_path), heldout_files=str(tmp_path / "dev-notes.md"))
    assert names(split_files(chosen)[1]) == ["dev-notes.md"]
    assert sorted(documents(chosen))[0] == ("also trained on", True)


def test_held_out_files_stop_at_the_limit_and_the_rest_is_not_trained_on(tmp_path):
    (tmp_path / "a.train.jsonl").write_bytes(lines([f"train {i}" for i in range(9)]))
    (tmp_path / "a.val.jsonl").write_bytes(lines([f"heldout {i}" for i in range(100)]))
    report = Report()
    data = Data(source="files", files=str(tmp_path))
    pairs = list(documents(data, report, heldout_limit=100))
    assert [t for t, h in pairs if not h] == [f"train {i}" for i in range(9)]
    assert 0 < sum(len(t) for t, h in pairs if h) < 120 and report.counts["heldout_unused"] == 1


def sides(texts, share):
    marked = list(hold_out(texts, share))
    assert "".join("".join(t.split()) for t, _ in marked) == "".join("".join(texts).split())
    return sum(len(t) for t, h in marked if h), sum(len(t) for t, h in marked if not h)


BOOK = "\n".join(f"Day {k}. The ferry was late, and so was the rain." for k in range(12_000))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.2])
@pytest.mark.parametrize(
    "texts",
    [
        [f"{k}\n" + BOOK for k in range(8)],
        [BOOK[:300_000]],
        [BOOK[:300_000].replace("\n", " ")],
        ["x" * 300_000],
        [BOOK[:300_000], BOOK[7:300_000]],
        [f"{k} " + BOOK[:2000] for k in range(150)],
        [f"letter {k}" for k in range(10)],
    ],
    ids=["8 books", "1 book", "no lines", "no words", "2 books", "150 pages", "10 letters"],
)
def test_something_is_always_held_out_and_most_is_trained_on(texts, share):
    held, trained = sides(texts, share)
    assert 0 < held <= max(0.3, 1.6 * share) * (held + trained)
    if held + trained > 20 * LEAST:
        assert held >= LEAST / 2 and abs(held / (held + trained) - share) < 0.12


def test_what_is_held_out_depends_on_the_texts_alone():
    texts = [f"{k} " + BOOK[k : k + 3000] for k in range(300)]
    held = {t for t, h in hold_out(texts, 0.05) if h}
    assert held == {t for t, h in hold_out(texts[::-1], 0.05) if h} and len(held) > 3
    assert all(not h for _, h in hold_out(texts, 0.0))


def test_exact_copies_of_held_out_texts_are_not_trained_on(tmp_path):
    docs = [f"document {k} " * 60 for k in range(100)]
    (tmp_path / "a.jsonl").write_bytes(lines(docs * 2))
    data = Data(source="files", files=str(tmp_path), heldout=0.3)
    pairs = list(documents(data, heldout_limit=9000))
    held, trained = ({t for t, h in pairs if h == side} for side in (True, False))
    assert held and not held & trained and 9000 <= sum(map(len, held)) < 10_000


# --- limits, names, the process


def test_megabytes_are_bytes_of_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["ä" * 1000] * 3000))
    report = Report()
    list(documents(Data(source="files", files=str(tmp_path), max_megabytes=1.0), report))
    assert report.sources["files"]["bytes"] == 1_000_000


def test_the_limit_of_a_cell_stays_as_it_was(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1," + "word " * 50_000 + "\n2,b\n")
    before = csv.field_size_limit()
    reader = read_file(tmp_path / "a.csv")
    assert len(next(reader)) > before == csv.field_size_limit()
    assert list(reader) == ["b"] and csv.field_size_limit() == before


@pytest.mark.parametrize("spec", ["n" * 300, "n" * 300 + "/*.txt", "a\0b", "n" * 5000])
def test_a_name_that_no_disk_can_hold_gives_one_line(spec, tmp_path):
    with pytest.raises((CramError, FileNotFoundError)) as error:
        find_files(spec)
    assert "no such file" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(CramError):
        mix_parts(Data(source="mix", mix=f"{spec}:1"))


def test_long_and_odd_column_names_stay_on_one_line(tmp_path):
    odd = "column\x1b[31m\n" + "x" * 300
    (tmp_path / "a.jsonl").write_text(json.dumps({odd: 1}))
    with pytest.raises(CramError, match="no text under 'text'") as error:
        list(read_file(tmp_path / "a.jsonl"))
    message = str(error.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 300 + len(str(tmp_path))


def test_reading_is_the_same_whatever_is_packed_and_counts_what_will_be_deleted(tmp_path):
    (tmp_path / "a.txt").write_text("word—another, don’t, straße, 日本")
    report, strict = Report(), Report()
    texts_of(Data(source="files", files=str(tmp_path), fold_punctuation=True), report)
    texts_of(Data(source="files", files=str(tmp_path)), strict)
    assert report.counts["deleted_characters"] == 2
    assert strict.counts["deleted_characters"] == 5


# --- the name of a source


# --- hostile files


def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(CramError, match="pipe.txt is not a regular file"):
        list(read_file(tmp_path / "pipe.txt"))


YEAR, GERMAN = lines(DOCS, year=1913), "Grüße aus Köln, für Ärzte und Bürger. " * 100
REFUSED = [  # name, content, data.text_key, what is said
    ("photo.txt", bytes(range(256)) * 40, "text", "not text in UTF-8"),
    ("latin.txt", GERMAN.encode("latin1"), "text", "iconv"),
    ("wide.txt", GERMAN.encode("utf-16"), "text", "is UTF-16: `iconv"),
    ("wide-le.txt", GERMAN.encode("utf-16-le"), "text", "is UTF-16: `iconv"),
    ("a.jsonl", bz2.compress(random.Random(0).randbytes(3000)), "text", "not text in UTF-8"),
    ("cut.jsonl.gz", gzip.compress(lines(DOCS) * 99)[:-20], "text", "damaged or cut short"),
    ("cut.jsonl.zst", zstandard.compress(lines(DOCS) * 99)[:-20], "text", "damaged or cut short"),
    ("no.parquet", b"PAR1 but no table", "text", "damaged or cut short"),
    ("empty.csv", b"", "text", "no header"),
    ("wide.csv", b"id,text\n1,hello, world\n2,fine\n", "text", "line 2: more columns"),
    ("key.jsonl", YEAR, "body", "line 1: no text under 'body'; .* one of: text, year"),
    ("number.jsonl", YEAR, "year", "'year' holds int"),
    ("texts.jsonl", b'"a"\n"b"\n', "text", "a text instead of an object with keys"),
    ("texts.json", b'["a", "b"]', "text", "a text instead of an object with keys"),
]


@pytest.mark.parametrize("name, content, key, said", REFUSED)
def test_a_file_that_gives_no_texts_is_named(name, content, key, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CramError, match=said) as error:
        list(read_file(tmp_path / name, Data(text_key=key)))
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_a_file_that_cannot_be_read_is_not_called_damaged(error, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("pyarrow.input_stream", refuse)
    with pytest.raises(CramError, match="cannot be read: (Permission denied|MemoryError)") as e:
        list(read_file(tmp_path / "a.txt"))
    assert "damaged" not in str(e.value)
    if isinstance(error, OSError):
        monkeypatch.setattr(sources, "fingerprint", refuse)
        with pytest.raises(CramError, match="a.txt cannot be read: Permission denied"):
            source_version(Data(source="files", files=str(tmp_path / "a.txt")))


def test_a_line_without_end_is_read_in_bounded_memory(tmp_path):
    "A bomb: little on the disk, one line of 40 MB when it is unpacked."
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        for _ in range(40):
            file.write(b"word " * 200_000)
    data = Data(source="files", files=str(tmp_path / "a.txt.gz"), max_megabytes=1)
    tracemalloc.start()
    size = sum(len(text) for text, _ in documents(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1e6 <= size < 3e6 and peak < 2e7


@pytest.mark.parametrize("name", ["../outside/secret.txt", "{}/outside/secret.txt"])
def test_a_hub_folder_reads_nothing_outside_of_itself(name, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text("a secret\n")
    (tmp_path / "set").mkdir()
    head = f"---\nconfigs:\n- config_name: default\n  data_files: {name.format(tmp_path)}\n---\n"
    (tmp_path / "set/README.md").write_text(head)
    with pytest.raises(CramError, match="README.md names .*secret.txt, outside of it"):
        list(read_hub(Data(source="hub", hub_path=str(tmp_path / "set"))))


@pytest.mark.parametrize("suffix", [b".txt", b".jsonl.gz", b".parquet"])
def test_a_name_need_not_be_utf8(suffix, tmp_path):

    plain = tmp_path / f"plain{suffix.decode()}"
    if suffix == b".parquet":
        pq.write_table(pa.table({"text": ["a text"]}), plain)
    else:
        raw = b"a text" if suffix == b".txt" else gzip.compress(b'{"text": "a text"}\n')
        plain.write_bytes(raw)
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9" + suffix)
    os.rename(plain, odd)
    assert list(read_file(os.fsdecode(odd))) == ["a text"]
    assert source_version(Data(source="files", files=str(tmp_path)))


def test_a_long_line_is_not_cut_inside_a_letter(tmp_path):
    path, report = tmp_path / "book.txt", Report()
    path.write_text("a" + "é" * 700_000)
    assert "".join(read_file(path, report=report)) == path.read_text()
    assert not report.counts


def test_messages_name_the_line_of_the_file(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('\n\n{"txt": "one"}\n')
    with pytest.raises(CramError, match="line 3"):
        list(read_file(wrong))
    table = tmp_path / "table.csv"
    table.write_text('text\n"one\ntwo\nthree"\nx,y\n')
    with pytest.raises(CramError, match="line 5.*1 of 2 lines"):
        list(read_file(table))
    with pytest.raises(CramError, match="is not there"):
        list(read_file(tmp_path / "none.parquet"))


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    (tmp_path / "x.txt").write_text("one")
    assert len(find_files(f"{tmp_path}/x.txt,{tmp_path}/x*.txt")) == 1


def test_a_hub_folder_may_lie_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.jsonl").write_text('{"text": "one"}\n')
    assert list(read_hub(Data(source="hub", hub_path="~/set"))) == ["one"]
    assert source_version(Data(source="hub", hub_path="~/set"))
