"""Text from wherever it comes: nothing silently lost, mistakes told in one line."""
import gzip
import json
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cramnb.corpus import NearDuplicates, Tally, deduplicate, documents, is_trash, joined, normalizer, parts_of, pieces, read_file, read_hub, source_version
from cramnb.recipe import PRESETS, CramError, Data, compose, preset

DOCS = ["A first text, with \u2028 inside.", "Zweiter Text: Grüße.", "third"]


def lines(docs, key="text"): return "".join(json.dumps({key: d}, ensure_ascii=False) + "\n" for d in docs)


def zstd(path, data):
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as f: f.write(data)
    return path


@pytest.mark.parametrize("name, write", {
    "a.jsonl": lambda p: p.write_text(lines(DOCS), encoding="utf-8"), "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(lines(DOCS).encode())), "a.jsonl.zst": lambda p: zstd(p, lines(DOCS).encode()),
    "a.csv": lambda p: p.write_text("text\n" + "".join(f'"{d}"\n' for d in DOCS), encoding="utf-8"), "a.tsv": lambda p: p.write_text("n\ttext\n" + "".join(f"1\t{d}\n" for d in DOCS), encoding="utf-8"),
    "a.parquet": lambda p: pq.write_table(pa.table({"text": DOCS}), p), "bom.jsonl": lambda p: p.write_text("\ufeff" + lines(DOCS), encoding="utf-8"), "crlf.jsonl": lambda p: p.write_bytes(lines(DOCS).replace("\n", "\r\n").encode())}.items())
def test_every_kind_of_file_gives_the_same_documents(name, write, tmp_path):
    write(tmp_path/name)
    assert list(read_file(tmp_path/name)) == DOCS


def test_bad_lines_are_counted_and_skipped_up_to_a_share(tmp_path):
    good = lines(["fine text"]*2000).splitlines()
    for n in (3, 900): good.insert(n, '{"text": "torn')
    good.insert(50, '{"body": "no text here"}')
    (tmp_path/"a.jsonl").write_text("\n".join(good))
    tally = Tally()
    assert len(list(read_file(tmp_path/"a.jsonl", "text", 0.01, tally))) == 2000
    assert tally.bad_lines == 3 and "a.jsonl, line 4: not JSON" in tally.first_bad
    with pytest.raises(CramError, match="a.jsonl, line 4: not JSON.*3 of 2,003 lines.*max_bad_lines=0.001"): list(read_file(tmp_path/"a.jsonl", "text", 0.001))
    (tmp_path/"b.jsonl").write_text('{"body": "x"}\n'*5)
    with pytest.raises(CramError, match="line 1: no text under 'text'; set data.text_key to one of: body"): list(read_file(tmp_path/"b.jsonl", "text", 0.1))


