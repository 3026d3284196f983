"""The store: orders, names, ready-made rows, and what must never look complete."""
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import server

import cramnb.packing as packing
from cramnb.corpus import documents
from cramnb.packing import (BLOCK, WINDOW, DiskFull, Encoder, Rows, Shards, in_order, keyed, learn_words, load_corpus, order_keys, original_config, original_key, original_source, pack, prepare_corpus,
                            row_order, split_words, store_folder, store_key, token_lengths, write_rows)
from cramnb.recipe import CramError, Data, preset
from cramnb.tokenizer import encode, train_tokenizer


def small(texts: Path, **changes) -> Data:
    return Data(**dict(source="files", files=str(texts), vocab_size=1000, seq_length=64, heldout=0.1, deduplicate=True, trash_cutoff=0.5) | changes)


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory): return prepare_corpus(small(texts), tmp_path_factory.mktemp("corpora"))[0]


# --- the original's names

PILE = [f"/fs/cml-datasets/Pile/train/{i:02d}.jsonl.zst" for i in range(30)]
ROOTS = "bigscience-data/roots_en_"


def pile(name="the_pile", **kept): return {name: original_source(provider="local", file_type="json", files=PILE, filter=kept or None)}


def hf(**changes): return original_source(**changes)


EIGHT = dict(max_entries_in_raw_dataset=8e6, deduplicate_entries=False)
PLAIN = dict(remove_trash=False, trash_cutoff=.3, deduplicate_entries=False, deduplication_threshold=100, ordering="randomized")
BOOKS = dict(bookcorpus=hf(name="plain_text", streaming=False, concatenate_successive_entries=16), wikipedia=hf(name="20220301.en", streaming=False, remove_columns="title"))
NOTHING = dict.fromkeys(("force_lowercase", "strip_accents", "force_english_keyboard", "whitespace_escape"))
STREAMED = ("book_dash_books", "ted_talks_iwslt", "no_code_stackexchange", "uncorpus", "the_pile_uspto", "wikiquote", "wikiversity", "wikivoyage")
VECTORS = {
    "97b8e776baafb99c3892e6572a9f51b3": original_config("the_pile", pile(), **EIGHT), "2efdb9d060d1ae95faf952ec1a50f020": original_config("the_pile", pile(), max_entries_in_raw_dataset=16e6, deduplicate_entries=False),
    "8eb2d0ea9da707676c81314c4ea04507": original_config("the_pile", pile(), max_entries_in_raw_dataset=16e6), "e0501aeb87699de7500dc91a54939f44": original_config("c4-subset", dict(c4=hf(partition="en"))),
    "8fc6a792528f214059691ee73b75ce8a": original_config("c4-subset", dict(c4=hf(name="en"))), "0eae5a5a1e3af3a18d07d8153b95ee79": original_config("openweb", dict(openwebtext=hf(partition="plain_text", streaming=False))),
    "21c68637789ab84c945469213a2f6c8d": original_config("bookcorpus-wikitext", BOOKS, max_entries_in_raw_dataset=1e10, max_seq_in_tokenized_dataset=35e6, **PLAIN),
    "a295a1f5b033756b08d2dbca690655a7": original_config("bookcorpus-wikitext", {n: {("partition" if k == "name" else k): v for k, v in s.items()} for n, s in BOOKS.items()}, max_entries_in_raw_dataset=1e10, max_seq_in_tokenized_dataset=35e6, **PLAIN),
    "1e5ad88147afb56baac093cf198bcbaf": original_config("sanity-check-2", dict(ag_news=hf(streaming=False, remove_columns="label")), tokenizer="BPE", include_sep_token_in_corpus=False, max_entries_in_raw_dataset=1e10, max_seq_in_tokenized_dataset=1e10, **PLAIN),
    "2e382596fef989f92292d3d53214f2e7": dict(name="pile-readymade", sources=dict(hub=dict(provider="hub")), hf_location="JonasGeiping/the_pile_WordPiecex32768_2efdb9d060d1ae95faf952ec1a50f020", streaming=True, vocab_size=32768, seq_length=128),
    "50a651bbeae3ccd00607a6f562ec04f3": original_config("bookcorpus-wikitext", BOOKS, normalizer=NOTHING, tokenizer="bert-base-uncased", vocab_size=30522, seq_length=512, include_cls_token_in_corpus=None, include_sep_token_in_corpus=None,
                                                        use_type_ids=None, max_entries_in_raw_dataset=1e14, max_seq_in_tokenized_dataset=1e14, **PLAIN),
    "06ec017cf0058e3b0cfe01243bf782df": original_config("oscar", dict(oscar=hf(name="unshuffled_deduplicated_en")), max_entries_in_raw_dataset=10e6),
    "3925b5cb6b9f13905609e21b4a5225fc": original_config("roots-mini", {**{ROOTS+k: hf(partition=None) for k in STREAMED}, **{ROOTS+k: hf(partition=None, streaming=False) for k in ("wikibooks", "wikinews")}, "wikipedia": BOOKS["wikipedia"],
                                                                      "oscar": hf(name="unshuffled_deduplicated_en")}, max_entries_in_raw_dataset=14e6),
    "d72be65385d0699ac4bb5f2a6a6c8bd1": original_config("wiki_dump", dict(wikipedia=hf(streaming=False, remove_columns=["title", "id", "url"], language="aa", date=20230501, beam_runner="DirectRunner")), normalizer=dict.fromkeys(NOTHING, False),
                                                        tokenizer="BPE", vocab_size=65536, max_entries_in_raw_dataset=1e14, remove_trash="self", trash_cutoff=.3, deduplicate_entries=False, ordering="randomized"),
    "6381e853e3eda84a604600d9b5c225a6": original_config("the-pile-dedup", {"EleutherAI/the_pile_deduplicated": hf(partition=None)}),
    "ff719262876e17dddd42867d06394a32": original_config("the_pile", pile("the_pile_natural", pile_set_name=["Gutenberg", "Books3", "Wikipedia (en)"]), **EIGHT),
    "7339196e1105fb89083496dce499d398": original_config("the_pile", {"EleutherAI/pile": hf(subsets="all")}, max_entries_in_raw_dataset=48e6, max_seq_in_tokenized_dataset=1e14, deduplicate_entries=False),
}


