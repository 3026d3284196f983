"""What a user types, and what a user gets wrong."""

from dataclasses import asdict

import pytest
from conftest import cramnb

from cramnb.cli import VERBS, main, read_command
from cramnb.core import CramError, decode
from cramnb.options import PRESETS, flat
from cramnb.recipe import Recipe, compose


def mistake(capsys, *words: str) -> str:
    "Run the command in this process; it must end with exit code 2 and one line."
    code = main(list(words))
    err = capsys.readouterr().err
    line = err.splitlines()[-1]  # before it there may be the bar of a stage
    assert (
        code == 2
        and line.startswith("cramnb: ")
        and err.count("cramnb: ") == 1
        and "Traceback" not in err
    )
    return line


MISTAKES = {  # command: what the line must hold, the nearest name among it
    "pretrian": "'pretrain'",
    "pretrain nonsense": "nonsense key=value",
    "pretrain budget=-1": "budget=-1 3m",
    "pretrain budget=abc": "budget=abc hours",
    "pretrain budget=0": "budget=0",
    "pretrain train.batchsize=3": "train.batchsize train.batch_size",
    "pretrain lr=1e-3": "lr 'train.lr' 'eval.lr'",
    "pretrain arch=crammedbert": "arch=crammedbert 'crammed-bert'",
    "pretrain arch=hf-bert-tiny arch.norm_placement=post": "norm_placement=post model_type=bert",
    "pretrain data=oscar": "data=oscar fineweb-edu",
    "pretrain data=docstring": "data=docstring 'docstrings'",
    "pretrain train=bert-04": "train=bert-04 'bert-o4'",
    "eval eval=GLUE-sane": "eval=GLUE-sane 'GLUE_sane'",
    "pretrain train.batch_size=many": "train.batch_size=many integer",
    "pretrain train.dropout=perhaps": "train.dropout=perhaps true",
    "pretrain train.lr=[": "train.lr=[ number",
    "pretrain train.lr=${x}": "train.lr=${x} number",
    "pretrain train.lr=nan": "train.lr=nan finite",
    "pretrain train.mlm_probability=25": "train.mlm_probability=25 1",
    "pretrain data.near_duplicates=0.99": "data.near_duplicates=0.99 0.98",
    "pretrain impl.microbatch_size=64 train.batch_size=32": "microbatch_size=64 batch_size=32",
    "pretrain impl.microbatch_size=lots": "impl.microbatch_size=lots auto",
    "pretrain arch.num_attention_heads=3": "arch.num_attention_heads=3 hidden_size=128",
    "pretrain arch.position_embedding_type=rotar": "rotar 'rotary'",
    "pretrain arch=tiny-crammed data.seq_length=256": "seq_length=256 max_position_embeddings=128",
    "pretrain train.scheduler=triangle3": "triangle3 triangle2",
    "pretrain train.optimizer=muan": "muan 'muon'",
    "pretrain name=a/b": "name=a/b letters",
    "pretrain name=..": "name=.. letters",
    "pretrain eval.tasks=kola": "kola 'cola'",
    "pretrain eval.trials=0": "eval.trials=0 1",
    "pretrain data=files": "data.files CRAMNB_DATA",
    "pretrain data=files data.files=nowhere": "data.files=nowhere",
    "pretrain data.judge=nowhere": "data.judge=nowhere",
    "pretrain data=sanity-check-1 data.judge=a": "data.judge=a data.source=random",
    "pretrain data=files data.files=. data.judge=a data.heldout_files=b": "judge heldout_files",
    "pretrain impl.device=cuda": "impl.device=cuda CUDA",
    "pretrain impl.attn_implementation=flash_attention_2": "flash_attention_2 sdpa",
    "pretrain impl.memory=much": "impl.memory=much 8GB",
    "pretrain base_dir=~nosuchuser/x": "base_dir=~nosuchuser",
    "runs base_dir=~nosuchuser": "base_dir=~nosuchuser",
    "convert ~nosuchuser target": "home",
    "plan gpu=rtx4090 gpu=a100": "gpu=a100 once",
    "plot a x=time x=tokens": "x=tokens once",
    "watch nosuch": "nosuch",
    "watch name=nosuch": "nosuch",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_nothing(words, capsys, tmp_path, monkeypatch):
    import torch

    if "impl.device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CRAMNB_DATA", raising=False)
    line = mistake(capsys, *words.split())
    assert all(part in line for part in MISTAKES[words].split()), line
    assert not [p for p in tmp_path.rglob("*") if p.is_file()], "a file was left behind"