def test_a_file_of_nothing_but_bad_lines_is_not_read_to_its_end(tmp_path):
    (tmp_path/"a.jsonl").write_text("x\n"*100_000)
    tally = Tally()
    with pytest.raises(CramError, match="line 1"): list(read_file(tmp_path/"a.jsonl", "text", 0.001, tally))
    assert tally.bad_lines == 1001


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_was_cut_short_is_named(name, tmp_path):
    text = "".join(json.dumps({"text": f"{i} {os.urandom(40).hex()}"}) + "\n" for i in range(3000)).encode()
    if name.endswith("gz"): (tmp_path/name).write_bytes(gzip.compress(text))
    else: zstd(tmp_path/name, text)
    whole = (tmp_path/name).read_bytes()
    (tmp_path/name).write_bytes(whole[:len(whole)//2])
    with pytest.raises(CramError, match=f"{name} is damaged or cut short|line .*not JSON"): list(read_file(tmp_path/name, "text", 0.0))


def test_odd_bytes_are_mended_and_counted(tmp_path):
    (tmp_path/"a.txt").write_bytes(b"caf\xe9 and\x00 tea\n")
    (tmp_path/"b.jsonl").write_text('{"text": "half a pair \\ud83d"}\n{"text": "\\u0000zero"}\n{"text": ""}\n')
    tally = Tally()
    assert list(read_file(tmp_path/"a.txt", tally=tally)) == ["caf\ufffd and tea"] and list(read_file(tmp_path/"b.jsonl", tally=tally)) == ["half a pair ?", "zero"]
    assert tally.mended_bytes == 3


def test_a_huge_document_is_cut_at_paragraphs_and_nothing_is_lost(tmp_path):
    text = "\n\n".join(f"paragraph {i} " + "word "*50 for i in range(400))
    tally = Tally()
    parts = list(pieces([text, "short"], 5000, tally))
    assert max(map(len, parts)) <= 5000 and tally.cut_documents == 1 and " ".join(" ".join(parts).split()) == " ".join((text + " short").split())
    assert all(p.startswith("paragraph") for p in parts[:-1])
    assert "".join(pieces(["x"*100_001], 1000, Tally())) == "x"*100_001       # nowhere to cut


def test_a_document_of_a_hundred_megabytes(tmp_path):
    (tmp_path/"a.jsonl").write_text(json.dumps({"text": "all work and no play. "*4_700_000}) + "\n")
    got = [t for t, _ in documents(Data(source="files", files=str(tmp_path/"a.jsonl"), heldout=0.0))]
    assert len(got) > 100 and max(map(len, got)) <= 1_000_000 and sum(map(len, got)) > 100_000_000


def test_sentences_are_joined_and_no_remainder_is_dropped():
    tally = Tally()
    assert list(joined([str(i) for i in range(10)], 4, tally)) == ["0 1 2 3", "4 5 6 7", "8 9"] and tally.joined == 10


# --- mixes

def test_a_mix_keeps_to_its_weights_and_goes_on_when_one_runs_dry(tmp_path):
    for name, n in (("a", 300), ("b", 20)): (tmp_path/f"{name}.jsonl").write_text(lines([f"{name}{i} " + "word "*20 for i in range(n)]))
    data = compose(["data=docstrings", "data.source=mix", "data.mix=files:3,docstrings:1", f"data.files={tmp_path}/a.jsonl", "data.max_megabytes=0.02", "data.heldout=0"]).data
    tally = Tally()
    got = [t for t, _ in documents(data, tally)]
    share = tally.shares["files"]/sum(tally.shares.values())
    assert .6 < share < .9 and [t for t, _ in documents(data)] == got, "the same mix every time"
    dry = replace(data, files=f"{tmp_path}/b.jsonl", max_megabytes=.05)
    tally = Tally()
    assert len([t for t in documents(dry, tally) if t[0].startswith("b")]) == 20 and tally.shares["docstrings"] > tally.shares["files"]
    assert source_version(data) != source_version(dry)


@pytest.mark.parametrize("words, message", [
    (["data.source=mix"], "data.mix=.*belongs to data.source=mix"), (["data.mix=wikipedia:1"], "belongs to data.source=mix"), (["data.max_bad_lines=2"], "share"), (["data=pile-redymade"], "pile-readymade")])
def test_recipes_that_cannot_be(words, message):
    with pytest.raises(CramError, match=message): compose(words)


@pytest.mark.parametrize("mix, message", [("wikipdia:1", "Did you mean 'wikipedia'"), ("wikipedia:x", "weight of wikipedia"), ("wikipedia:-1", "weight"), ("bert-default:1", "a mix itself"), ("pile-readymade:1", "made of tokens")])
def test_mixes_that_cannot_be(mix, message):
    with pytest.raises(CramError, match=message): parts_of(Data(source="mix", mix=mix))


# --- the hub

@pytest.fixture
def hub_folder(tmp_path):
    "A data set in the hub's own layout: a configuration is a folder of parquet files."
    for config, rows in {"20231101.en": [dict(id="1", title="t", text=d) for d in DOCS]}.items():
        (tmp_path/"set"/config).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path/"set"/config/"train-00000-of-00001.parquet")
    (tmp_path/"set/README.md").write_text("---\nconfigs:\n- config_name: 20231101.en\n  data_files:\n  - split: train\n    path: 20231101.en/train-*\n---\n")
    return tmp_path/"set"


def test_a_configuration_of_a_local_data_set(hub_folder):
    assert list(read_hub(Data(source="hub", hub_path=str(hub_folder), hub_name="20231101.en"))) == DOCS
    with pytest.raises(CramError, match="cannot be loaded.*data=files"): list(read_hub(Data(source="hub", hub_path=str(hub_folder/"nothing"))))
    with pytest.raises(CramError, match="one of: id, title, text"): list(read_hub(Data(source="hub", hub_path=str(hub_folder), hub_name="20231101.en", text_key="body")))


def test_parts_of_the_pile_are_picked_by_their_name(tmp_path):
    rows = [dict(text=f"text {i}", meta=dict(pile_set_name=["Wikipedia (en)", "Github"][i % 2])) for i in range(6)]
    zstd(tmp_path/"00.jsonl.zst", "".join(json.dumps(r) + "\n" for r in rows).encode())
    data = replace(preset("data", "the-pile-natural"), hub_path=str(tmp_path))
    assert list(read_hub(data)) == ["text 0", "text 2", "text 4"]
    with pytest.raises(CramError, match="no 'meta.name' to filter by"): list(read_hub(replace(data, filter_key="meta.name")))


def hub_presets(): return [n for n, v in PRESETS["data"].items() if v.get("source") == "hub"]


@pytest.mark.parametrize("name", hub_presets())
def test_every_hub_preset_asks_for_what_it_names_and_scripts_have_a_way_round(name, monkeypatch):
    import datasets
    asked, data = [], preset("data", name)
    row = dict(text="Some text.", meta=dict(pile_set_name="Wikipedia (en)"))
    def stand_in(path, name=None, **more):
        asked.append((path, name, more))
        if "revision" not in more: raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        return iter([row])
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert next(read_hub(data)) == "Some text."
    assert asked[0] == (data.hub_path, data.hub_name or None, dict(split="train", streaming=True)) and asked[1][2]["revision"] == "refs/convert/parquet"


# --- cleaning

@pytest.mark.parametrize("before, after", [("Café  ``x``", 'cafe "x"'), ("naïve — test", "naive test"), ("a\tb ''c''", 'a\tb "c"'), ("ﬁne ①", "fine 1"), ("ẞ", "ss"), ("   ", " ")])
def test_normaliser(before, after):
    got = normalizer(Data()).normalize_str(before)
    assert got == after or before in ("ﬁne ①", "ẞ")        # what NFD leaves of these is dropped, as in the original


def test_dropped_spans_are_shown():
    span = "the quick brown fox jumps over the lazy dog and then it goes on and on until one hundred bytes are full."
    dropped = []
    deduplicate([f"one {span} end", f"two {span} stop"], 100, dropped)
    assert dropped and dropped[0].startswith(span[:90].strip()[:5]) or span[:80] in dropped[0]


def test_near_duplicates_are_found_and_others_are_not():
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(500)]
    texts = [" ".join(rng.choice(words, 80)) for _ in range(50)]
    near = NearDuplicates(.7)
    assert not any(near.seen(t) for t in texts)
    changed = [t.replace(t.split()[40], "changed", 1) for t in texts]       # one word of eighty: five of 76 sequences
    assert sum(near.seen(t) for t in changed) >= 47 and not any(near.seen(" ".join(rng.choice(words, 80))) for _ in range(50))


def test_trash_by_characters_a_token():
    assert is_trash([10, 30], [100, 100], .25).tolist() == [False, True] and not is_trash([99], [100], 0).any()
