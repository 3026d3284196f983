"""The floor: files whole or not at all, one reader of JSON, one door for models, strict values."""

import errno
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
from typing_extensions import NotRequired, TypedDict

from cramnb.core import (
    CramError,
    Damaged,
    DiskFull,
    OtherVersion,
    printable,
    read_json,
    record,
    whole,
    write_json,
    write_text,
)
from cramnb.options import PRESETS, PROVENANCE, Train
from cramnb.recipe import GROUPS, compose, preset, read_value, tiny


@record
class Small(TypedDict):
    rows: int
    share: float
    names: NotRequired[list[str]]


LIGHT = ("torch", "transformers", "datasets", "scipy", "matplotlib", "sklearn", "evaluate")


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ],
)
def test_a_full_disk_keeps_the_old_file_and_is_named(tmp_path, problem):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(DiskFull, match="a.txt"), whole(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        raise problem
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_folder_is_replaced_whole_and_never_by_a_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("1")
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "model") as temporary:
        temporary.mkdir()
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "old"]
    with whole(tmp_path / "model") as temporary:
        temporary.mkdir()
        (temporary / "new").write_text("2")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["new"]
    with pytest.raises(CramError, match="cannot be written"):
        write_text(tmp_path / "model", "a file where a folder stands")
    assert (tmp_path / "model" / "new").read_text() == "2"


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/below.json", "n" * 300):
        with pytest.raises(CramError, match="cannot be written"):
            write_json(tmp_path / name, {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", ""),
        (b"{", ""),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (b'{"share": 0.5}', "rows"),
        (b'{"rows": null, "share": 0.5}', "rows=None"),
        (b'{"rows": 3, "share": NaN}', "share=nan"),
        (b'{"rows": 3, "share": 0.5, "names": [1]}', "names=1"),
        (b'{"rows": 3, "share": ["\\u001b[2J"]}', "share"),
    ],
)
def test_damaged_json_is_one_line_with_the_key_and_the_remedy(tmp_path, content, told):
    (tmp_path / "card.json").write_bytes(content)
    with pytest.raises(Damaged) as e:
        read_json(tmp_path / "card.json", Small, "Build it again.")
    line = str(e.value)
    assert "card.json" in line and told in line and line.endswith("Build it again.")
    assert line.isprintable() and len(line) < 1000


def test_a_file_of_another_version_is_not_called_damaged(tmp_path):
    (tmp_path / "card.json").write_text('{"rows": 3, "share": 0.5, "colour": 1}')
    with pytest.raises(OtherVersion, match="another version.*colour") as e:
        read_json(tmp_path / "card.json", Small, "Build it again.")
    assert "damaged" not in str(e.value) and "Build" not in str(e.value)


def test_what_cannot_be_opened_is_not_called_damaged(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(CramError) as e:
            read_json(tmp_path / name, remedy="Delete it.")
        assert not isinstance(e.value, Damaged) and "Delete" not in str(e.value)
    (tmp_path / "secret").write_text("{}")
    for error in (PermissionError(errno.EACCES, "Permission denied"), MemoryError()):

        def refuse(path, error=error):
            raise error

        monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
        with pytest.raises((CramError, MemoryError)) as e:
            read_json(tmp_path / "secret", remedy="Delete it.")
        assert not isinstance(e.value, Damaged) and "Delete" not in str(e.value)


def test_control_characters_are_shown():
    assert printable("a\x1b[31m\x07\u202e\r\n\tb é") == "a\\x1b[31m\\x07\\u202e\\r\n\tb é"


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("1e-3", float, 1e-3),
        ("8e6", int, 8_000_000),
        ("True", bool, True),
        ("off", bool, False),
        ("null", float, 0.0),
        ("1e4", str, "1e4"),
        ("[0.9, 0.98]", list[float], [0.9, 0.98]),
        ("['a',b]", list[str], ["a", "b"]),
    ],
)
def test_words_become_values(text, kind, value):
    found = read_value(text, kind)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["2.5", "1_000", "²", "inf", "True", ""])
def test_an_integer_is_strict(text):
    with pytest.raises(CramError, match="data.vocab_size="):
        tiny(f"data.vocab_size={text}")


