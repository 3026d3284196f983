"""What is said is what is true: weights, files, links, words and names from outside."""

import json
import shutil
import socket
import threading
from pathlib import Path

import pytest
import torch
from conftest import cramnb
from exam import write
from safetensors.torch import save_file
from test_hub import VARIANTS, ours, run, theirs, write_original  # noqa: F401

from cramnb.cli import main
from cramnb.core import CramError
from cramnb.judge.tasks import load_folder
from cramnb.run.hub import convert
from cramnb.run.page import LiveServer
from cramnb.recipe import tiny
from cramnb.run.runs import make_folder
from cramnb.judge.tasks import own_task


def line(capsys):
    "The one line of a mistake."
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    return said


def test_untrained_means_untrained(run, tmp_path, monkeypatch, capsys):  # noqa: F811
    run()
    monkeypatch.chdir(tmp_path)
    said = {}
    for value in ("latest", "untrained", "untrained "):
        words = ["name=small", "text=the [MASK] sat", f"eval.checkpoint={value.strip()}"]
        assert main(["probe", *words]) == 0
        said[value] = capsys.readouterr().out
    assert said["latest"] != said["untrained"] == said["untrained "]


@pytest.mark.parametrize("value", ["untrained", "best", "FOREIGN"])
def test_only_the_final_weights_of_a_run_are_published(value, run, tmp_path, monkeypatch, capsys):  # noqa: F811
    folder, _ = run()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    if value == "FOREIGN":
        value = shutil.copytree(folder / "model", tmp_path / "other")
    if value == "best":
        monkeypatch.setattr("cramnb.run.run._best", lambda folder: folder / "best")
    assert main(["publish", "name=small", f"eval.checkpoint={value}"]) == 2
    assert "final weights" in line(capsys) and not list(folder.glob("hub*"))


def test_a_folder_for_the_hub_that_is_there_is_never_changed(run, tmp_path, monkeypatch, capsys):  # noqa: F811
    folder, _ = run()
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "name=small"]) == 0
    (folder / "hub/notes.md").write_text("mine")
    assert main(["publish", "name=small"]) == 0  # its own files are as it would write them
    assert (folder / "hub/notes.md").read_text() == "mine"
    (folder / "hub/README.md").write_text("edited")
    capsys.readouterr()
    assert main(["publish", "name=small"]) == 2
    assert "README.md" in line(capsys)
    assert (folder / "hub/README.md").read_text() == "edited"
    assert sorted(p.name for p in folder.glob("hub*")) == ["hub"]


def test_a_fresh_start_in_a_linked_folder_is_fresh(tmp_path):
    far, base = tmp_path / "disk", tmp_path / "runs"
    (far / "checkpoints/update_00000001").mkdir(parents=True)
    for name in ("recipe.json", "pretrain.json"):
        (far / name).write_text("{}")
    (tmp_path / "kept").mkdir()
    (far / "elsewhere").symlink_to(tmp_path / "kept")
    base.mkdir()
    (base / "a").symlink_to(far)
    make_folder(tiny(f"base_dir={base}", "name=a", "fresh=True"))
    assert [p.name for p in far.iterdir()] == ["recipe.json"]
    assert (base / "a").is_symlink() and (tmp_path / "kept").is_dir()


def test_a_fresh_start_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/recipe.json").write_text("{}")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CramError, match="Permission denied"):
        make_folder(tiny(f"base_dir={tmp_path}", "name=a", "fresh=True"))


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    from cramnb.train.checkpoint import newest_sound

    (tmp_path / "update_00000001").mkdir()
    (tmp_path / "update_00000001/state.json").write_text("{}")

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CramError, match="Permission denied"):
        newest_sound(tmp_path)


HALF = "half \ud800 a pair"


