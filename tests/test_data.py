"""Text, tokens, rows: nothing lost, nothing twice, the same every time, whole or not at all."""

import gzip
import json
from pathlib import Path

import numpy as np
from conftest import server

from cramnb.text.clean import deduplicate
from cramnb.text.clean import normalizer
from cramnb.text.sources import find_files, read_file
from cramnb.text.packing import Rows, pack, write_rows
from cramnb.text.store import Corpus, store_folder
from cramnb.options import Data


def small(texts: Path, **changes) -> Data:
    return Data(
        **dict(
            source="files",
            files=str(texts),
            vocab_size=1000,
            seq_length=64,
            heldout=0.1,
            deduplicate=True,
            trash_cutoff=0.5,
        )
        | changes
    )


def test_normaliser_is_the_original_with_its_double_space_mended():
    n = normalizer(Data())
    assert n.normalize_str("Café  ``x``") == 'cafe "x"'
    assert n.normalize_str("naïve — test") == "naive test"  # the original leaves two spaces
    assert n.normalize_str("a\tb ''c''") == 'a\tb "c"'


def test_a_repeated_span_stays_once():
    span = "the quick brown fox jumps over the lazy dog and then it goes on and on "
    span += "until one hundred bytes are full."
    a, b, c = deduplicate([f"one {span} end", f"two {span} stop", "three, alone"], 100)
    assert (
        span in a
        and span not in b
        and b.startswith("two")
        and b.endswith("stop")
        and c == "three, alone"
    )
    assert deduplicate(["", "ab", ""], 100) == ["", "ab", ""]


def test_files_of_every_kind_give_the_same_documents(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    docs = ["A first text, with \u2028 inside.", "Zweiter Text: Grüße.", "third"]
    lines = "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in docs)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{d}"\n' for d in docs), encoding="utf-8")
    pq.write_table(pa.table({"text": docs}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"):
        assert list(read_file(tmp_path / name)) == docs, name
    (tmp_path / "b.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert list(read_file(tmp_path / "b.txt")) == ["one\n\ntwo"]
    assert len(find_files(str(tmp_path))) == 5 and len(find_files(str(tmp_path / "*.jsonl"))) == 1


def test_no_token_is_lost_or_doubled():
    rng = np.random.default_rng(0)
    docs = [rng.integers(5, 900, size=n).tolist() for n in rng.integers(0, 300, size=500)]
    for cls_id in (None, 2):
        rows, rest = pack(docs, 64, cls_id)
        body = rows[:, 1:] if cls_id else rows
        assert rows.shape[1] == 64 and np.array_equal(
            np.concatenate([body.reshape(-1), rest]),
            np.concatenate([np.array(d, int) for d in docs]),
        )
        assert cls_id is None or (rows[:, 0] == 2).all()


def test_rows_on_disk_cost_two_bytes_a_token(tmp_path):
    rows = np.random.default_rng(0).integers(0, 65536, size=(5000, 128))
    write_rows(np.array_split(rows, 7), tmp_path / "r.arrow", 65536)
    stored = Rows(tmp_path / "r.arrow")
    assert (tmp_path / "r.arrow").stat().st_size <= 2.1 * rows.size
    index = np.random.default_rng(1).integers(0, 5000, size=300)
    assert (
        (stored[index] == rows[index]).all()
        and (stored[10:20] == rows[10:20]).all()
        and len(stored) == 5000
    )
    assert (stored[7] == rows[7]).all() and stored[index].dtype == np.uint16


def test_store_counts_every_token_and_is_found_again(texts, tmp_path):
    corpus = Corpus.build(small(texts), tmp_path)
    count = corpus.card["counts"]
    assert count["tokens"] == count["rows"] * 64 + count["tokens_left"]
    again = Corpus.build(small(texts), tmp_path, lambda *_: 1 / 0)
    assert np.array_equal(again.rows[:], corpus.rows[:])
    assert store_folder(small(texts, seq_length=32), tmp_path) != corpus.folder
    first = corpus.batch(0, len(corpus.rows), 0)
    assert sorted(map(bytes, first)) == sorted(map(bytes, corpus.rows[:])), (
        "an epoch shows each row once"
    )
    assert np.array_equal(
        np.concatenate([corpus.batch(i * 7, 7, 0) for i in range(400)]), corpus.batch(0, 2800, 0)
    ), "place alone decides"


def _build(texts, folder):
    Corpus.build(small(texts), folder)


def test_two_at_once_build_once(texts, tmp_path):
    fork = server()
    both = [fork.Process(target=_build, args=(texts, tmp_path)) for _ in range(2)]
    for p in both:
        p.start()
    for p in both:
        p.join()
    assert [p.exitcode for p in both] == [0, 0] and not list(tmp_path.glob("*.partial"))
