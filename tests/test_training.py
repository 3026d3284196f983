"""Checkpoints of a run: what they hold, damage, and exact resume."""
import itertools
import random
import time
from dataclasses import replace

import pytest
import torch
from conftest import server

from cramnb.checkpoint import checkpoints, damage, load_checkpoint, save_checkpoint
from cramnb.mlm import build_model
from cramnb.recipe import CramError
from toy import ARCH, trainer, weights


def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path):
    t, told = trainer(), []
    for row in itertools.islice(t.updates(), 6):
        if row["update"] in (2, 4, 6): save_checkpoint(tmp_path, t, keep=2)
    assert [c.name for c in checkpoints(tmp_path)] == ["update_00000004", "update_00000006"]
    newest = checkpoints(tmp_path)[-1]
    content = bytearray((newest/"model.safetensors").read_bytes())
    content[-3] ^= 1
    (newest/"model.safetensors").write_bytes(content)
    assert "hash" in damage(newest)
    again = trainer()
    load_checkpoint(tmp_path, again, told.append)
    assert again.state.update == 4 and "update_00000006" in told[0]
    (checkpoints(tmp_path)[0]/"state.json").write_text("{")
    with pytest.raises(CramError, match="fresh=True"): load_checkpoint(tmp_path, again, told.append)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_checkpoint(tmp_path, trainer())
    other = trainer()
    other.model = build_model(replace(ARCH, num_hidden_layers=1), 100)
    with pytest.raises(CramError, match="another model"): load_checkpoint(tmp_path, other)


def _run_with_kills(folder):
    torch.set_num_threads(1)
    t = trainer(max_updates=60)
    load_checkpoint(folder, t, lambda text: None)
    for row in t.updates(): save_checkpoint(folder, t)


def test_twenty_kills_end_where_no_kill_ends(tmp_path):
    torch.set_num_threads(1)
    whole = trainer(max_updates=60)
    for row in whole.updates(): pass
    rng, fork = random.Random(0), server()
    for attempt in range(20):
        p = fork.Process(target=_run_with_kills, args=(tmp_path,))
        p.start()
        time.sleep(rng.uniform(0.05, 0.3))
        p.kill()     # SIGKILL
        p.join()
    _run_with_kills(tmp_path)
    last = trainer(seed=5, max_updates=60)
    load_checkpoint(tmp_path, last)
    assert last.state.update == 60 and last.state.sequences == 960 and torch.equal(weights(last), weights(whole))