@pytest.mark.parametrize("key", VECTORS)
def test_names_of_the_originals_corpora(key): assert original_key(VECTORS[key]) == key


def test_a_configuration_may_come_from_yaml():
    from omegaconf import OmegaConf
    key = "2efdb9d060d1ae95faf952ec1a50f020"
    assert original_key(OmegaConf.create(VECTORS[key])) == key
    assert original_key(VECTORS[key] | dict(max_entries_in_raw_dataset="16e6", max_seq_in_tokenized_dataset="85e6")) == key, "as a plain YAML reader leaves 16e6"


# --- orders

ORDERINGS = ["sentence-length-curriculum", "word-length-curriculum", "unigram-curriculum", "fragment-curriculum"]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("reverse", ["", "reverse-"])
def test_orders_have_the_property_that_names_them(ordering, reverse, texts, tmp_path):
    c, _ = prepare_corpus(small(texts, ordering=reverse+ordering), tmp_path)
    rows = c.batch(0, len(c.rows), 0)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, c.rows[:])), "every row once"
    period, sep = c.tokenizer.convert_tokens_to_ids("."), c.tokenizer.sep_token_id
    frequency = np.bincount(c.rows[:].reshape(-1), minlength=len(c.tokenizer)) + 1
    value = {"sentence": lambda: -(rows == period).sum(1), "fragment": lambda: -(rows == sep).sum(1), "word": lambda: np.array([len(" ".join(c.tokenizer.convert_ids_to_tokens(r.tolist())).replace(" ##", "")) for r in rows]),
             "unigram": lambda: np.log2(frequency/frequency.sum())[rows].mean(1)}[ordering.split("-")[0]]()
    steps = np.diff(value)*(-1 if reverse else 1)
    assert (steps >= (-3 if ordering.startswith("word") else -2e-6)).all()      # decoding spends or spares a space at a row's ends
    assert np.array_equal(c.batch(len(c.rows), 5, 0), rows[:5]), "a curriculum starts again"


def test_lengths_of_tokens_are_those_of_the_text(corpus):
    lengths, text = token_lengths(corpus.tokenizer), "return the number of elements in the list"
    ids = corpus.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert abs(lengths[ids].sum() - 1 - len(text)) <= 0
    assert order_keys("word-length-curriculum", np.array([ids]), corpus.tokenizer, None)[0] == lengths[ids].sum()


def test_max_rows_keeps_the_first_of_the_order(texts, corpus, tmp_path):
    c, _ = prepare_corpus(small(texts, ordering="sentence-length-curriculum", max_rows=20), tmp_path)
    period = c.tokenizer.convert_tokens_to_ids(".")
    counts = np.sort((c.rows[:] == period).sum(1))[::-1]
    assert np.array_equal((c.batch(0, 20, 0) == period).sum(1), counts[:20]) and np.array_equal(c.batch(20, 1, 0), c.batch(0, 1, 0))
    r, _ = prepare_corpus(small(texts, max_rows=20), tmp_path)
    one, two = r.batch(0, 20, 0), r.batch(20, 20, 0)
    assert sorted(map(bytes, one)) == sorted(map(bytes, two)) and not np.array_equal(one, two)


