"""Packing: nothing lost, any order computed again, curricula."""

import datasets
import numpy as np
import pytest

from cramnb.core import CramError
from cramnb.options import Data
from cramnb.text.packing import (
    BLOCK,
    WINDOW,
    Rows,
    order_keys,
    pack,
    row_order,
    stream_order,
    token_lengths,
    write_rows,
)
from cramnb.text.sources import documents
from cramnb.text.store import Corpus, in_order
from cramnb.text.tokenizer import encode


def small(texts, **changes) -> Data:
    base = dict(source="files", files=str(texts), vocab_size=1000, seq_length=64, heldout=0.1)
    return Data(**base | dict(deduplicate=True, trash_cutoff=0.5) | changes)


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    return Corpus.build(small(texts), tmp_path_factory.mktemp("corpora"))


ORDERINGS = [f"{k}-curriculum" for k in ("sentence-length", "word-length", "unigram", "fragment")]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("reverse", ["", "reverse-"])
def test_orders_have_the_property_that_names_them(ordering, reverse, texts, tmp_path):
    c = Corpus.build(small(texts, ordering=reverse + ordering), tmp_path)
    rows = c.batch(0, len(c.rows), 0)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, c.rows[:])), "every row once"
    period, sep = c.tokenizer.convert_tokens_to_ids("."), c.tokenizer.sep_token_id
    frequency = np.bincount(c.rows[:].reshape(-1), minlength=len(c.tokenizer)) + 1
    value = {
        "sentence": lambda: -(rows == period).sum(1),
        "fragment": lambda: -(rows == sep).sum(1),
        "word": lambda: np.array(
            [
                len(" ".join(c.tokenizer.convert_ids_to_tokens(r.tolist())).replace(" ##", ""))
                for r in rows
            ]
        ),
        "unigram": lambda: np.log2(frequency / frequency.sum())[rows].mean(1),
    }[ordering.split("-")[0]]()
    steps = np.diff(value) * (-1 if reverse else 1)
    assert (
        steps >= (-3 if ordering.startswith("word") else -2e-6)
    ).all()  # decoding spends or spares a space at a row's ends
    assert np.array_equal(c.batch(len(c.rows), 5, 0), rows[:5]), "a curriculum starts again"


def test_lengths_of_tokens_are_those_of_the_text(corpus):
    lengths, text = token_lengths(corpus.tokenizer), "return the number of elements in the list"
    ids = corpus.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert abs(lengths[ids].sum() - 1 - len(text)) <= 0
    assert (
        order_keys("word-length-curriculum", np.array([ids]), corpus.tokenizer, None)[0]
        == lengths[ids].sum()
    )


def test_max_rows_keeps_the_first_of_the_order(texts, corpus, tmp_path):
    c = Corpus.build(small(texts, ordering="sentence-length-curriculum", max_rows=20), tmp_path)
    period = c.tokenizer.convert_tokens_to_ids(".")
    counts = np.sort((c.rows[:] == period).sum(1))[::-1]
    assert np.array_equal((c.batch(0, 20, 0) == period).sum(1), counts[:20])
    assert np.array_equal(c.batch(20, 1, 0), c.batch(0, 1, 0))
    r = Corpus.build(small(texts, max_rows=20), tmp_path)
    one, two = r.batch(0, 20, 0), r.batch(20, 20, 0)
    assert sorted(map(bytes, one)) == sorted(map(bytes, two)) and not np.array_equal(one, two)


def test_documents_of_a_row_are_numbered(corpus):
    sep, rows = corpus.tokenizer.sep_token_id, corpus.batch(0, 50, 0)
    ids = corpus.document_ids(rows)
    assert (ids[:, 0] == 0).all() and ids.shape == rows.shape
    assert (np.diff(ids, axis=1) == (rows[:, :-1] == sep)).all()


@pytest.mark.parametrize("seq_length", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("cls_id", [None, 2])
def test_packing_in_pieces_of_any_size_is_packing_at_once(seq_length, cls_id):
    if seq_length == 1 and cls_id:
        return
    rng = np.random.default_rng(seq_length)
    docs = [rng.integers(5, 900, size=n).tolist() for n in rng.integers(0, 200, size=90)]
    whole, rest = pack(docs, seq_length, cls_id)
    body = whole if cls_id is None else whole[:, 1:]
    assert whole.shape[1] == seq_length and (cls_id is None or (whole[:, 0] == cls_id).all())
    assert [*body.reshape(-1), *rest] == sum(docs, [])
    for size in (1, 13, 89, 90):
        left, pieces = np.zeros(0, np.uint32), []
        for i in range(0, 90, size):
            piece, left = pack([left, *docs[i : i + size]], seq_length, cls_id)
            pieces.append(piece)
        assert np.array_equal(np.concatenate(pieces), whole) and np.array_equal(left, rest)
        assert len(rest) < seq_length


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(include_cls=True),
        dict(include_sep=False),
        dict(lowercase=False),
        dict(tokenizer="BPE", ascii_only=False),
        dict(seq_length=61),
    ],
)
def test_every_token_of_the_text_is_in_a_row_or_in_the_card(changes, texts, tmp_path):
    data = small(texts, deduplicate=False, trash_cutoff=0.0, **changes)
    c = Corpus.build(data, tmp_path)
    train = [t for t, held in documents(data) if not held]
    expected = np.concatenate(
        [np.array(i[data.include_cls :], int) for i in encode(c.tokenizer, train)]
    )
    body = c.rows[:][:, 1:] if data.include_cls else c.rows[:]
    got = np.concatenate([body.reshape(-1), np.array(c.card["counts"]["rest"], int)])
    assert np.array_equal(np.bincount(got, minlength=1000), np.bincount(expected, minlength=1000))
    assert c.card["counts"]["tokens"] == len(expected)


