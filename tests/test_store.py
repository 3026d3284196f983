"""The store: names, damage, locks, ready-made and random rows."""

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import server
from filelock import FileLock

import cramnb.text.store as store
from cramnb.text import sources
from cramnb.core import CramError, fingerprint
from cramnb.options import Data
from cramnb.recipe import preset
from cramnb.text.store import Corpus, store_folder, store_key


def small(texts, **changes) -> Data:
    base = dict(source="files", files=str(texts), vocab_size=1000, seq_length=64, heldout=0.1)
    return Data(**base | dict(deduplicate=True, trash_cutoff=0.5) | changes)


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    return Corpus.build(small(texts), tmp_path_factory.mktemp("corpora"))


# --- names


def test_what_shapes_a_store_changes_its_name(texts):
    data = small(texts)
    changes = dict(seq_length=32, lowercase=False, ordering="none", deduplicate=False)
    changes |= dict(near_duplicates=0.5, trash_cutoff=0.4, tokenizer="BPE", include_sep=False)
    changes |= dict(max_rows=5, heldout=0.2)
    keys = {store_key(replace(data, **{k: v})) for k, v in changes.items()}
    assert len(keys | {store_key(data)}) == len(changes) + 1
    assert store_key(small(texts)) == store_key(data)


def test_what_is_not_read_does_not_change_the_name(texts):
    data = small(texts, deduplicate=False)
    same = [dict(deduplication_threshold=50), dict(hub_name="x"), dict(hub_path="y")]
    same.append(dict(files=str(texts.parent / "." / texts.name)))
    assert {store_key(replace(data, **c)) for c in same} == {store_key(data)}
    one, two = (replace(data, deduplicate=True, deduplication_threshold=n) for n in (50, 100))
    assert store_key(one) != store_key(two)


def test_a_corpus_is_named_by_its_text_not_by_path_time_or_packages(texts, tmp_path, monkeypatch):
    copy = tmp_path / "docs.jsonl"
    copy.write_bytes(texts.read_bytes())
    before = store_key(small(copy))
    os.utime(copy, (0, 0))
    assert before == store_key(small(texts)), "path and time say nothing"
    built_in = store_key(Data(source="docstrings"))
    found = lambda *_, **__: [type("D", (), dict(metadata={"Name": "new"}, version="1"))]  # noqa: E731
    monkeypatch.setattr("importlib.metadata.distributions", found)
    assert store_key(Data(source="docstrings")) == built_in, "a pip install renames nothing"
    with copy.open("a") as f:
        f.write('{"text": "one more"}\n')
    assert store_key(small(copy)) != before


def test_a_store_of_older_code_is_not_taken_for_this_ones(texts, monkeypatch):
    before = store_key(small(texts))
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert store_key(small(texts)) != before


def test_a_fingerprint_names_rows_vocabulary_and_what_is_held_out(texts, corpus, tmp_path):
    again = Corpus.build(small(texts), tmp_path)
    assert again.fingerprint == corpus.fingerprint != ""
    other = Corpus.build(small(texts, ordering="none"), tmp_path)
    copy = tmp_path / "docs.jsonl"
    copy.write_bytes(texts.read_bytes().replace(b"return", b"yields"))
    words = Corpus.build(small(copy), tmp_path)
    held = tmp_path / "held.jsonl"
    found = []
    for more in ("", "One more document that is held out. "):
        held.write_text(json.dumps(dict(text="The list holds all words. " * 40 + more)))
        data = small(texts, heldout_files=str(held), deduplicate=False, trash_cutoff=0.0)
        found.append(Corpus.build(data, tmp_path))
    assert np.array_equal(found[0].rows[:], found[1].rows[:])
    assert len({c.fingerprint for c in (corpus, other, words, *found)}) == 5


def test_a_corpus_is_found_again_and_place_alone_decides_a_batch(texts, corpus):
    count = corpus.card["counts"]
    assert count["tokens"] == count["rows"] * 64 + count["tokens_left"]
    again = Corpus.build(small(texts), corpus.folder.parent, lambda *_: 1 / 0)
    assert np.array_equal(again.rows[:], corpus.rows[:])
    parts = [corpus.batch(i * 7, 7, 0) for i in range(100)]
    assert np.array_equal(np.concatenate(parts), corpus.batch(0, 700, 0))


# --- the card, and damage