def test_documents_of_a_row_are_numbered(corpus):
    sep, rows = corpus.tokenizer.sep_token_id, corpus.batch(0, 50, 0)
    ids = corpus.document_ids(rows)
    assert (ids[:, 0] == 0).all() and ids.shape == rows.shape and (np.diff(ids, axis=1) == (rows[:, :-1] == sep)).all()


# --- the store

def test_the_folder_is_a_data_set_of_datasets(corpus):
    loaded = datasets.load_from_disk(str(corpus.folder))
    assert len(loaded) == len(corpus.rows) and loaded.features["input_ids"].feature.dtype == "uint16" and loaded[3]["input_ids"] == corpus.rows[3].tolist()
    bytes_on_disk = sum(p.stat().st_size for p in corpus.folder.glob("rows.arrow"))
    assert bytes_on_disk <= 2.1*corpus.rows[:].size


def test_the_card_tells_sources_counts_and_examples(texts, corpus, tmp_path):
    card = (corpus.folder/"README.md").read_text(encoding="utf-8")
    meta = yaml.safe_load(card.split("---")[1])
    assert meta["size_categories"] == ["1K<n<10K"] or meta["size_categories"] == ["n<1K"]
    for word in (str(texts), "after cutting repeats", "characters a token", "Rows that were kept:", "Dropped by repeats:", "source files: 1,500 documents"): assert word in card, word
    (tmp_path/"docs.jsonl").write_text(texts.read_text(encoding="utf-8") + "torn\n" + json.dumps({"text": "zero \x00 byte " + "word "*60}) + "\n", encoding="utf-8")
    bad, _ = prepare_corpus(small(tmp_path/"docs.jsonl", max_bad_lines=.01, near_duplicates=.8), tmp_path/"corpora")
    card = (bad.folder/"README.md").read_text(encoding="utf-8")
    for word in ("bad lines: 1", "nul bytes: 1", "after cutting repeats and near-duplicates"): assert word in card, word


def test_what_shapes_a_store_changes_its_name(texts):
    data = small(texts)
    key = store_key(data)
    changes = dict(seq_length=32, lowercase=False, ordering="none", deduplicate=False, near_duplicates=.5, trash_cutoff=.4, tokenizer="BPE", include_sep=False, max_rows=5, heldout=.2)
    keys = {store_key(replace(data, **{k: v})) for k, v in changes.items()}
    assert len(keys | {key}) == len(changes)+1 and store_key(small(texts)) == key


def test_a_store_of_older_code_is_not_taken_for_this_ones(texts, monkeypatch):
    before = store_key(small(texts))
    monkeypatch.setattr(packing, "FORMAT", packing.FORMAT+1)
    assert store_key(small(texts)) != before


def test_a_damaged_store_is_named(texts, tmp_path):
    c, _ = prepare_corpus(small(texts), tmp_path)
    (c.folder/"rows.arrow").write_bytes((c.folder/"rows.arrow").read_bytes()[:-100])
    with pytest.raises(CramError, match="is damaged .rows.arrow.*delete the folder"): prepare_corpus(small(texts), tmp_path)


def test_finished_shards_are_not_built_again(texts, tmp_path, monkeypatch):
    "Stopped in the filter, the next call reads no document and cuts no repeat a second time."
    def stop(stage, *_):
        if stage == "learning the vocabulary": raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): prepare_corpus(small(texts), tmp_path, stop)
    stages = []
    prepare_corpus(small(texts), tmp_path, lambda stage, *_: stages.append(stage))
    assert "reading" not in stages and "cutting repeats" not in stages and "filtering" not in stages and "packing" in stages