@pytest.mark.parametrize(
    "n",
    [1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * WINDOW, BLOCK * WINDOW + 1, 3 * BLOCK * WINDOW + 77],
)
def test_an_epoch_shows_each_row_once_and_any_part_of_it_can_be_computed(n):
    whole = row_order(n, 3, 5)
    assert np.array_equal(np.sort(whole), np.arange(n))
    rng = np.random.default_rng(n)
    for a, b in np.sort(rng.integers(0, n + 1, (20, 2))):
        assert np.array_equal(row_order(n, 3, 5, int(a), int(b)), whole[a:b])
    if n > 100:
        assert not np.array_equal(whole, row_order(n, 4, 5))
        assert not np.array_equal(whole, row_order(n, 3, 6)) and (np.diff(whole) == 1).mean() < 0.05


@pytest.mark.parametrize("kind", ["random", "ties", "floats", "all equal"])
def test_rows_come_in_the_order_of_their_keys_in_parts(kind, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 900, (5000, 16)).astype(np.uint16)
    write_rows(np.array_split(rows, 7), tmp_path / "r.arrow", 900)
    values = dict(
        random=rng.integers(0, 2**31, 5000),
        ties=-rng.integers(0, 4, 5000),
        floats=-np.round(rng.random(5000), 4),
        **{"all equal": np.zeros(5000, int)},
    )[kind]
    parts = list(in_order(Rows(tmp_path / "r.arrow"), values, 4321))
    assert np.array_equal(np.concatenate(parts), rows[np.argsort(values, kind="stable")][:4321])


def test_the_order_on_disk_is_the_order_of_training(texts, corpus, tmp_path):
    c = Corpus.build(small(texts, ordering="sentence-length-curriculum"), tmp_path)
    assert np.array_equal(c.batch(0, len(c.rows), 7), c.rows[:])
    assert not (c.folder / "order.npy").exists()
    plain = Corpus.build(small(texts, ordering="none"), tmp_path)
    assert sorted(map(bytes, plain.rows[:])) == sorted(
        map(bytes, corpus.rows[:])
    ) and not np.array_equal(plain.rows[:], corpus.rows[:]), "a random store is shuffled on disk"
    assert sorted(map(bytes, corpus.batch(0, len(corpus.rows), 1))) == sorted(
        map(bytes, corpus.rows[:])
    )


def test_block_diagonal_attention_needs_marks(texts, tmp_path):
    c = Corpus.build(small(texts, include_sep=False), tmp_path)
    with pytest.raises(CramError, match="include_sep=True"):
        c.document_ids(c.rows[:2])


def test_rows_are_read_one_by_one_in_slices_and_in_any_order(tmp_path):
    rows = np.random.default_rng(0).integers(0, 65536, size=(2000, 32))
    write_rows(np.array_split(rows, 7), tmp_path / "r.arrow", 65536)
    stored = Rows(tmp_path / "r.arrow")
    assert (tmp_path / "r.arrow").stat().st_size <= 2.1 * rows.size and stored[7].dtype == np.uint16
    index = np.random.default_rng(1).integers(-2000, 2000, size=300)
    for i in (index, np.arange(2000) % 3 == 0, slice(10, 900), slice(None), 7, -1):
        assert np.array_equal(stored[i], rows[i])
    wide = np.full((3, 32), 70_000)
    write_rows([wide], tmp_path / "w.arrow", 70_001)
    assert np.array_equal(Rows(tmp_path / "w.arrow")[:], wide)


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_stream_goes_on_over_windows_and_epochs(shuffled):
    n = 2 * BLOCK * WINDOW + 77
    stream = stream_order(n, 0, 3 * n, 5, shuffled)
    assert np.array_equal(np.sort(stream[n : 2 * n]), np.arange(n))
    assert shuffled or np.array_equal(stream[n : 2 * n], np.arange(n))
    for start, size in ((BLOCK * WINDOW - 3, 6), (n - 2, 5), (5, 2 * n + 9)):
        assert np.array_equal(
            stream_order(n, start, size, 5, shuffled), stream[start : start + size]
        )


def test_rows_that_cannot_be_written_whole_leave_nothing(tmp_path):
    def torn():
        yield np.ones((3, 4), int)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(torn(), tmp_path / "r.arrow", 9)
    with pytest.raises(CramError, match="shorter than one row"):
        write_rows([], tmp_path / "r.arrow", 9)
    assert not list(tmp_path.iterdir())


def test_rows_are_read_by_the_datasets_library(corpus, tmp_path):
    how = dict(data_files="rows.arrow", split="train", cache_dir=str(tmp_path))
    loaded = datasets.load_dataset(str(corpus.folder), **how)
    assert len(loaded) == len(corpus.rows) and loaded[3]["input_ids"] == corpus.rows[3].tolist()
    assert loaded.features["input_ids"].feature.dtype == "uint16"
    assert (corpus.folder / "rows.arrow").stat().st_size <= 2.1 * corpus.rows[:].size


def test_no_positions_are_no_rows():
    assert len(stream_order(8, 3, 0, 1, True)) == 0
