"""A build: shard by shard, in any number of processes, through kills, errors and full disks."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import server

import cramnb.core as core
import cramnb.text.store as store
from cramnb.core import CramError, DiskFull
from cramnb.options import Data
from cramnb.text.sources import documents, read_file
from cramnb.text.store import FORMAT, Corpus, Shards, clean_stage, disk_needed, each_shard
from cramnb.text.store import number_words, read_stage, spread, store_folder, store_key, word_ids
from cramnb.text.tokenizer import SPECIAL_TOKENS, count_words, encode, train_tokenizer
from tokenizers import Tokenizer, models, trainers


def small(texts, **changes) -> Data:
    base = dict(source="files", files=str(texts), vocab_size=1000, seq_length=64, heldout=0.1)
    return Data(**base | dict(deduplicate=True, trash_cutoff=0.5) | changes)


def write_lines(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    return Corpus.build(small(texts), tmp_path_factory.mktemp("corpora"))


def texts_of(folder: Path) -> list[list[str]]:
    shards = Shards(folder)
    return [shards[n]["text"].to_pylist() for n in range(len(shards))]


# --- stages


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    "A shard holds a fixed amount of text, whatever the size of the source."
    monkeypatch.setattr(store, "SHARD", 100_000)
    texts = [f"document {i} " + "word and more " * 40 for i in range(3000)]
    big = write_lines(tmp_path / "big.jsonl", texts)
    (tmp_path / "build").mkdir()
    read_stage(small(big), tmp_path / "build", lambda *_: None)
    sizes = [sum(map(len, texts)) for texts in texts_of(tmp_path / "build/text")]
    assert len(sizes) > 10 and max(sizes) < 102_000


def test_shards_share_what_they_have_seen(tmp_path, texts, monkeypatch):
    notice = "This page may be copied as long as this notice stays with it and nobody is charged."
    notice += " That holds for reading it as well as for copying it at all."
    docs = [f"{d}\n{notice}" for d in list(read_file(texts))[:300]]
    path = write_lines(tmp_path / "a.jsonl", [*docs, docs[0] + " Seen before."])
    monkeypatch.setattr(store, "SHARD", 30_000)
    data = small(path, heldout=0.05, near_duplicates=0.9, trash_cutoff=0.0)
    folder = tmp_path / "build"
    folder.mkdir()
    read_stage(data, folder, lambda *_: None)
    last, _ = clean_stage(data, folder, lambda *_: None)
    kept = texts_of(folder / last)
    assert len(kept) > 3 and sum(t.count(notice) for shard in kept for t in shard) <= 1
    assert not any(t.count("Seen before") and docs[0] in t for shard in kept for t in shard)


def test_a_damaged_shard_is_named_and_nothing_else_is_thrown_away(texts, tmp_path):
    def spoil(stage, done, total):
        if stage == "learning the vocabulary":
            path = next(tmp_path.rglob("words/*.parquet"))
            path.write_bytes(path.read_bytes()[:-50])

    with pytest.raises(CramError, match="words/00000.parquet is damaged.*Delete .*partial"):
        Corpus.build(small(texts), tmp_path, spoil)
    assert next(tmp_path.glob("*.partial/read.json"))


@pytest.mark.parametrize(
    "text, change", [("", {}), ("   ", {}), ("too short", {}), ("a b " * 9999, dict(vocab_size=1))]
)
def test_a_text_that_is_refused_leaves_nothing(text, change, tmp_path):
    file = write_lines(tmp_path / "file.jsonl", [text])
    with pytest.raises(CramError):
        Corpus.build(small(file, **change), tmp_path / "corpora")
    assert not (tmp_path / "corpora").exists()


def test_a_small_text_gets_a_small_vocabulary(texts, tmp_path):
    few = write_lines(tmp_path / "few.jsonl", list(read_file(texts))[:40])
    c = Corpus.build(small(few, vocab_size=30_000), tmp_path / "corpora")
    assert c.vocab_size % 64 == 0 and 64 <= c.vocab_size < 30_000
    assert c.notices == [
        f"The vocabulary has {c.vocab_size:,} entries: "
        "the text is too small for data.vocab_size=30,000."
    ]
    assert len(c.heldout) > 0 and c.rows[:].max() < c.vocab_size == len(c.token_counts)
    with pytest.raises(CramError, match="vocab_size=20"):
        Corpus.build(small(few, vocab_size=20), tmp_path / "corpora")


def test_a_judge_is_the_same_text_whatever_the_filters(texts, tmp_path):
    "And none of it is trained on, although it lies among the files and repeats some of them."
    lines = list(read_file(texts))
    rough = ["!?" * 200, "once more " * 300, *lines[:90], *lines[:9]]
    for name, part in (("judge", rough), ("mine", lines)):
        (tmp_path / "texts").mkdir(exist_ok=True)
        write_lines(tmp_path / f"texts/{name}.jsonl", part)
    data = small(tmp_path / "texts", judge=str(tmp_path / "texts/judge.jsonl"))
    strict = dict(trash_cutoff=0.2, near_duplicates=0.5, deduplication_threshold=20)
    made = []
    for filters in (dict(deduplicate=False, trash_cutoff=0.0), strict):
        made.append(Corpus.build(replace(data, **filters), tmp_path / "corpora"))
        counts = made[-1].card["counts"]
        assert counts["reading"]["counts"]["characters_of_the_judge"] >= sum(map(len, lines[:90]))
        assert made[-1].heldout_documents() == rough and "judge" in made[-1].notices[-1]
    words = len(" ".join(rough).split())
    assert min(len(c.heldout) for c in made) >= words // 64
    long = [line.strip() for line in "\n".join(rough).split("\n") if len(line.strip()) >= 40]
    read = [text for text, heldout in documents(data) if not heldout]
    assert len(read) > 1000 and not any(line in text.split("\n") for line in long for text in read)


def test_a_judge_is_a_part_of_the_name_by_its_content(texts, tmp_path):
    judge, copy = tmp_path / "judge.jsonl", tmp_path / "copy.jsonl"
    for path in (judge, copy):
        path.write_bytes(texts.read_bytes())
    names = [
        store_key(replace(data, judge=str(path)))
        for data in (small(texts), Data(), Data(source="mix", mix="docstrings:1"))
        for path in (judge, copy)
    ]
    assert names[::2] == names[1::2] and len(set(names)) == 3
    data = small(texts, judge=str(judge))
    assert store_key(data) == store_key(replace(data, heldout=0.3)) != store_key(small(texts))
    judge.write_text(judge.read_text().replace("return", "yields"))
    assert store_key(data) != names[0]


def test_one_text_file_of_ones_own_is_enough(texts, tmp_path):
    "300 kB with a paragraph per line and no blank line: no other option is needed."
    lines = " ".join(" ".join(t.split()) for t in read_file(texts))[:300_000].split(". ")
    (tmp_path / "mine.txt").write_text(".\n".join(lines), encoding="utf-8")
    data = Data(source="files", files=str(tmp_path / "mine.txt"), deduplicate=True)
    data.trash_cutoff = 0.4
    c = Corpus.build(data, tmp_path / "corpora")
    assert len(c.rows) > 100 and len(c.heldout) > 0 and c.notices and c.heldout_documents()


# --- words


def strange_texts(n=60) -> list[str]:
    "Characters of all planes, white space of all kinds, and some very long words."
    rng = random.Random(0)
    planes = [(0, 128), (0, 0x250), (0x300, 0x370), (0x370, 0x2100), (0x2000, 0x2070)]
    planes += [(0x3040, 0x9FFF), (0xAC00, 0xD7A4), (0xFB00, 0xFFFE), (0x1F300, 0x1F700)]
    out = []
    for _ in range(n):
        low, high = rng.choice(planes)
        signs = [chr(rng.randrange(low, high)) for _ in range(60)]
        signs = [c for c in signs if not "\ud800" <= c <= "\udfff" and c != "\0"]
        blanks = [
            rng.choice([" ", "  ", "\t", "\n\n", "\u00a0", "\u2003", "\x1c", "'' "]) for _ in signs
        ]
        words = (c * rng.choice([1, 1, 3, 130]) for c in signs)
        out.append("".join(w + (b if rng.random() < 0.4 else "") for w, b in zip(words, blanks)))
    return [*out, "", " ", "[MASK] [SEP]", "``a''b'''c``", "a\u0301\u0301 \u0301b"]


@pytest.mark.parametrize(
    "kind", ["WordPiece", "WordLevel", "BPE", "SentencePieceBPE", "Unigram", "WordPieceBERT"]
)
def test_ids_of_words_are_the_ids_of_the_library(kind, texts):
    known = list(read_file(texts))[:80]
    strange = [*strange_texts(), *known[:30]]
    keep = dict(ascii_only=False, lowercase=False, strip_accents=False)
    for options in (dict(), keep, dict(keep, strip_accents=True), dict(fold_punctuation=True)):
        data = Data(tokenizer=kind, include_sep=False, **options)
        tokenizer = train_tokenizer([*known, *strange], data, vocab_size=3000)
        numbers, words = number_words(pa.array(strange, pa.string()), data)
        ids = spread(word_ids(tokenizer, words.to_pylist()), numbers).to_pylist()
        assert ids == encode(tokenizer, strange), options
        assert len(set(words.to_pylist())) == len(words)


def test_a_vocabulary_from_counts_is_that_of_the_text(texts):
    "The library's own trainer reads the text; ours gets counts of words."
    docs, data = list(read_file(texts))[:400], Data(vocab_size=800)
    ours = train_tokenizer(dict(count_words(docs, data)), data)
    letters = sorted(t for t in ours.get_vocab() if len(t.removeprefix("##")) == 1)
    backend = ours.backend_tokenizer
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    theirs.normalizer, theirs.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    first = [*SPECIAL_TOKENS, *sorted(letters, key=lambda t: (t.startswith("##"), t))]
    trainer = trainers.WordPieceTrainer(vocab_size=800, special_tokens=first, show_progress=False)
    theirs.train_from_iterator(docs, trainer)
    assert ours.get_vocab() == theirs.get_vocab()


def test_counts_of_a_large_text_are_scaled_down(tmp_path, monkeypatch):
    shards = Shards(tmp_path)
    for n in range(40):
        shards.write(n, word=["the", f"w{n}"], count=[1000, 1])
    assert store.word_counts(shards)["the"] == 1000 * -(-40 // 3), "at most 16 shards are counted"
    monkeypatch.setattr(store, "LEARN_FROM", 1000)
    assert store.word_counts(shards) == {"the": 999}


# --- disk


def test_peak_disk_stays_under_three_times_the_text(texts, tmp_path):
    docs = [f"{i} {t} {i}" for i in range(3) for t in read_file(texts)]
    path = write_lines(tmp_path / "many.jsonl", docs)
    size, peak = path.stat().st_size, 0

    def watch(*_):
        nonlocal peak
        files = (p for p in (tmp_path / "corpora").rglob("*") if p.is_file())
        peak = max(peak, sum(p.stat().st_size for p in files))

    data = small(path, deduplicate=False, trash_cutoff=0.9)
    Corpus.build(data, tmp_path / "corpora", watch)
    assert 0 < peak < 2.5 * size and size <= disk_needed(data) <= 2.5 * size


def test_what_a_build_needs_is_said_before_it_starts(texts, tmp_path):
    stages = []
    Corpus.build(small(texts), tmp_path, lambda stage, *_: stages.append(stage))
    assert "MB of disk needed" in stages[0] and "free" in stages[0] and stages[1] == "reading"


@pytest.mark.parametrize("where", [1, 2, 4, 6, 8, 10, 13])
def test_a_full_disk_is_one_message_and_keeps_what_is_finished(
    where, corpus, texts, tmp_path, monkeypatch
):
    real, calls = core.flush, []

    def full(path):
        calls.append(path)
        if len(calls) == where:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path)

    monkeypatch.setattr(core, "flush", full)
    with pytest.raises(DiskFull, match="The disk is full"):
        Corpus.build(small(texts), tmp_path)
    assert not store_folder(small(texts), tmp_path).exists()
    monkeypatch.setattr(core, "flush", real)
    assert Corpus.build(small(texts), tmp_path).fingerprint == corpus.fingerprint


# --- the same rows, whoever builds them


def test_the_format_number_is_raised_when_the_rows_change(tmp_path):
    "If this fails, the same recipe gives other rows: raise FORMAT, put the new checksums here."
    rng = np.random.default_rng(0)
    word = ["".join(rng.choice(list("abcdefgh"), int(n))) for n in rng.integers(1, 9, 300)]
    docs = [" ".join(rng.choice(word, 60)) + "." for _ in range(200)]
    data = small(write_lines(tmp_path / "t.jsonl", docs), vocab_size=120, seq_length=16)
    sums = []
    for ordering in ("randomized", "sentence-length-curriculum"):
        c = Corpus.build(replace(data, ordering=ordering), tmp_path)
        sums.append(hashlib.md5(c.rows[:].tobytes()).hexdigest()[:8])
    assert (FORMAT, *sums) == GOLDEN


GOLDEN = (6, "1e124f6b", "cecc6163")


def in_shards(texts, folder, cores="1"):
    "A build of some twenty shards, in a process of its own."
    os.environ["LOKY_MAX_CPU_COUNT"] = cores
    store.SHARD = 20_000
    Corpus.build(small(texts), folder)


@pytest.fixture(scope="module")
def in_peace(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peace")
    p = server().Process(target=in_shards, args=(texts, folder))
    p.start()
    p.join()
    return Corpus.load(store_folder(small(texts), folder))


def test_any_number_of_processes_builds_the_same(texts, in_peace, tmp_path):
    p = server().Process(target=in_shards, args=(texts, tmp_path, "2"))
    p.start()
    p.join()
    assert p.exitcode == 0
    two = Corpus.load(store_folder(small(texts), tmp_path))
    assert two.fingerprint == in_peace.fingerprint and two.card["counts"] == in_peace.card["counts"]
    assert np.array_equal(two.heldout[:], in_peace.heldout[:])


CODE = """
import sys
from pathlib import Path
from cramnb.options import Data
from cramnb.text.store import Corpus
data = Data(source='files', files=sys.argv[1], vocab_size=1000, seq_length=64, heldout=0.1,
            deduplicate=True, trash_cutoff=0.5)
