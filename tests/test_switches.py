"""Every switch of the architecture does what its name says, and other values are refused."""

import math
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from cramnb.model.attention import Attention
from cramnb.model.encoder import CrammedBertConfig, CrammedBertModel, Layer, MLP, Positions
from cramnb.model.encoder import make_norm, sinusoid
from cramnb.model.mlm import CrammedBertForMaskedLM, HeadTransform
from cramnb.options import GATED, Arch

SMALL = dict(vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
SMALL |= dict(intermediate_size=256, max_position_embeddings=32)
CLOSE = dict(atol=1e-4, rtol=1e-4)


def small(**changes):
    return CrammedBertConfig(**(SMALL | changes))


def fresh(cls, **changes):
    torch.manual_seed(0)
    return cls(small(**changes)).eval()


def loud(cls, **changes):
    "A model whose every part does something: fresh ones hardly speak."
    model = fresh(cls, **changes)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def stream():
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)) * 3 + 1


IDS = torch.randint(5, 300, (2, 8), generator=torch.Generator().manual_seed(0))
HINTS = get_type_hints(Arch)
NAMED = {name: get_args(hint) for name, hint in HINTS.items() if get_origin(hint) is Literal}


@pytest.mark.parametrize(
    "name, value", [(n, v) for n in NAMED if n != "model_type" for v in NAMED[n]]
)
def test_every_named_value_builds_and_learns(name, value):
    model = loud(CrammedBertForMaskedLM, **{name: value})
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_positions_add_what_they_should():
    table = sinusoid(32, 64, torch.device("cpu"))
    for p, i in ((0, 0), (1, 0), (31, 63), (7, 20), (13, 33)):
        angle = p / 10000 ** (i // 2 * 2 / 64)
        want = math.cos(angle) if i % 2 else math.sin(angle)
        assert table[p, i].item() == pytest.approx(want, abs=1e-5)
    x, table = stream(), table[:8]
    kinds = ("scaled-sinusoidal", "sinusoidal", "learned", "rotary", "none")
    made = {kind: Positions(small(position_embedding_type=kind)) for kind in kinds}
    assert made["scaled-sinusoidal"].scale.item() == pytest.approx(64**-0.5)
    made["scaled-sinusoidal"].scale.data.fill_(0.37)
    assert_close(made["scaled-sinusoidal"](x), x + 0.37 * table)
    assert_close(made["sinusoidal"](x), x + table)
    assert made["learned"].table.weight.shape == (32, 64)
    assert_close(made["learned"](x), x + made["learned"].table.weight[:8])
    assert made["rotary"](x) is made["none"](x) is x


@pytest.mark.parametrize("kind", NAMED["position_embedding_type"])
def test_only_without_positions_is_a_text_a_bag(kind):
    model, order = loud(CrammedBertModel, position_embedding_type=kind), [3, 1, 0, 7, 5, 6, 4, 2]
    moved, there = model(IDS[:, order]).last_hidden_state, model(IDS).last_hidden_state[:, order]
    assert torch.allclose(moved, there, atol=1e-4) == (kind == "none")


@pytest.mark.parametrize("kind", ["rotary", "learned", "scaled-sinusoidal"])
def test_rotary_models_see_distances_and_no_places(kind):
    """The same five tokens further to the right, in a row where nobody else is visible: the same
    vectors. A table would tell."""
    model = loud(CrammedBertModel, position_embedding_type=kind)
    documents = torch.tensor([[0] * 3 + [1] * 5])
    right = model(IDS[:1], document_ids=documents).last_hidden_state[:, 3:]
    left = model(IDS[:1, 3:]).last_hidden_state
    assert torch.allclose(right, left, atol=1e-4) == (kind == "rotary")


def test_rope_theta_turns_slower():
    rotary = dict(position_embedding_type="rotary")
    a, b = (loud(CrammedBertModel, rope_theta=theta, **rotary) for theta in (100.0, 1e6))
    assert not torch.allclose(a(IDS).last_hidden_state, b(IDS).last_hidden_state, atol=1e-3)


def test_norms_are_their_formulas():
    x, eps = stream(), 0.5
    layer, rms = make_norm(small(norm_eps=eps)), make_norm(small(norm_type="RMSNorm", norm_eps=eps))
    for p in (layer.weight, layer.bias, rms.weight):
        p.data.normal_()
    spread = (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    assert_close(layer(x), (x - x.mean(-1, keepdim=True)) / spread * layer.weight + layer.bias)
    assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * rms.weight)
    assert [n for n, _ in rms.named_parameters()] == ["weight"]


def test_activations_are_their_formulas():
    a, g = torch.randn(5, 8).chunk(2, -1)
    exact = g * 0.5 * (1 + torch.erf(g / math.sqrt(2)))
    bent = dict(gelu=exact, relu2=torch.where(g > 0, g * g, 0.0), geglu=exact * a)
    bent |= dict(swiglu=g * torch.sigmoid(g) * a)
    for name in NAMED["hidden_act"]:
        mlp = MLP(small(hidden_act=name))
        assert mlp.output.in_features == (128 if name in GATED else 256)
        mlp.input, mlp.output = torch.nn.Identity(), torch.nn.Identity()
        assert_close(mlp(torch.cat([a, g], -1) if name in GATED else g), bent[name])


def test_biases_are_where_they_are_asked_for():
    def biases(**changes):
        named = fresh(Layer, **changes).named_parameters()
        return {n for n, _ in named if n.endswith("bias") and "norm" not in n}

    assert biases() == set()
    assert biases(qkv_bias=True) == {"attention.qkv.bias"}
    assert biases(use_bias=True) == {"attention.output.bias", "mlp.input.bias", "mlp.output.bias"}
    assert fresh(CrammedBertForMaskedLM).decoder.bias is None
    assert fresh(CrammedBertForMaskedLM, decoder_bias=True).decoder.bias.shape == (300,)


def test_where_the_norms_stand():
    x, read = stream(), {}
    for where in ("pre", "post"):
        layer = fresh(Layer, norm_placement=where, initializer_range=0.5)
        layer.attention.register_forward_pre_hook(lambda m, x, where=where: read.update({where: x}))
        out = layer(x)
        normed = torch.allclose(out.var(-1, unbiased=False), torch.ones(2, 8), atol=1e-3)
        assert normed == (where == "post")
    assert_close(read["post"][0], x)
    assert_close(read["pre"][0], F.layer_norm(x, (64,)), **CLOSE)
    sandwich = fresh(Layer, norm_placement="sandwich")
    for block in (sandwich.attention.output, sandwich.mlp.output):
        block.weight.data *= 1000
    assert (sandwich(x) - x).square().mean() < 4.5  # two blocks of size one, whatever their weights


def test_deepnorm_carries_the_stream():
    layer, x, carry = fresh(Layer, norm_placement="post", deepnorm=True), stream(), 6**0.25
    for block in (layer.attention.output, layer.mlp.output):
        block.weight.data.zero_()
    layer.mlp_norm = torch.nn.Identity()
    assert_close(layer(x), F.layer_norm(x * carry, (64,)) * carry, **CLOSE)


@pytest.mark.parametrize("norms", [True, False])
def test_embedding_and_final_norm(norms):
    model = fresh(CrammedBertModel, embedding_norm=norms, final_norm=norms)
    out = model(IDS, output_hidden_states=True)
    for h in (out.hidden_states[0], out.last_hidden_state):
        assert (abs(h.square().mean().item() - 1) < 0.01) == norms


def test_head_transforms():
    x = stream()
    none, linear, dense = (
        HeadTransform(small(head_transform=kind, use_bias=True))
        for kind in ("none", "linear", "dense")
    )
    assert none(x) is x
    assert_close(linear(x), x @ linear.dense.weight.T + linear.dense.bias)
    assert_close(dense(x), F.layer_norm(F.gelu(dense.dense(x)), (64,)), atol=1e-5, rtol=1e-5)
    assert HeadTransform(small(head_transform="linear")).dense.bias is None


def test_query_and_key_are_normalised_per_head():
    module = Attention(small(qk_norm=True))
    assert module.query_norm.weight.shape == module.key_norm.weight.shape == (16,)
    for norm in (module.query_norm, module.key_norm):
        lengths = norm(torch.randn(2, 4, 8, 16) * 100).norm(dim=-1)
        assert_close(lengths, torch.full((2, 4, 8), 4.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_zero_init_residual_starts_as_the_identity(placement):
    switches = dict(zero_init_residual=True, final_norm=False, norm_placement=placement)
    model = fresh(CrammedBertModel, **switches)
    assert torch.equal(model(IDS).last_hidden_state, model.embeddings(IDS))
    for layer in model.layers:
        assert layer.attention.qkv.weight.any() and layer.mlp.input.weight.any()


SPREADS = dict(normal=0.3, small=math.sqrt(2 / (5 * 64)), megatron=math.sqrt(1 / (3 * 64)))
SPREADS |= dict(wang=2 / (3 * 8), deepnorm=24**-0.25)


@pytest.mark.parametrize("scheme, std", SPREADS.items())
def test_fresh_matrices_have_the_spread_of_their_scheme(scheme, std):
    changes = dict(initializer_range=0.3, head_transform="dense", use_bias=True)
    for name, p in fresh(CrammedBertForMaskedLM, init=scheme, **changes).named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 0.05 * std, name
            assert p[0].any(), name  # the row of padding is like any other, as in the original
        elif name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name


def test_orthogonal_matrices():
    model = fresh(CrammedBertForMaskedLM, init="orthogonal")
    for w in (p for p in model.parameters() if p.ndim == 2):
        s = torch.linalg.svdvals(w.detach())
        assert_close(s, torch.full_like(s, math.sqrt(w.shape[0] / w.shape[1])), **CLOSE)


def test_dropout_is_for_training_alone():
    model = fresh(CrammedBertModel, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    assert torch.equal(model(IDS).last_hidden_state, model(IDS).last_hidden_state)
    model.train()
    assert not torch.equal(model(IDS).last_hidden_state, model(IDS).last_hidden_state)