@pytest.mark.parametrize("where", [1, 2, 4, 6, 8, 10, 13])
def test_a_full_disk_is_one_message_and_keeps_what_is_finished(where, corpus, texts, tmp_path, monkeypatch):
    real, calls = packing.write_whole, []
    def full(path, write):
        calls.append(path)
        if len(calls) == where: raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, write)
    monkeypatch.setattr(packing, "write_whole", full)
    with pytest.raises(DiskFull, match="The disk is full.*finished parts are kept"): prepare_corpus(small(texts), tmp_path)
    assert not store_folder(small(texts), tmp_path).exists()
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.np?")}
    monkeypatch.setattr(packing, "write_whole", real)
    seen = []
    def look(*_): seen.extend(p for p in kept if p.exists() and p.stat().st_mtime_ns != kept[p])
    assert np.array_equal(prepare_corpus(small(texts), tmp_path, look)[0].rows[:], corpus.rows[:]) and not seen, "finished parts are used, not written again"


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_a_quota_is_a_full_disk_too(number, texts, tmp_path, monkeypatch):
    def full(path, write): raise OSError(number, os.strerror(number), str(path))
    monkeypatch.setattr(packing, "write_whole", full)
    with pytest.raises(DiskFull, match="The disk is full"): prepare_corpus(small(texts), tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_is_really_full_gives_its_number(tmp_path, monkeypatch):
    with pytest.raises(OSError) as e: packing.write_whole(tmp_path/"x", lambda _: open("/dev/full", "wb", buffering=0).write(b"x"))
    assert e.value.errno == errno.ENOSPC and not list(tmp_path.iterdir()), "no half file stays"
    monkeypatch.setattr(packing, "write_whole", lambda path, write: write(open("/dev/full", "wb", buffering=0)))
    for save in (lambda: packing.write_array(tmp_path/"a.npy", np.zeros(9)), lambda: packing.write_json(tmp_path/"a.json", [1])):
        with pytest.raises(OSError) as e: save()
        assert e.value.errno == errno.ENOSPC


def _hold(folder, data):
    from filelock import FileLock
    import time
    with FileLock(str(store_folder(data, folder))+".lock"):
        (folder/"held").write_text("x")
        time.sleep(2)


def test_who_comes_second_is_told_to_wait(texts, tmp_path):
    import time
    p = server().Process(target=_hold, args=(tmp_path, small(texts)))
    p.start()
    while not (tmp_path/"held").exists(): time.sleep(.05)
    stages = []
    prepare_corpus(small(texts), tmp_path, lambda stage, *_: stages.append(stage))
    p.join()
    assert stages[0] == "waiting for another process"


def test_memory_does_not_grow_with_the_text(texts, tmp_path):
    "A shard holds a fixed amount of text, whatever the size of the source."
    big = tmp_path/"big.jsonl"
    big.write_text("".join(json.dumps({"text": f"document {i} " + "word and more "*40}) + "\n" for i in range(3000)))
    folder = tmp_path/"build"
    folder.mkdir()
    packing.read_stage(small(big, heldout=0.0), folder, lambda *_: None, shard_bytes=100_000)
    sizes = [sum(map(len, Shards(folder/"text")[n])) for n in range(len(Shards(folder/"text")))]
    assert len(sizes) > 10 and max(sizes) < 102_000


# --- ready-made rows

@pytest.fixture
def published(tmp_path):
    "A set as the authors published theirs: parquet chunks of input_ids, and a tokenizer whose special tokens have other numbers."
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path/"published"
    (folder/"data").mkdir(parents=True)
    vocab = {t: i for i, t in enumerate(["<pad>", "</s>", "<mask>", "<s>", "<unk>", "<sep>", "<cls>", *(f"w{i}" for i in range(93))])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", mask_token="<mask>", sep_token="<sep>", cls_token="<cls>", unk_token="<unk>").save_pretrained(folder/"tokenizer")
    for name in ("tokenizer/special_tokens_map.json", "tokenizer/tokenizer_config.json"):
        if not (folder/name).exists(): (folder/name).write_text(json.dumps(dict(pad_token="<pad>", mask_token="<mask>", sep_token="<sep>", cls_token="<cls>", unk_token="<unk>")))
    rows = np.random.default_rng(0).integers(7, 100, size=(1000, 16)).astype(np.int32)
    for i, part in enumerate(np.split(rows, 4)): pq.write_table(pa.table({"input_ids": list(part)}), folder/f"data/train-{i:05d}-of-00004.parquet")
    return folder, rows


def ready(folder, **changes): return replace(preset("data", "pile-readymade"), hub_path=str(folder), vocab_size=100, seq_length=16, heldout=.05, **changes)


def test_ready_made_rows_come_with_their_tokenizer(published, tmp_path):
    folder, rows = published
    c, _ = prepare_corpus(ready(folder), tmp_path/"corpora")
    assert c.tokenizer.mask_token == "<mask>" and c.tokenizer.mask_token_id == 2 and c.tokenizer.pad_token_id == 0
    assert len(c.rows) + len(c.heldout) == 1000 and 20 < len(c.heldout) < 90 and c.rows[:].dtype == np.uint16
    assert sorted(map(bytes, np.concatenate([c.rows[:], c.heldout[:]]))) == sorted(map(bytes, rows.astype(np.uint16)))
    assert np.array_equal(c.batch(0, 50, 0), c.rows[:50]), "in the order of the authors"
    few, _ = prepare_corpus(ready(folder, max_rows=100), tmp_path/"corpora")
    assert len(few.rows) + len(few.heldout) == 100
    assert "as their authors published them" in (c.folder/"README.md").read_text()


def test_the_tokenizer_is_looked_for_where_the_hub_has_it(published, tmp_path, monkeypatch):
    "The original keeps it in a folder of the data set; others put it at the top."
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    asked, nested = [], True
    def download(repo, name, repo_type):
        asked.append(name)
        if name.startswith("tokenizer/") and not nested: raise EntryNotFoundError("404")
        return published[0]/"tokenizer"/name.removeprefix("tokenizer/")
    monkeypatch.setattr(packing, "hf_hub_download", download)
    assert packing.fetch_tokenizer("a/b", tmp_path/"one").mask_token_id == 2 and asked == ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json"]
    nested = False
    assert packing.fetch_tokenizer("a/b", tmp_path/"two").pad_token_id == 0 and asked[-1] == "special_tokens_map.json"
    def offline(*_, **__): raise LocalEntryNotFoundError("cannot find it, and outgoing traffic is off")
    monkeypatch.setattr(packing, "hf_hub_download", offline)
    with pytest.raises(CramError, match="a/b.*cannot be fetched.*outgoing traffic"): packing.fetch_tokenizer("a/b", tmp_path/"three")


def test_fetching_goes_on_where_it_stopped(published, tmp_path, monkeypatch):
    folder, rows = published
    monkeypatch.setattr(packing.ready_stage, "__defaults__", (300,))
    def stop(stage, done, total):
        if done >= 600: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): prepare_corpus(ready(folder), tmp_path, stop)
    seen = []
    c, _ = prepare_corpus(ready(folder), tmp_path, lambda stage, done, total: seen.append(done))
    assert seen == [900, 1000] and sorted(map(bytes, np.concatenate([c.rows[:], c.heldout[:]]))) == sorted(map(bytes, rows.astype(np.uint16)))


def test_what_was_fetched_survives_the_network(published, tmp_path, monkeypatch):
    "A stream that breaks off, then a call without any network, then one that ends it: no part is fetched twice."
    folder, rows = published
    monkeypatch.setattr(packing.ready_stage, "__defaults__", (300,))
    tables = packing._unbroken
    def breaks(stream, data):
        class Stream:
            def iter(self, batch_size):
                for n, table in enumerate(stream.iter(batch_size=100)):
                    if n == 7: raise RuntimeError("connection reset")
                    yield table
        yield from tables(Stream(), data)
    monkeypatch.setattr(packing, "_unbroken", breaks)
    with pytest.raises(ConnectionError, match="connection reset. The same command goes on"): prepare_corpus(ready(folder), tmp_path)
    monkeypatch.setattr(packing, "_unbroken", tables)
    def offline(*_, **__): raise OSError("no route to host")
    with monkeypatch.context() as m:
        m.setattr(packing, "_hub_file", offline); m.setattr(packing, "open_hub", offline)
        with pytest.raises(ConnectionError, match="no route to host"): prepare_corpus(ready(folder), tmp_path)
    seen = []
    c, _ = prepare_corpus(ready(folder), tmp_path, lambda stage, done, total: seen.append(done))
    assert seen == [900, 1000] and len(c.rows) + len(c.heldout) == 1000


@pytest.mark.parametrize("changes, message", [(dict(vocab_size=90), "has 100 entries"), (dict(seq_length=8), "rows of 16 tokens"), (dict(hub_path="/nowhere/at/all"), "cannot be fetched|holds no")])
def test_ready_made_rows_that_do_not_fit(published, changes, message, tmp_path):
    with pytest.raises(CramError, match=message): prepare_corpus(replace(ready(published[0]), **changes), tmp_path/"corpora")
    assert not (tmp_path/"corpora").exists() or not os.listdir(tmp_path/"corpora")


def test_pretraining_on_ready_made_rows(published, tmp_path):
    words = ["pretrain", "data=pile-readymade", f"data.hub_path={published[0]}", "data.vocab_size=100", "data.seq_length=16", "data.heldout=0.05", "budget=2s", "train.eval_rows=16", "name=r"]
    done = subprocess.run([sys.executable, "-m", "cramnb", *words], cwd=tmp_path, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path/"runs/r/model/tokenizer.json").exists() and "held-out loss" in done.stdout


# --- nothing lost on the way from text to rows

@pytest.mark.parametrize("seq_length", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("cls_id", [None, 2])
def test_packing_in_pieces_of_any_size_is_packing_at_once(seq_length, cls_id):
    if seq_length == 1 and cls_id: return
    rng = np.random.default_rng(seq_length)
    docs = [rng.integers(5, 900, size=n).tolist() for n in rng.integers(0, 200, size=90)]
    whole, rest = pack(docs, seq_length, cls_id)
    for size in (1, 13, 89, 90):
        left, pieces = np.zeros(0, np.uint32), []
        for i in range(0, 90, size):
            piece, left = pack([left, *docs[i:i+size]], seq_length, cls_id)
            pieces.append(piece)
        assert np.array_equal(np.concatenate(pieces), whole) and np.array_equal(left, rest) and len(rest) < seq_length


@pytest.mark.parametrize("changes", [dict(), dict(include_cls=True), dict(include_sep=False), dict(lowercase=False), dict(tokenizer="BPE", ascii_only=False), dict(seq_length=61)])
def test_every_token_of_the_text_is_in_a_row_or_in_the_card(changes, texts, tmp_path):
    data = small(texts, deduplicate=False, trash_cutoff=0.0, **changes)
    c, _ = prepare_corpus(data, tmp_path)
    train = [t for t, held in documents(data) if not held]
    expected = np.concatenate([np.array(i[data.include_cls:], int) for i in encode(c.tokenizer, train)])
    body = c.rows[:][:, 1:] if data.include_cls else c.rows[:]
    got = np.concatenate([body.reshape(-1), np.array(c.card["counts"]["rest"], int)])
    assert np.array_equal(np.bincount(got, minlength=1000), np.bincount(expected, minlength=1000)) and c.card["counts"]["tokens"] == len(expected)


ODD = ["", "   ", "word "*3, "x"*101 + " y", "[MASK] [SEP] a[CLS]b ##ing", "Caf\u00e9 na\u00efve \u2014 test  \u00df \u0130stanbul \ufb01ne \u212b \u212aelvin", "tab\tnew\nline\x0bvt\x1cfs\x85nel\u00a0nbsp\u2028ls",
       "``quoted'' '''three", "".join(map(chr, [*range(1, 0xd800), *range(0xe000, 0x10000)])), "\u4f60\u597d world", "a\u0301\u0327e\u0301"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_cut_once_give_the_tokens_of_the_tokenizer(lowercase, texts, tmp_path):
    data = small(texts, lowercase=lowercase)
    docs = [t for t, _ in documents(data)][:300] + ODD
    counts = {}
    for d in docs:
        for w in split_words(d, data): counts[w] = counts.get(w, 0) + 1
    slow, fast = train_tokenizer(docs, data), learn_words(counts, data)
    assert fast.backend_tokenizer.to_str() == slow.backend_tokenizer.to_str() and fast.special_tokens_map == slow.special_tokens_map
    (tmp_path/"words").mkdir()
    Shards(tmp_path/"unique").write(0, docs)
    packing._words(data, tmp_path, 0)
    tokens, ends = Encoder(fast, data, tmp_path).shard(0)
    for got, want, doc in zip(np.split(tokens, ends[:-1]), encode(slow, docs), docs): assert got.tolist() == want, doc[:50]


def test_a_vocabulary_that_does_not_fit_says_what_is_possible():
    with pytest.raises(CramError, match="vocab_size=5000.*supports"): learn_words({"few": 3, "words": 1}, Data(vocab_size=5000))


# --- orders in bounded memory

@pytest.mark.parametrize("n", [1, BLOCK-1, BLOCK, BLOCK+1, BLOCK*WINDOW, BLOCK*WINDOW+1, 3*BLOCK*WINDOW+77])
def test_an_epoch_shows_each_row_once_and_any_part_of_it_can_be_computed(n):
    whole = row_order(n, 3, 5)
    assert np.array_equal(np.sort(whole), np.arange(n))
    rng = np.random.default_rng(n)
    for a, b in np.sort(rng.integers(0, n+1, (20, 2))): assert np.array_equal(row_order(n, 3, 5, int(a), int(b)), whole[a:b])
    if n > 100: assert not np.array_equal(whole, row_order(n, 4, 5)) and not np.array_equal(whole, row_order(n, 3, 6)) and (np.diff(whole) == 1).mean() < .05


@pytest.mark.parametrize("kind", ["random", "ties", "floats", "all equal"])
def test_sorting_in_boxes_is_sorting(kind, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 900, (5000, 16)).astype(np.uint16)
    write_rows(np.array_split(rows, 7), tmp_path/"r.arrow", 900)
    values = dict(random=rng.integers(0, 2**31, 5000), ties=-rng.integers(0, 4, 5000), floats=-np.round(rng.random(5000), 4), **{"all equal": np.zeros(5000, int)})[kind]
    keys = keyed(values, 0)
    for memory in (10**9, 40_000, 4_000):
        boxes = list(in_order(Rows(tmp_path/"r.arrow"), keys, tmp_path/"boxes", memory))
        assert np.array_equal(np.concatenate(boxes), rows[np.argsort(values, kind="stable")]) and not (tmp_path/"boxes").exists()
        assert memory == 10**9 or max(b.nbytes for b in boxes) < 2*memory


def test_the_order_on_disk_is_the_order_of_training(texts, corpus, tmp_path):
    c, _ = prepare_corpus(small(texts, ordering="sentence-length-curriculum"), tmp_path)
    assert np.array_equal(c.batch(0, len(c.rows), 7), c.rows[:]) and not (c.folder/"order.npy").exists()
    plain, _ = prepare_corpus(small(texts, ordering="none"), tmp_path)
    assert sorted(map(bytes, plain.rows[:])) == sorted(map(bytes, corpus.rows[:])) and not np.array_equal(plain.rows[:], corpus.rows[:]), "a random store is shuffled on disk"
    assert sorted(map(bytes, corpus.batch(0, len(corpus.rows), 1))) == sorted(map(bytes, corpus.rows[:]))


def test_block_diagonal_attention_needs_marks(texts, tmp_path):
    c, _ = prepare_corpus(small(texts, include_sep=False), tmp_path)
    with pytest.raises(CramError, match="include_sep=True"): c.document_ids(c.rows[:2])


# --- more about the store

def test_the_whole_store_costs_two_bytes_a_token(texts, tmp_path):
    many = [t for t, _ in documents(small(texts))]*12
    (tmp_path/"many.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in many))
    c, _ = prepare_corpus(small(tmp_path/"many.jsonl", deduplicate=False, trash_cutoff=0.0, heldout=.01), tmp_path/"corpora")
    size = sum(p.stat().st_size for p in c.folder.rglob("*") if p.is_file())
    assert size <= 2.1*(c.rows[:].size + c.heldout[:].size), {p.name: p.stat().st_size for p in c.folder.rglob('*')}


def test_what_is_not_read_does_not_change_the_name(texts):
    data = small(texts, deduplicate=False)
    same = [dict(deduplication_threshold=50), dict(files=str(texts.parent/"."/texts.name)), dict(hub_name="x"), dict(hub_path="y")]
    assert {store_key(replace(data, **c)) for c in same} == {store_key(data)}
    assert store_key(replace(data, deduplicate=True, deduplication_threshold=50)) != store_key(replace(data, deduplicate=True))


def test_a_file_that_changes_makes_another_store(texts, tmp_path):
    copy = tmp_path/"docs.jsonl"
    copy.write_bytes(texts.read_bytes())
    before = store_key(small(copy))
    with copy.open("a") as f: f.write('{"text": "one more"}\n')
    assert store_key(small(copy)) != before


def test_the_format_number_is_raised_when_the_rows_change(tmp_path):
    "If this fails, the same recipe now gives other rows: raise FORMAT, so that old stores are built anew, and put the new checksum here."
    import hashlib
    rng = np.random.default_rng(0)
    word = ["".join(rng.choice(list("abcdefgh"), int(n))) for n in rng.integers(1, 9, 300)]
    (tmp_path/"t.jsonl").write_text("".join(json.dumps({"text": " ".join(rng.choice(word, 60)) + "."}) + "\n" for _ in range(200)))
    data = small(tmp_path/"t.jsonl", vocab_size=120, seq_length=16)
    sums = [hashlib.md5(prepare_corpus(replace(data, ordering=o), tmp_path)[0].rows[:].tobytes()).hexdigest()[:8] for o in ("randomized", "sentence-length-curriculum")]
    assert (packing.FORMAT, *sums) == GOLDEN


GOLDEN = (3, "76ae70cf", "0cafa6d1")


def test_heldout_text_is_bounded_and_the_rest_is_trained_on(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(packing.read_stage, "__defaults__", (16_000_000, 5_000))
    c, _ = prepare_corpus(small(texts, heldout=.5, deduplicate=False, trash_cutoff=0.0), tmp_path)
    n = c.card["counts"]
    assert 5_000 <= sum(map(len, c.heldout_documents())) < 15_000 and n["heldout_unused"] == 0 and n["clean"]["documents"] + n["heldout_documents"] == n["documents"]
    for part in ("train", "val"): (tmp_path/f"w.{part}.jsonl").write_bytes(texts.read_bytes())
    c, _ = prepare_corpus(small(f"{tmp_path}/w.train.jsonl,{tmp_path}/w.val.jsonl", deduplicate=False, trash_cutoff=0.0), tmp_path)
    assert c.card["counts"]["heldout_unused"] > 100 and c.card["counts"]["clean"]["documents"] == 1500, "files that are held out by name are never trained on"


def test_a_damaged_shard_is_noticed(texts, tmp_path):
    def spoil(stage, done, total):
        if stage == "cutting repeats":
            for p in tmp_path.rglob("unique/*.json"): p.write_bytes(p.read_bytes()[:-50])
    with pytest.raises(CramError, match="is damaged"): prepare_corpus(small(texts), tmp_path, spoil)
    assert not list(tmp_path.glob("*.partial")) and len(prepare_corpus(small(texts), tmp_path)[0].rows) > 50


def test_a_folder_that_cannot_be_written(texts, tmp_path, monkeypatch):
    c, _ = prepare_corpus(small(texts), tmp_path)
    def refuse(*_, **__): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(packing.FileLock, "acquire", refuse)
    assert prepare_corpus(small(texts), tmp_path)[1], "what is finished can be used"
    with pytest.raises(CramError, match="impl.path=.*Permission denied.*can be written"): prepare_corpus(small(texts, seq_length=32), tmp_path)


# --- many processes, killed processes

def _in_shards(texts, folder, cores="1"):
    "A build of some twenty shards, in a process of its own."
    os.environ["OMP_NUM_THREADS"] = cores
    packing.read_stage.__defaults__ = (20_000, 8_000_000)
    prepare_corpus(small(texts), folder)


def test_any_number_of_processes_builds_the_same(texts, tmp_path):
    for cores in "12":
        p = server().Process(target=_in_shards, args=(texts, tmp_path/cores, cores))
        p.start(); p.join()
        assert p.exitcode == 0
    one, two = (load_corpus(store_folder(small(texts), tmp_path/c)) for c in "12")
    assert np.array_equal(one.rows[:], two.rows[:]) and np.array_equal(one.heldout[:], two.heldout[:]) and one.card["counts"] == two.card["counts"]
    assert (one.folder/"tokenizer/tokenizer.json").read_bytes() == (two.folder/"tokenizer/tokenizer.json").read_bytes()


def test_a_helper_that_dies_does_no_harm(texts, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(packing.read_stage, "__defaults__", (20_000, 8_000_000))
    killed = []
    start = packing.Helpers._start
    def remember(self):
        killed.append(start(self))
        return killed[-1]
    monkeypatch.setattr(packing.Helpers, "_start", remember)
    def kill(stage, done, total):
        if stage == "splitting words": killed[0].kill()
    c, _ = prepare_corpus(small(texts), tmp_path, kill)
    assert killed[0].wait() == -9 and c.card["counts"]["tokens"] == c.card["counts"]["rows"]*64 + c.card["counts"]["tokens_left"]


def test_what_dead_helpers_leave_is_done_one_shard_at_a_time(tmp_path, monkeypatch):
    "The builder has one encoder; two threads that used it at once made wrong tokens or an IndexError."
    import time
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    def dead(self):
        p = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        p.wait()
        return p
    monkeypatch.setattr(packing.Helpers, "_start", dead)
    busy, most, done = [], [], []
    def task(data, folder, n):
        busy.append(n); most.append(len(busy)); time.sleep(0.02); busy.remove(n); done.append(n)
    monkeypatch.setitem(packing.TASKS, "words", task)
    helpers = packing.Helpers(None, tmp_path, 8)
    helpers.do("words", 8, "splitting words", lambda *_: None)
    helpers.close()
    assert sorted(done) == list(range(8)) and max(most) == 1


@pytest.mark.parametrize("cores, kills", [("1", 14), ("2", 6)])
def test_a_killed_build_goes_on_from_its_finished_shards(cores, kills, texts, tmp_path):
    "kill -9 at twenty random moments: finished shards stay as they are, and the result is that of a build in peace."
    import random
    import time
    peace = server().Process(target=_in_shards, args=(texts, tmp_path/"peace"))
    peace.start(); peace.join()
    whole, rng = load_corpus(store_folder(small(texts), tmp_path/"peace")), random.Random(0)
    folder, written = store_folder(small(texts), tmp_path/"killed"), {}
    for _ in range(kills):
        p = server().Process(target=_in_shards, args=(texts, tmp_path/"killed", cores))
        p.start()
        time.sleep(rng.uniform(0.05, 1.2))
        p.kill(); p.join()
        if folder.exists(): assert np.array_equal(load_corpus(folder).rows[:], whole.rows[:])
        partial = Path(f"{folder}.partial")
        if (partial/"read.json").exists():
            for path in [*partial.glob("*/[0-9]*.json"), *partial.glob("*/[0-9]*.np?")]:
                if path.suffix != ".tmp" and path.parent.name != "seen": written.setdefault(path, set()).add(path.stat().st_ino)    # `seen` goes just before its shard: killed in between, both come again
    p = server().Process(target=_in_shards, args=(texts, tmp_path/"killed"))
    p.start(); p.join()
    c = load_corpus(folder)
    assert np.array_equal(c.rows[:], whole.rows[:]) and c.card["counts"] == whole.card["counts"] and not list((tmp_path/"killed").glob("*.partial"))
    assert cores == "2" or max(map(len, written.values()), default=1) == 1, "a finished shard was written again"     # an orphaned helper may finish its last one
