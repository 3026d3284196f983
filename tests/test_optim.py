"""Optimizers: who is decayed, what agrees with torch, and that each one learns, is saved and goes
on."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from cramnb.train.checkpoint import load_checkpoint, save_checkpoint
from cramnb.model.mlm import build_model
from cramnb.train.optim import Lion, Muon, build_optimizer, decay_groups, is_hidden_matrix, set_lr
from cramnb.core import CramError
from cramnb.options import Arch
from cramnb.recipe import compose, preset
from toy import model, recipe, trainer, weights

NAMES = ("adamw", "muon", "sgd", "lion", "radam", "adam", "adafactor", "adamw8bit")


def needs(name):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")


def test_decay_groups_of_crammed_bert():
    with torch.device("meta"):
        decayed, spared = decay_groups(build_model(Arch(), 32_768), 0.01)
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (66, 119_537_665)
    assert (len(spared["params"]), sum(p.numel() for p in spared["params"])) == (68, 52_224)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)


@pytest.mark.parametrize("arch", ["hf-bert-tiny", "tiny", "crammed-bert-simple"])
def test_no_norm_and_no_bias_is_decayed(arch):
    with torch.device("meta"):
        m = build_model(preset("arch", arch), 100)
    names = {p: n for n, p in m.named_parameters()}
    decayed, spared = ({names[p] for p in g["params"]} for g in decay_groups(m, 0.1))
    assert len(decayed) + len(spared) == len(names), "each parameter stands in one group"
    assert not [n for n in decayed if "bias" in n or "norm" in n.lower()] and all(
        p.ndim != 2 or n in decayed for p, n in names.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns_and_survives_a_checkpoint(name, tmp_path):
    needs(name)
    rate = dict(sgd=0.05, lion=1e-3, adafactor=3e-2).get(name, 4e-3)
    whole = trainer(optimizer=name, lr=rate)
    losses = [row["loss"] for row in whole.updates()]
    assert losses[-1] < losses[0] - 0.05
    first = trainer(optimizer=name, lr=rate)
    for row in itertools.islice(first.updates(), 7):
        pass
    save_checkpoint(tmp_path, first)
    second = trainer(seed=1, optimizer=name, lr=rate)
    assert load_checkpoint(tmp_path, second) == {}
    for row in second.updates():
        pass
    assert torch.equal(weights(whole), weights(second))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_schedule_moves_every_group_in_proportion(name):
    optimizer = build_optimizer(model(), recipe(optimizer=name))
    set_lr(optimizer, 0.25)
    assert all(g["lr"] == 0.25 * g["peak_lr"] > 0 for g in optimizer.param_groups)


def steps(optimizer, p, gradients):
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def made(*shape):
    g = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=g), torch.randn(20, *shape, generator=g)


def in_half_precision(matrices):
    "The polynomial as torch's Muon computes it on any device."

    def one(g):
        x = (g.mT if g.shape[0] > g.shape[1] else g).bfloat16()
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            s = x @ x.T
            x = torch.addmm(x, torch.addmm(s, s, s, beta=-4.775, alpha=2.0315), x, beta=3.4445)
        return (x.mT if g.shape[0] > g.shape[1] else x).float()

    return torch.stack([one(g) for g in matrices])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize(
    "options, near", [({}, 0.05), (dict(polynomial=in_half_precision), 1e-5)], ids=["ours", "half"]
)
def test_muon_is_torchs_muon_but_for_its_half_precision(shape, options, near):
    w, gradients = made(*shape)

    def run(cls, **more):
        return steps(
            cls([p := nn.Parameter(w.clone())], lr=0.02, momentum=0.95, weight_decay=0.01, **more),
            p,
            gradients,
        )

    ours, theirs = run(Muon, **options), run(torch.optim.Muon, nesterov=True)
    assert (ours - theirs).norm() / (theirs - w).norm() < near


def test_muon_treats_query_key_and_value_apart_and_equal_shapes_alike():
    w, gradients = made(24, 8)
    whole, parts = nn.Parameter(w.clone()), [nn.Parameter(c.clone()) for c in w.chunk(3)]
    whole.stacked = True
    together, apart = Muon([whole]), Muon(parts)
    for g in gradients:
        whole.grad = g.clone()
        for p, c in zip(parts, g.chunk(3)):
            p.grad = c.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(
        whole.detach(), torch.cat([p.detach() for p in parts]), atol=1e-6, rtol=0
    )
    alone = nn.Parameter(w[:8].clone())
    torch.testing.assert_close(
        parts[0].detach(), steps(Muon([alone]), alone, gradients[:, :8]), atol=1e-6, rtol=0
    )


def test_muon_takes_matrices_of_the_layers_and_nothing_else():
    for arch in ("tiny", "hf-bert-tiny"):
        m = build_model(preset("arch", arch), 100)
        taken = {n for n, p in m.named_parameters() if is_hidden_matrix(n, p)}
        assert taken and all(
            ".layer" in n and dict(m.named_parameters())[n].ndim == 2 for n in taken
        )
        muon, *rest = build_optimizer(m, recipe(optimizer="muon")).param_groups
        assert len(muon["params"]) == len(taken) and sum(
            len(g["params"]) for g in (muon, *rest)
        ) == len(list(m.parameters()))
    with pytest.raises(CramError, match="no layer matrices"):
        build_optimizer(nn.Linear(3, 3), recipe(optimizer="muon"))


def test_lion_moves_by_the_sign():
    p = nn.Parameter(torch.zeros(3))
    assert steps(Lion([p], lr=0.1), p, [torch.tensor([9.0, -0.01, 0.0])]).tolist() == pytest.approx(
        [-0.1, 0.1, 0]
    )


@pytest.mark.parametrize(
    "name, shrinks", [("adamw", True), ("radam", True), ("lion", True), ("adam", False)]
)
def test_decay_is_decoupled_where_it_is_said_to_be(name, shrinks):
    """A loud gradient that alternates says nothing; what is left is the decay, and Adam's own
    divides it by the noise."""
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = build_optimizer(layer, recipe("bert-o4", optimizer=name, lr=1e-3, weight_decay=1.0))
    for i in range(300):
        layer.weight.grad = torch.full((1, 1), (-1.0) ** i * 100)
        optimizer.step()
    assert (abs(layer.weight.item() - 0.74) < 0.15) == shrinks


def test_an_optimizer_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(CramError, match="Did you mean .adam"):
        build_optimizer(model(), replace(recipe(), optimizer="adamx"))
    with pytest.raises(CramError, match="train.optimizer=shampoo"):
        compose(["train/optim=shampoo"])


def test_missing_bitsandbytes_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(CramError, match="eightbit"):
        build_optimizer(model(), recipe(optimizer="adamw8bit"))