def test_the_card_shows_what_was_read_and_escapes_it(texts, tmp_path):
    odd = json.dumps({"text": "zero \x00 byte " + "word " * 60})
    script = json.dumps({"text": "<script>alert(1)</script> \x1b[31m red " + "lorem ipsum " * 60})
    more = f"{texts.read_text(encoding='utf-8')}torn\n{odd}\n{script}\n"
    (tmp_path / "docs.jsonl").write_text(more, encoding="utf-8")
    made = Corpus.build(small(tmp_path / "docs.jsonl", near_duplicates=0.8), tmp_path / "corpora")
    card = (made.folder / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["task_categories"] == ["fill-mask"]
    words = ("docs.jsonl", "after cutting repeats", "characters a token", "Rows that were kept:")
    for word in (*words, "source files: 1,502 documents", "bad lines: 1", "nul bytes: 1"):
        assert word in card, word
    assert "\x1b" not in card and "<script>" not in card


@pytest.fixture
def own(corpus, tmp_path):
    "A copy that may be damaged."
    return Path(shutil.copytree(corpus.folder, tmp_path / corpus.folder.name))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def noise(path):
    rng = np.random.default_rng(0)
    path.write_bytes(rng.integers(0, 256, path.stat().st_size, dtype=np.uint8).tobytes())


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


FILES = ["rows.arrow", "heldout.arrow", "tokenizer/tokenizer.json", "card.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [cut, noise, zeros])
def test_damage_is_one_line(name, harm, own):
    harm(own / name)
    with pytest.raises(CramError, match="damaged.*Delete .* built again") as e:
        Corpus.load(own)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("card", ["[]", "{}", '{"data": {}}', "null", '{"counts": 1'])
def test_a_card_that_is_none_is_one_line(card, own):
    (own / "card.json").write_text(card)
    with pytest.raises(CramError, match="card.json is damaged"):
        Corpus.load(own)


def test_a_tokenizer_without_its_special_tokens_is_damage(own):
    path, card = own / "tokenizer/tokenizer_config.json", own / "card.json"
    path.write_text('{"train": null}')
    with pytest.raises(CramError, match="is damaged.*tokenizer_config.json is cut"):
        Corpus.load(own)
    found = json.loads(card.read_text())
    found["bytes"]["tokenizer/tokenizer_config.json"] = path.stat().st_size
    found["checksums"]["tokenizer/tokenizer_config.json"] = fingerprint(path)
    card.write_text(json.dumps(found))
    with pytest.raises(CramError, match="is damaged .its tokenizer has no .*mask_token"):
        Corpus.load(own)


@pytest.mark.parametrize("name", store.FILES)
def test_damage_of_equal_size_is_found_when_a_corpus_is_opened(name, own):
    Corpus.load(own)
    raw = bytearray((own / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (own / name).write_bytes(raw)
    with pytest.raises(CramError, match=f"damaged .{name} has changed.*Delete"):
        Corpus.load(own)


def test_rows_are_read_once_for_each_state_of_their_file(own, monkeypatch):
    Corpus.load(own)
    read, real = [], store.fingerprint
    monkeypatch.setattr(store, "fingerprint", lambda p: (read.append(p.name), real(p))[1])
    Corpus.load(own)
    assert "rows.arrow" not in read and "heldout.arrow" in read
    os.utime(own / "rows.arrow")
    Corpus.load(own)
    assert "rows.arrow" in read


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), MemoryError()]
)
def test_what_cannot_be_read_is_not_called_damaged(error, own, monkeypatch):
    def refuse(path):
        raise error

    monkeypatch.setattr(store, "Rows", refuse)
    with pytest.raises(CramError, match="cannot be read: (Permission denied|MemoryError)") as e:
        Corpus.load(own)
    assert "Delete" not in str(e.value) and "damaged" not in str(e.value)


# --- locks and folders


def hold(folder, data):
    with FileLock(str(store_folder(data, folder)) + ".lock"):
        (folder / "held").write_text("x")
        while not (folder / "seen").exists():
            time.sleep(0.02)


def test_who_comes_second_is_told_to_wait(texts, tmp_path):
    p = server().Process(target=hold, args=(tmp_path, small(texts)))
    p.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.02)
    stages = []

    def note(stage, *_):
        stages.append(stage)
        (tmp_path / "seen").write_text("x")

    Corpus.build(small(texts), tmp_path, note)
    p.join()
    assert stages[0] == "waiting for another process"


def test_a_folder_that_cannot_be_written(texts, tmp_path, monkeypatch):
    Corpus.build(small(texts), tmp_path)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store.FileLock, "acquire", refuse)
    assert Corpus.build(small(texts), tmp_path), "what is finished can be used"
    with pytest.raises(CramError, match="impl.path=.*Permission denied"):
        Corpus.build(small(texts, seq_length=32), tmp_path)


# --- ready-made rows

MARKS = dict(pad_token="<pad>", mask_token="<mask>", sep_token="<sep>", cls_token="<cls>")


@pytest.fixture
def published(tmp_path):
    "A set as the authors published theirs; its special tokens have other numbers than ours."
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "published"
    (folder / "data").mkdir(parents=True)
    names = ["<pad>", "</s>", "<mask>", "<s>", "<unk>", "<sep>", "<cls>"]
    vocab = {t: i for i, t in enumerate([*names, *(f"w{i}" for i in range(93))])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **MARKS)
    tokenizer.save_pretrained(folder / "tokenizer")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / "tokenizer" / name).exists():
            (folder / "tokenizer" / name).write_text(json.dumps(dict(MARKS, unk_token="<unk>")))
    rows = np.random.default_rng(0).integers(7, 100, size=(1000, 16)).astype(np.int32)
    for i, part in enumerate(np.split(rows, 4)):
        table = pa.table({"input_ids": list(part)})
        pq.write_table(table, folder / f"data/train-{i:05d}-of-00004.parquet")
    return folder, rows