@pytest.mark.parametrize("text", [HALF, 7, None])
def test_texts_that_no_tokenizer_reads_are_found_before_training(text, tmp_path):
    rows = [dict(sentence="good", label=i % 2) for i in range(30)]
    write(tmp_path / "cola", dict(train=[*rows, dict(sentence=text, label=1)], dev=rows))
    with pytest.raises(CramError, match="row 31|line 31"):
        load_folder("cola", tmp_path)
    if text == 7:
        return  # in a table of one's own a number is a text
    for texts, labels in ((text, "a"), (["good", text], ["x", "y"])):
        good = "good" if texts is text else ["good", "good"]
        other = "b" if texts is text else ["y", "x"]
        own = [dict(text=good, label=(labels, other)[i % 2]) for i in range(30)]
        own.append(dict(text=texts, label=labels))
        (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, own)))
        with pytest.raises(CramError, match="column text|line 31"):
            own_task(str(tmp_path / "own.jsonl"))


def test_the_label_is_no_text(tmp_path):
    (tmp_path / "own.csv").write_text("text,label\n" + "a,yes\nb,no\n" * 10)
    with pytest.raises(CramError, match="label"):
        own_task(str(tmp_path / "own.csv"), text_columns="text,label")


@pytest.mark.parametrize("label", [-1, "-1", -0.5])
def test_a_similarity_below_zero_is_no_label(label, tmp_path):
    pair = dict(sentence1="a", sentence2="b")
    rows = [pair | dict(label=2.5), pair | dict(label=label)]
    write(tmp_path / "stsb", dict(train=rows, dev=rows[:1]))
    with pytest.raises(CramError, match="row 2"):
        load_folder("stsb", tmp_path)


def test_weights_of_eight_bits_are_refused(tmp_path):
    config = VARIANTS["crammed-bert"]
    source = write_original(tmp_path / "source", config, ours(config))
    state = {k: v.to(torch.float8_e4m3fn) for k, v in theirs(ours(config), config).items()}
    save_file(state, source / "model.safetensors")
    with pytest.raises(CramError, match="float8"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "name=small", "text=the [MASK] \udcff"],
        ["runs", "base_dir=~nosuchuser/runs"],
        ["convert", "~nosuchuser", "out"],
        ["data", "data=files", "data.files=a.txt,~nosuchuser/b.txt"],
    ],
)
def test_words_that_name_nothing_cost_one_line(words, run, tmp_path, monkeypatch, capsys):  # noqa: F811
    run()
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert line(capsys) and [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
def test_help_on_a_terminal_without_utf8(encoding, tmp_path):
    done = cramnb("--help", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and "usage: cramnb" in done.stdout, done.stderr


def test_a_name_with_dollars_is_a_name_in_a_picture(tmp_path):
    from cramnb.run.report import plot_runs

    rows = [dict(update=i, elapsed=i, tokens=i, loss=2.0) for i in range(5)]
    plot_runs({r"$\frac{$": rows}).savefig(tmp_path / "plot.svg")


def test_who_asks_nothing_holds_no_thread(tmp_path, monkeypatch):
    from cramnb.run import page as live

    monkeypatch.setattr(live._Handler, "timeout", min(0.2, live._Handler.timeout))
    with LiveServer(tmp_path, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with socket.create_connection(server.server_address) as idle:
            idle.settimeout(5)
            assert idle.recv(1) == b""  # closed by the server
        server.shutdown()


def test_a_corpus_is_published_from_inside_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "corpus=."]) == 2
    assert line(capsys)


def test_a_folder_of_the_hub_brings_no_file_from_outside(tmp_path):
    from cramnb.recipe import compose
    from cramnb.text.sources import read_hub

    (tmp_path / "secret.txt").write_text("secret\n")
    (tmp_path / "set").mkdir()
    head = "---\nconfigs:\n- config_name: default\n  data_files: ../secret.txt\n---\n"
    (tmp_path / "set/README.md").write_text(head)
    words = ["data=bookcorpus", f"data.hub_path={tmp_path / 'set'}", "data.hub_name="]
    with pytest.raises(CramError, match="outside"):
        list(read_hub(compose(words).data))