print(Corpus.build(data, sys.argv[2]).fingerprint)
"""


def test_a_hash_seed_changes_nothing(texts, corpus, tmp_path):
    env = dict(os.environ, PYTHONHASHSEED="7", RAYON_NUM_THREADS="3")
    command = [sys.executable, "-c", CODE, str(texts), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == corpus.fingerprint


# --- processes that die


def die(n):
    if n == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(n):
    raise CramError(f"shard {n} is bad")


def test_a_helper_that_dies_is_reported(monkeypatch):
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "2")
    with pytest.raises(CramError, match="A process died while cutting.*SIGKILL.*are kept"):
        each_shard(die, list(range(6)), "cutting", 6, lambda *_: None)
    with pytest.raises(CramError, match="shard [0-5] is bad"):
        each_shard(fail, list(range(6)), "cutting", 6, lambda *_: None)


@pytest.mark.parametrize("cores, kills", [("1", 8), ("2", 4)])
def test_a_killed_build_goes_on_from_its_finished_shards(cores, kills, texts, in_peace, tmp_path):
    "kill -9 after the first new file of each round: the result is that of a build in peace."
    folder, rng = store_folder(small(texts), tmp_path), random.Random(0)
    partial, written = Path(f"{folder}.partial"), {}

    def files():
        try:
            shards = [p for p in partial.glob("*/[0-9]*.*") if ".tmp" not in p.name]
            return {p: p.stat().st_ino for p in shards}
        except FileNotFoundError:  # a stage has just deleted what it read
            return {}

    for _ in range(kills):
        p = server().Process(target=in_shards, args=(texts, tmp_path, cores))
        before, wanted = files(), rng.randint(1, 12)
        p.start()
        while p.is_alive() and len(set(files()) - set(before)) < wanted:
            time.sleep(0.005)
        p.kill()
        p.join()
        if (partial / "unique.json").exists():
            for path, number in files().items():
                if path.parent.name in ("words", "tokens"):
                    written.setdefault(path, set()).add(number)
    p = server().Process(target=in_shards, args=(texts, tmp_path))
    p.start()
    p.join()
    c = Corpus.load(folder)
    assert c.fingerprint == in_peace.fingerprint and c.card["counts"] == in_peace.card["counts"]
    assert not list(tmp_path.glob("*.partial"))
    assert cores == "2" or max(map(len, written.values()), default=1) == 1