def ready(folder, **changes):
    data = replace(preset("data", "pile-readymade"), hub_path=str(folder), heldout=0.05)
    return replace(data, **dict(vocab_size=100, seq_length=16) | changes)


def all_rows(c):
    return sorted(map(bytes, np.concatenate([c.rows[:], c.heldout[:]])))


def test_ready_made_rows_come_with_their_tokenizer(published, tmp_path):
    folder, rows = published
    c = Corpus.build(ready(folder), tmp_path / "corpora")
    assert c.tokenizer.mask_token == "<mask>" and c.tokenizer.mask_token_id == 2
    assert 20 < len(c.heldout) < 90 and c.rows[:].dtype == np.uint16 and len(c.fingerprint) == 16
    assert all_rows(c) == sorted(map(bytes, rows.astype(np.uint16)))
    assert np.array_equal(c.batch(0, 50, 0), c.rows[:50]), "in the order of the authors"
    assert c.token_counts.sum() == c.rows[:].size
    few = Corpus.build(ready(folder, max_rows=100), tmp_path / "corpora")
    assert len(few.rows) + len(few.heldout) == 100
    assert "as their authors published them" in (c.folder / "README.md").read_text()


def test_the_tokenizer_is_looked_for_where_the_hub_has_it(published, tmp_path, monkeypatch):
    "The original keeps it in a folder of the data set; others put it at the top."
    from huggingface_hub.errors import LocalEntryNotFoundError

    inside, top = published[0], tmp_path / "top"
    shutil.copytree(inside / "tokenizer", top)
    for place in (inside, top):
        monkeypatch.setattr(sources, "snapshot_download", lambda *_, place=place, **__: str(place))
        assert sources.fetch_tokenizer("a/b", tmp_path / f"of {place.name}").mask_token_id == 2

    def offline(*_, **__):
        raise LocalEntryNotFoundError("cannot find it, and outgoing traffic is off")

    monkeypatch.setattr(sources, "snapshot_download", offline)
    with pytest.raises(CramError, match="a/b.*cannot be fetched.*outgoing traffic"):
        sources.fetch_tokenizer("a/b", tmp_path / "three")


def test_a_stopped_download_goes_on_where_it_was(published, tmp_path, monkeypatch):
    "The files before its place are not read again: here they are gone."
    folder, rows = published
    monkeypatch.setattr(store, "PART_ROWS", 300)
    (tmp_path / "parts").mkdir()

    def stop(stage, done, total):
        if done >= 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus.build(ready(folder), tmp_path, stop)
    opened = []
    real = pq.ParquetFile
    monkeypatch.setattr(
        pq, "ParquetFile", lambda f, *a, **k: (opened.append(f), real(f, *a, **k))[1]
    )
    seen = []
    c = Corpus.build(ready(folder), tmp_path, lambda stage, done, total: seen.append(done))
    assert seen == [900, 1000] and all_rows(c) == sorted(map(bytes, rows.astype(np.uint16)))
    assert len(opened) <= 2, "only the third and the fourth of four files"


def test_without_a_network_one_is_told_how_to_go_on(published, tmp_path, monkeypatch):
    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(sources, "open_hub", offline)
    with pytest.raises(ConnectionError, match="no route to host.*The same command goes on"):
        Corpus.build(ready(published[0]), tmp_path)


MISFITS = [
    (dict(vocab_size=90), "has 100 entries"),
    (dict(seq_length=8), "rows of 16 tokens"),
    (dict(hub_path="/nowhere/at/all"), "cannot be fetched|holds no|no such folder"),
]


@pytest.mark.parametrize("changes, message", MISFITS)
def test_ready_made_rows_that_do_not_fit(published, changes, message, tmp_path):
    with pytest.raises(CramError, match=message):
        Corpus.build(ready(published[0], **changes), tmp_path / "corpora")
    assert not (tmp_path / "corpora").exists()


# --- random rows


@pytest.mark.parametrize("vocab_size, seq_length", [(32_768, 128), (70_000, 8), (4, 512)])
def test_random_rows_need_no_text_and_fit_any_vocabulary(vocab_size, seq_length, tmp_path):
    data = preset("data", "sanity-check-1")
    data = replace(data, vocab_size=vocab_size, seq_length=seq_length, max_documents=100)
    c = Corpus.build(data, tmp_path)
    assert c.rows[:].shape == (100, seq_length) and len(c.heldout) >= 8
    assert len(c.tokenizer) == c.vocab_size >= min(vocab_size, 5)
    assert c.rows[:].max() < c.vocab_size == Corpus.build(data, tmp_path).vocab_size
    assert "random tokens" in (c.folder / "README.md").read_text()


def test_rows_under_another_name_are_a_mistake_and_no_network_error(published, tmp_path):
    folder, _ = published
    for path in (folder / "data").glob("*.parquet"):
        pq.write_table(pa.table({"tokens": [[7] * 16] * 5}), path)
    with pytest.raises(CramError, match="no column 'input_ids', only tokens"):
        Corpus.build(ready(folder), tmp_path / "c")
