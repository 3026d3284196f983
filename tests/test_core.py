"""The floor: files whole or not at all, one reader of JSON, one door for models, strict values."""

import errno
import json
import os
import subprocess
import sys

import pytest

from cramnb.core import (
    CramError,
    DiskFull,
    fingerprint,
    load_pretrained,
    printable,
    read_json,
    whole,
    write_array,
    write_json,
    write_text,
)
from cramnb.recipe import read_value
from cramnb.recipe import compose

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


def test_text_with_half_a_character_is_written(tmp_path):
    write_text(tmp_path / "a", "half \ud800 and é")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "half ? and é"


def test_an_array_is_written_under_its_own_name(tmp_path):
    import numpy as np

    write_array(tmp_path / "rows.npy", np.arange(4))
    assert np.load(tmp_path / "rows.npy").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"other": 1}',
        b"[" * 100_000,
    ],
)
def test_damaged_json_is_one_line(tmp_path, content):
    (tmp_path / "card.json").write_bytes(content)
    with pytest.raises(CramError) as e:
        read_json(tmp_path / "card.json", needs=("rows",), remedy="Build it again.")
    assert "card.json is damaged" in str(e.value) and str(e.value).endswith("Build it again.")
    assert "\n" not in str(e.value)


def test_content_names_a_file(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = (fingerprint(tmp_path / n) for n in "abc")
    os.utime(tmp_path / "a", (1, 1))
    assert a == b == fingerprint(tmp_path / "a") != c
    assert fingerprint(1, "x") != fingerprint("x", 1)


def test_control_characters_are_shown():
    assert printable("a\x1b[31m\x07\u202e\r\n\tb é") == "a\\x1b[31m\\x07\\u202e\\r\n\tb é"


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("1e-3", float, 1e-3),
        ("8e6", int, 8_000_000),
        ("12", int, 12),
        ("True", bool, True),
        ("off", bool, False),
        ("null", float, 0.0),
        ("null", str, ""),
        ("1e4", str, "1e4"),
        ("[0.9, 0.98]", list[float], [0.9, 0.98]),
        ("['a',b]", list[str], ["a", "b"]),
        ("[]", list[str], []),
    ],
)
def test_words_become_values(text, kind, value):
    assert read_value(text, kind) == value and fits(read_value(text, kind), kind)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("1", bool),
        ("0", bool),
        ("1_000", bool),
        ("2.5", int),
        ("²", int),
        ("${seed}", int),
        ("inf", int),
        ("nan", int),
        ("many", float),
        ("[", float),
        ("[0.9, x]", list[float]),
        ("True", int),
        ("", int),
        ("0x10", int),
    ],
)
def test_words_of_another_type_do_not_fit(text, kind):
    assert not fits(read_value(text, kind), kind)


def test_a_list_option_is_not_shared():
    a, b = (option([1.0], "x").default_factory() for _ in range(2))
    a.append(2.0)
    assert b == [1.0]


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
        ["cram", "--help"],
        ["eval", "--help", "all"],
        ["runs"],
        ["plot", "--help"],
        ["pretrain", "arch=crammed-brt"],
        ["crm"],
        ["data", "data.vocab_size=x"],
        ["eval", "name=a/b"],
        ["cram", "train.scheduler=nothing"],
    ],
)
def test_the_command_answers_without_torch(words, tmp_path):
    code = (
        "import sys; from cramnb.command import main; main(sys.argv[1:]); "
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
        ("import cramnb, transformers", "from transformers.pipelines import pipeline"),
    ],
)
def test_auto_classes_know_our_models_in_either_order(first, second, tmp_path):
    folder = tmp_path / "model"
    make = f"""
import torch
from cramnb.mlm import build_model
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


def test_our_class_alone_teaches_the_auto_classes():
    code = (
        "from cramnb.mlm import CrammedBertConfig; from transformers import AutoModelForMaskedLM; "
        "c = CrammedBertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, "
        "num_hidden_layers=1, vocab_size=6); "
        "print(type(AutoModelForMaskedLM.from_config(c)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout.strip() == "CrammedBertForMaskedLM", done.stderr


def test_a_model_folder_must_not_bring_code(tmp_path):
    from transformers import AutoModel

    (tmp_path / "evil.py").write_text("open('ran', 'w').write('yes')")
    wants = {"AutoConfig": "evil.C", "AutoModel": "evil.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": wants}))
    with pytest.raises(CramError, match="cannot be loaded"):
        load_pretrained(AutoModel, tmp_path)
    assert not list(tmp_path.rglob("ran"))


def test_recipes_of_the_day_are_what_was_published():
    day = compose([], "crammed")
    assert day == compose(
        "arch=crammed-bert train=bert-o4 data=pile-readymade eval=GLUE_sane budget=24".split()
    )
    assert day.data.source == "tokens" and "2efdb9d060d1" in day.data.hub_path
    assert compose([], "crammed-c4").data.hub_path == "allenai/c4"
