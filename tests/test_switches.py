"""Every switch of the architecture does what its name says, and a value that is not there is
refused."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from cramnb.model.attention import Attention
from cramnb.model.encoder import (
    ACTIVATIONS,
    CrammedBertConfig,
    CrammedBertModel,
    Layer,
    MLP,
    Positions,
    make_norm,
    sinusoid,
)
from cramnb.model.mlm import CrammedBertForMaskedLM, HeadTransform
from cramnb.core import CramError
from cramnb.options import GATED, Arch

SMALL = dict(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=32,
)


def small(**changes):
    return CrammedBertConfig(**(SMALL | changes))


def fresh(cls, seed=0, **changes):
    torch.manual_seed(seed)
    return cls(small(**changes)).eval()


def loud(cls, **changes):
    model = fresh(cls, **changes)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def stream(seed=1):
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def ids(seed=0):
    return torch.randint(5, 300, (2, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "field",
    [f for f in dataclasses.fields(Arch) if f.metadata.get("allowed") and f.name != "model_type"],
    ids=lambda f: f.name,
)
def test_every_named_value_builds_and_no_other(field):
    for value in field.metadata["allowed"]:
        model = loud(CrammedBertForMaskedLM, **{field.name: value})
        out = model(ids(), labels=ids())
        out.loss.backward()
        assert out.logits.isfinite().all() and all(
            p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
        )
    with pytest.raises(
        CramError,
        match=f"{field.name}=nonsense is not supported: choose from "
        f"{', '.join(field.metadata['allowed'])}",
    ):
        small(**{field.name: "nonsense"})


def test_the_sinusoid_is_its_formula():
    table = sinusoid(32, 64, torch.device("cpu"))
    for p, i in ((0, 0), (1, 0), (31, 63), (7, 20), (13, 33)):
        angle = p / 10000 ** (i // 2 * 2 / 64)
        assert table[p, i].item() == pytest.approx(
            math.cos(angle) if i % 2 else math.sin(angle), abs=1e-5
        )


def test_positions_add_what_they_should():
    x = stream()
    table = sinusoid(8, 64, torch.device("cpu"))
    scaled, plain, learned = (
        Positions(small(position_embedding_type=kind))
        for kind in ("scaled-sinusoidal", "sinusoidal", "learned")
    )
    assert (
        scaled.scale.item() == pytest.approx(64**-0.5)
        and scaled.scale.requires_grad
        and not list(plain.parameters())
    )
    scaled.scale.data.fill_(0.37)
    torch.testing.assert_close(scaled(x), x + 0.37 * table)
    torch.testing.assert_close(plain(x), x + table)
    assert learned.table.weight.shape == (32, 64) and learned.table.weight.requires_grad
    torch.testing.assert_close(learned(x), x + learned.table.weight[:8])
    for kind in ("rotary", "none"):
        assert Positions(small(position_embedding_type=kind))(x) is x


@pytest.mark.parametrize("kind", ["none", "rotary", "scaled-sinusoidal", "sinusoidal", "learned"])
def test_only_without_positions_is_a_text_a_bag(kind):
    model, order = (
        loud(CrammedBertModel, position_embedding_type=kind),
        torch.tensor([3, 1, 0, 7, 5, 6, 4, 2]),
    )
    moved, there = (
        model(ids()[:, order]).last_hidden_state,
        model(ids()).last_hidden_state[:, order],
    )
    assert torch.allclose(moved, there, atol=1e-4) == (kind == "none")


def test_rotary_models_see_distances_and_no_places():
    """The same five tokens, further to the right in a row where nobody else is visible: the same
    vectors. A table would tell."""
    documents = torch.tensor([[0] * 3 + [1] * 5])
    for kind, same in (("rotary", True), ("learned", False), ("scaled-sinusoidal", False)):
        model = loud(CrammedBertModel, position_embedding_type=kind)
        right, left = (
            model(ids()[:1], document_ids=documents).last_hidden_state[:, 3:],
            model(ids()[:1, 3:]).last_hidden_state,
        )
        assert torch.allclose(right, left, atol=1e-4) == same
        swapped = model(ids()[:1, [4, 3, 5, 6, 7]]).last_hidden_state
        assert not torch.allclose(
            swapped[:, [1, 0, 2, 3, 4]], left, atol=1e-2
        )  # but order it does see


def test_norms_are_their_formulas():
    x, eps = stream(), 0.5
    layer, rms = make_norm(small(norm_eps=eps)), make_norm(small(norm_type="RMSNorm", norm_eps=eps))
    layer.weight.data, layer.bias.data, rms.weight.data = (
        torch.randn(64),
        torch.randn(64),
        torch.randn(64),
    )
    torch.testing.assert_close(
        layer(x),
        (x - x.mean(-1, keepdim=True))
        / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
        * layer.weight
        + layer.bias,
    )
    torch.testing.assert_close(
        rms(x), x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * rms.weight
    )
    assert [n for n, _ in rms.named_parameters()] == ["weight"]


def test_activations_are_their_formulas():
    a, g = torch.randn(5, 8).chunk(2, -1)
    exact = g * 0.5 * (1 + torch.erf(g / math.sqrt(2)))
    bent = dict(
        gelu=exact,
        relu2=torch.where(g > 0, g * g, 0.0),
        geglu=exact * a,
        swiglu=g * torch.sigmoid(g) * a,
    )
    for name, want in bent.items():
        mlp = MLP(small(hidden_act=name))
        mlp.input, mlp.output = torch.nn.Identity(), torch.nn.Identity()
        torch.testing.assert_close(mlp(torch.cat([a, g], -1) if name in GATED else g), want)
    for name in ACTIVATIONS:
        assert MLP(small(hidden_act=name)).output.in_features == (128 if name in GATED else 256)


def test_biases_are_where_they_are_asked_for():
    def biases(**changes):
        return {
            n.removeprefix("layers.0.")
            for n, _ in fresh(CrammedBertModel, **changes).named_parameters()
            if n.startswith("layers.0") and n.endswith("bias") and "norm" not in n
        }

    assert biases() == set()
    assert biases(qkv_bias=True) == {"attention.qkv.bias"}
    assert biases(use_bias=True) == {"attention.output.bias", "mlp.input.bias", "mlp.output.bias"}
    assert fresh(CrammedBertForMaskedLM).decoder.bias is None and fresh(
        CrammedBertForMaskedLM, decoder_bias=True
    ).decoder.bias.shape == (300,)


def test_where_the_norms_stand():
    x = stream()
    blocks = {"pre": [], "post": []}
    for where, seen in blocks.items():
        layer = fresh(Layer, norm_placement=where, initializer_range=0.5)
        layer.attention.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        out = layer(x)
        if where == "post":
            (
                torch.testing.assert_close(out.mean(-1), torch.zeros(2, 8), atol=1e-5, rtol=0),
                torch.testing.assert_close(
                    out.var(-1, unbiased=False), torch.ones(2, 8), atol=1e-3, rtol=0
                ),
            )
        else:
            assert out.var(-1).mean() > 5  # the stream itself is left as large as it was
    torch.testing.assert_close(blocks["post"][0], x)
    torch.testing.assert_close(blocks["pre"][0], F.layer_norm(x, (64,)), atol=1e-4, rtol=1e-4)
    sandwich = fresh(Layer, norm_placement="sandwich")
    for block in (sandwich.attention.output, sandwich.mlp.output):
        block.weight.data *= 1000
    added = sandwich(x) - x
    assert added.square().mean() < 4.5  # two blocks of size one each, whatever their weights
    assert sum("out_norm" in n for n, _ in sandwich.named_parameters()) == 4


def test_deepnorm_carries_the_stream():
    layer, x = fresh(Layer, norm_placement="post", deepnorm=True), stream()
    carry = (2 * 3) ** 0.25
    for block in (layer.attention.output, layer.mlp.output):
        block.weight.data.zero_()
    layer.mlp_norm = torch.nn.Identity()
    torch.testing.assert_close(
        layer(x), F.layer_norm(x * carry, (64,)) * carry, atol=1e-4, rtol=1e-4
    )


def test_embedding_and_final_norm():
    with_norms = fresh(CrammedBertModel)(ids(), output_hidden_states=True)
    for h in (with_norms.hidden_states[0], with_norms.last_hidden_state):
        torch.testing.assert_close(h.square().mean(-1), torch.ones(2, 8), atol=1e-2, rtol=0)
    without = fresh(CrammedBertModel, embedding_norm=False, final_norm=False)(
        ids(), output_hidden_states=True
    )
    for h in (without.hidden_states[0], without.last_hidden_state):
        assert h.square().mean() < 0.5


def test_head_transforms():
    x = stream()
    none, linear, dense = (
        HeadTransform(small(head_transform=kind, use_bias=True))
        for kind in ("none", "linear", "dense")
    )
    assert none(x) is x
    torch.testing.assert_close(linear(x), x @ linear.dense.weight.T + linear.dense.bias)
    torch.testing.assert_close(
        dense(x), F.layer_norm(F.gelu(dense.dense(x)), (64,)), atol=1e-5, rtol=1e-5
    )
    assert (
        HeadTransform(small(head_transform="linear")).dense.bias is None
    )  # biases follow use_bias, as in the original


def test_query_and_key_are_normalised_per_head():
    module = Attention(small(qk_norm=True))
    assert module.query_norm.weight.shape == module.key_norm.weight.shape == (16,)
    q = module.query_norm(torch.randn(2, 4, 8, 16) * 100)
    torch.testing.assert_close(q.norm(dim=-1), torch.full((2, 4, 8), 4.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_zero_init_residual_starts_as_the_identity(placement):
    model = fresh(
        CrammedBertModel, zero_init_residual=True, final_norm=False, norm_placement=placement
    )
    assert torch.equal(model(ids()).last_hidden_state, model.embeddings(ids()))
    assert not any(
        layer.attention.output.weight.any() or layer.mlp.output.weight.any()
        for layer in model.layers
    )
    assert all(
        layer.attention.qkv.weight.any() and layer.mlp.input.weight.any() for layer in model.layers
    )


@pytest.mark.parametrize(
    "scheme, std",
    {
        "normal": 0.02,
        "small": math.sqrt(2 / (5 * 64)),
        "megatron": math.sqrt(1 / (3 * 64)),
        "wang": 2 / (3 * 8),
        "deepnorm": 24**-0.25,
    }.items(),
)
def test_fresh_matrices_have_the_spread_of_their_scheme(scheme, std):
    model = fresh(CrammedBertForMaskedLM, init=scheme, head_transform="dense", use_bias=True)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            assert (
                p.std().item() == pytest.approx(std, rel=0.05) and abs(p.mean().item()) < 0.05 * std
            ), name
        elif name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name


def test_normal_takes_its_range_and_the_row_of_padding_is_like_any_other():
    model = fresh(CrammedBertForMaskedLM, initializer_range=0.3)
    assert model.model.layers[0].mlp.input.weight.std().item() == pytest.approx(0.3, rel=0.05)
    table = model.model.embeddings.word_embeddings.weight
    assert table[0].std().item() == pytest.approx(
        0.3, rel=0.3
    )  # as in the original, where tying overwrites the zeros


def test_orthogonal_matrices():
    model = fresh(CrammedBertForMaskedLM, init="orthogonal")
    layer = model.model.layers[0]
    for w in (
        layer.attention.qkv.weight,
        layer.mlp.input.weight,
        layer.attention.output.weight,
        layer.mlp.output.weight,
        model.decoder.weight,
    ):
        singular = torch.linalg.svdvals(w)
        torch.testing.assert_close(
            singular,
            torch.full_like(singular, math.sqrt(w.shape[0] / w.shape[1])),
            atol=1e-4,
            rtol=1e-4,
        )


def test_dropout_is_for_training_alone():
    model = fresh(CrammedBertModel, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    assert torch.equal(model(ids()).last_hidden_state, model(ids()).last_hidden_state)
    model.train()
    assert not torch.equal(model(ids()).last_hidden_state, model(ids()).last_hidden_state)


def test_rope_theta_turns_slower():
    a, b = (
        loud(CrammedBertModel, position_embedding_type="rotary", rope_theta=theta)
        for theta in (100.0, 1e6)
    )
    assert not torch.allclose(a(ids()).last_hidden_state, b(ids()).last_hidden_state, atol=1e-3)