@pytest.mark.parametrize("key", ["data.files", "eval.files", "base_dir", "data.judge", "eval"])
def test_a_long_value_is_not_quoted_whole(key, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(mistake(capsys, "eval", "data=files", f"{key}={'x' * 5000}")) < 800


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "no text"),
        (b"\n\n \n", "no text"),
        (b'{"text": 3}\n', "int"),
        (b'{"text": "a b"}\n{"tex', "line 2"),
        (b'{"body": "a"}\n', "body"),
    ],
)
def test_bad_files_are_named(content, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(content)
    assert told in mistake(capsys, "data", "data=files", "data.files=bad.jsonl")
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} <= {"bad.jsonl"}


def test_cut_gzip_and_forbidden_file(capsys, tmp_path, monkeypatch, texts):
    import gzip
    import os

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(texts.read_bytes())[:5000])
    assert "cut.jsonl.gz" in mistake(capsys, "data", "data=files", "data.files=cut.jsonl.gz")
    (tmp_path / "secret.txt").write_text("words")
    (tmp_path / "secret.txt").chmod(0)
    if os.geteuid():
        assert "secret.txt" in mistake(capsys, "data", "data=files", "data.files=secret.txt")


def test_a_vocabulary_that_a_text_cannot_fill_shrinks_and_says_so(
    capsys, tmp_path, monkeypatch, texts
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "data",
                "data=files",
                f"data.files={texts}",
                "data.vocab_size=60000",
                "data.max_documents=100",
                "data.heldout=0.1",
            ]
        )
        == 0
    )
    assert "The vocabulary has" in capsys.readouterr().out


def test_help_names_every_verb_preset_and_key(capsys):
    assert main(["--help"]) == 0 and main([]) == 0
    usage = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in usage
    assert main(["pretrain", "--help", "all"]) == 0
    text = capsys.readouterr().out
    for group, names in PRESETS.items():
        for name in names:
            assert name in text
    for key in flat(compose([])):
        assert f"  {key}=" in text


def test_commands_of_cramming_carry_over():
    recipe = compose(
        (
            "name=test arch=hf-bert-base train=bert-base data=sanity-check-2 dryrun=True "
            "impl.microbatch_size=2"
        ).split()
    )
    assert (
        recipe.arch.model_type,
        recipe.train.batch_size,
        recipe.data.tokenizer,
        recipe.dryrun,
    ) == ("bert", 1536, "BPE", True)
    recipe = compose(
        (
            "train=bert-o4 train.optim.lr=2e-3 arch=crammed-bert "
            "arch.num_transformer_layers=4 budget=0.5"
        ).split()
    )
    assert (recipe.train.lr, recipe.arch.num_hidden_layers, recipe.budget) == (2e-3, 4, 0.5)


def test_a_recipe_survives_json():
    import json

    recipe = compose(["arch=modern", "train=bert-o4", "budget=90s"])
    assert decode(json.dumps(asdict(recipe)), Recipe, "it") == recipe
    with pytest.raises(CramError, match="colour"):
        decode('{"colour": "blue"}', Recipe, "it")


def test_every_preset_makes_a_recipe():
    for group, names in PRESETS.items():
        for name in names:
            read_command(["pretrain", f"{group}={name}", "name=x"])


def test_version_and_no_words(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0 and capsys.readouterr().out == f"cramnb {version('cramnb')}\n"
    assert main([]) == 0 and "usage: cramnb VERB" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_two_screens(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert len(page) <= 48 and max(map(len, page)) <= 100


@pytest.mark.parametrize("verb", ["cram", "pretrain", "eval", "data"])
def test_all_options_are_one_word_away(verb, capsys):
    assert main([verb, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([verb, "--help", "all"]) == 0
    long = capsys.readouterr().out
    options = [line for line in short.splitlines() if line.startswith("  ") and line[2] != " "]
    assert len(options) in (9, 10) and len(long.splitlines()) > 140
    assert max(map(len, long.splitlines())) <= 100
    assert "--help all" in short and "minutes (3m)" in long


def test_help_shows_the_way_of_the_readme(capsys):
    main(["--help"])
    page = capsys.readouterr().out
    for words in ("cram", "cram data=files data.files=", "runs", "plot", "probe", "publish"):
        assert f"\n  cramnb {words}" in page
    own = dict(plan="gpu=", plot="x=time", probe="text=", publish="push=")
    for verb, word in own.items():
        main([verb, "--help"])
        assert f"  {word}" in capsys.readouterr().out


def test_a_command_of_the_original_says_what_it_ignores(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["eval", "name=nobody", "impl.fullgraph=False"])
    out = capsys.readouterr().out
    assert out.startswith("impl.fullgraph=False changes nothing here") and out.count("\n") == 1


def test_the_module_runs_as_a_command(tmp_path):
    done = cramnb("pretrain", "budget=never", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
