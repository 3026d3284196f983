"""Shared by all tests: the repository, and private data where a machine has it."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores Ctrl-C, and so would all that the tests start

ROOT = Path(__file__).parent.parent
BESIDE = (
    ROOT.parent / "shared"
)  # fixtures and data that are not part of the project may lie beside the checkout


def beside(name: str) -> Path:
    folder = Path(os.environ.get("CRAMNB_SHARED", BESIDE)) / name
    if not folder.exists():
        pytest.skip(f"{name} is not on this machine")
    return folder


def same_numbers(model, out, want: dict, facts: dict):
    "Hidden states, asked logits and loss of a model equal those of the original's fixture."
    import torch

    close = dict(atol=1e-4, rtol=1e-4)
    hidden = model.model(want["input_ids"]).last_hidden_state
    torch.testing.assert_close(hidden, want["last_hidden_state"], **close)
    asked = out.logits.flatten(0, 1)[want["masked_positions"]]
    torch.testing.assert_close(asked, want["masked_logits"], **close)
    assert out.loss.item() == pytest.approx(facts["loss"], rel=1e-5)


def cramnb(*words: str, cwd: Path, timeout: int = 300, **env: str) -> subprocess.CompletedProcess:
    "Run the command as a user does, in a folder of its own."
    env = {
        **{k: v for k, v in os.environ.items() if k != "CRAMNB_DATA"},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    return subprocess.run(
        [sys.executable, "-m", "cramnb", *words],
        cwd=cwd,
        env=env,
        timeout=timeout,
        text=True,
        capture_output=True,
    )


def server():
    """Processes that start fast and without the threads of this one, which a plain fork would
    carry along half dead."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "cramnb.text.store",
            "cramnb.train.checkpoint",
            "cramnb.model.mlm",
            "cramnb.cram",
        ]
    )
    return context


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A small corpus of real English on every machine: docstrings of the standard library, one a
    line."""
    import itertools
    import json

    from cramnb.text.sources import docstrings

    path = tmp_path_factory.mktemp("texts") / "docs.jsonl"
    path.write_text(
        "".join(json.dumps({"text": d}) + "\n" for d in itertools.islice(docstrings(), 1500)),
        encoding="utf-8",
    )
    return path