@pytest.mark.parametrize("text", ["9" * 310, "1" * 100_000, "1e999"])
@pytest.mark.parametrize("key", ["seed", "train.lr", "budget", "impl.memory", "train.betas"])
def test_a_number_of_any_length_is_refused_in_one_line_at_once(key, text):
    began = time.monotonic()
    with pytest.raises(CramError, match=key) as e:
        tiny(f"{key}={text}")
    assert len(str(e.value)) < 300 and time.monotonic() - began < 1


def test_a_list_option_is_not_shared():
    first, second = Train(), Train()
    first.betas.append(0.5)
    assert second.betas == Train().betas == [0.9, 0.98]


@pytest.mark.parametrize("group", PRESETS)
def test_an_option_has_a_meaning_and_a_preset_a_source(group):
    assert all(len(f.description) > 4 for f in GROUPS[group].__pydantic_fields__.values())
    assert PROVENANCE[group].keys() == PRESETS[group].keys() and all(PROVENANCE[group].values())
    assert all(preset(group, name) for name in PRESETS[group])


def test_importing_the_package_is_light_and_changes_nothing():
    code = (
        "import os, sys; before = dict(os.environ); import cramnb; "
        f"print([m for m in {LIGHT} if m in sys.modules], before == dict(os.environ), "
        "bool(cramnb.__version__))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True True"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["eval", "--help", "all"],
        ["runs"],
        ["pretrain", "arch=crammed-brt"],
        ["data", "data.vocab_size=x"],
    ],
)
def test_the_command_answers_without_torch(words, tmp_path):
    code = (
        "import sys; from cramnb.cli import main; main(sys.argv[1:]); "
        f"print([m for m in {LIGHT} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], text=True, capture_output=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "first, second",
    [
        ("import cramnb", "from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline"),
        ("from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline", "import cramnb"),
        ("from cramnb.model.encoder import CrammedBertConfig", "from transformers import pipeline"),
    ],
)
def test_auto_classes_know_our_models_in_either_order(first, second, tmp_path):
    folder = tmp_path / "model"
    make = f"""
import torch
from cramnb.model.mlm import build_model
from cramnb.recipe import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {{w: i for i, w in enumerate('[PAD] [UNK] [MASK] the array of'.split())}}
t = Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
t.pre_tokenizer = pre_tokenizers.Whitespace()
t = PreTrainedTokenizerFast(
    tokenizer_object=t, pad_token='[PAD]', unk_token='[UNK]', mask_token='[MASK]'
)
t.save_pretrained({str(folder)!r})
words = 'hidden_size=8 num_attention_heads=2 intermediate_size=8 num_hidden_layers=1'.split()
arch = tiny(*(f'arch.{{w}}' for w in words)).arch
build_model(arch, 6).save_pretrained({str(folder)!r})"""
    use = f"""
{first}
{second}
from transformers import AutoConfig, AutoModel
fill = pipeline('fill-mask', {str(folder)!r}, top_k=2)
encoder = AutoModel.from_pretrained({str(folder)!r})
print(type(fill.model).__name__, len(fill('the [MASK] of')), type(encoder).__name__)
print(AutoConfig.for_model('crammed_bert').model_type)"""
    subprocess.run([sys.executable, "-c", make], check=True, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = "\n".join(done.stdout.splitlines()[-2:]).split()
    assert told == ["CrammedBertForMaskedLM", "2", "CrammedBertModel", "crammed_bert"]


def test_recipes_of_the_day_are_what_was_published():
    day = compose([], "crammed")
    assert day == compose(
        "arch=crammed-bert train=bert-o4 data=pile-readymade eval=GLUE_sane budget=24".split()
    )
    assert day.data.source == "tokens" and "2efdb9d060d1" in day.data.hub_path
    assert compose([], "crammed-c4").data.hub_path == "allenai/c4"


def test_a_folder_that_is_replaced_is_never_missing(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("old")

    def interrupted(source, target, real=os.replace):
        if target == tmp_path / "model" and not str(source).endswith(".old.tmp"):
            raise KeyboardInterrupt
        real(source, target)

    with mock.patch("os.replace", interrupted), pytest.raises(KeyboardInterrupt):
        with whole(tmp_path / "model") as folder:
            folder.mkdir()
            (folder / "weights").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/weights").read_text() == "old"
