"""The model equals the original's, number for number, and behaves as transformers expects."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import beside
import toy
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cramnb.model.mlm import build_model, count_parameters, linear_cross_entropy
from cramnb.model.original import from_original, sources
from cramnb.text.masking import mask_tokens
from cramnb.core import CramError
from cramnb.recipe import compose, preset


@pytest.mark.parametrize("kind", ["mlm", "cls3"])
def test_loss_and_every_gradient_are_the_originals(kind):
    "Larger fixtures lie beside some checkouts; tests/test_parity.py has one of the project."
    want = {}
    for name in ("mlm", kind):
        want |= load_file(beside("fixtures") / f"crammed_bert_{name}.safetensors")
    facts = json.loads((beside("fixtures") / f"crammed_bert_{kind}.json").read_text())
    state = {k[11:]: v for k, v in want.items() if k.startswith("state_dict.")}
    model = from_original(facts["arch_config"], state)
    padded = dict(attention_mask=want["attention_mask"]) if kind == "cls3" else {}
    ids = want["input_ids_padded"] if padded else want["input_ids"]
    loss = model(ids, labels=want["labels"], **padded).loss
    assert loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    loss.backward()
    for name, p in model.named_parameters():
        (theirs,) = sources(name, model.config, "self-attention", {})
        assert p.grad.norm().item() == pytest.approx(facts["grad_norms"][theirs], rel=1e-3), name


COUNTS = {
    "crammed-bert": 119_589_889,
    "crammed-large-izsak": 337_081_344,
    "hf-bert-base": 111_241_472,
    "v1/bert-original": 111_239_936,
    "v1/bert-c5": 120_179_713,
}


@pytest.mark.parametrize("name, parameters", COUNTS.items())
def test_parameter_counts_of_the_original(name, parameters):
    with torch.device("meta"):
        assert count_parameters(build_model(preset("arch", name), 32_768)) == parameters


@pytest.mark.parametrize("arch", ["tiny", "tiny-crammed"])
def test_padding_is_never_seen(arch):
    torch.manual_seed(0)
    model = build_model(preset("arch", arch), 300).eval()
    ids, mask = torch.randint(5, 300, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    other = torch.where(mask.bool(), ids, torch.randint(5, 300, (2, 20)))
    a, b = model(ids, attention_mask=mask).logits, model(other, attention_mask=mask).logits
    assert torch.equal(a[mask.bool()], b[mask.bool()])
    torch.testing.assert_close(model(ids[1:, :12]).logits[0], a[1, :12], atol=1e-5, rtol=1e-5)


def batch(rows=4):
    "Random rows of the tiny vocabulary, masked."
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 300, (rows, 32), generator=g)
    given = dict(mlm_probability=0.25, mask_token_id=4, vocab_size=300, generator=g)
    return mask_tokens(rows, **given)


def ways(model, b):
    "Loss and gradients, dense, sparse, and sparse in chunks of rows."
    for positions, chunk in ((None, 0), (b.positions, 0), (None, 7), (b.positions, 1000)):
        model.zero_grad()
        model.loss_chunk_size = chunk
        out = model(b.input_ids, labels=b.labels, masked_positions=positions)
        out.loss.backward()
        yield chunk, out, [p.grad.clone() for p in model.parameters()]


def test_dense_sparse_and_chunked_losses_are_one():
    torch.manual_seed(0)
    changes = dict(decoder_bias=True, num_hidden_layers=2, head_transform="linear")
    model, b = build_model(replace(preset("arch", "tiny-crammed"), **changes), 300).eval(), batch()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    (_, want, grads), *others = ways(model, b)
    for chunk, got, gradient in others:
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
        assert (got.logits is None) == bool(chunk)
        for a, g in zip(grads, gradient):
            torch.testing.assert_close(a, g, atol=1e-6, rtol=1e-4)
    assert model(b.input_ids).logits.shape == (4, 32, 300)  # no labels, nothing to save


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes", [{}, dict(norm_placement="sandwich"), dict(norm_placement="post", deepnorm=True)]
)
def test_what_nobody_asks_for_is_left_out_and_changes_nothing(kernel, changes):
    torch.manual_seed(0)
    model = build_model(replace(preset("arch", "tiny"), **changes), 300, kernel).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    seen, b = [], batch()
    model.model.layers[-1].mlp.register_forward_hook(lambda m, x, y: seen.append(y.shape[1]))
    padded, two = torch.ones_like(b.input_ids), (torch.arange(32) > 10).long().expand(4, -1)
    padded[:, 28:] = 0
    for given in ({}, dict(attention_mask=padded), dict(document_ids=two)):
        whole = model(b.input_ids, **given).logits
        few = model(b.input_ids, masked_positions=b.positions, **given).logits
        wanted = whole.gather(1, b.positions[..., None].expand(-1, -1, 300))
        torch.testing.assert_close(few, wanted, atol=1e-5, rtol=1e-5)
    assert seen[:2] == [32, b.positions.shape[1]]


def test_logits_of_16_bits_in_chunks_lose_nothing_that_32_bits_have():
    torch.manual_seed(0)
    decoder, labels = torch.nn.Linear(16, 300), torch.randint(0, 300, (1000,))
    labels[::3] = -100
    found = []
    for chunk, few in ((0, False), (64, False), (0, True), (64, True)):
        hidden = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1)) * 4
        hidden.requires_grad_()
        decoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=few):
            loss, _ = linear_cross_entropy(hidden, decoder, labels, chunk)
        loss.backward()
        found.append((loss.item(), hidden.grad, decoder.weight.grad.clone()))
    (exact, *want), (chunked, *same), (_, *plain), (short, *got) = found
    assert chunked == pytest.approx(exact, rel=1e-5) and short == pytest.approx(exact, rel=2e-3)
    for w, s, p, g in zip(want, same, plain, got):
        torch.testing.assert_close(s, w, atol=1e-6, rtol=1e-4)
        assert (g - w).norm() < 1.2 * (p - w).norm() + 1e-6  # no worse than torch's own


def test_an_answer_that_is_out_of_reach_costs_much_and_breaks_nothing():
    decoder = torch.nn.Linear(1, 2, bias=False)
    decoder.weight.data = torch.tensor([[200.0], [-200.0]])
    hidden = torch.ones(3, 1, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, decoder, torch.tensor([1, 0, -100]), 2)
    loss.backward()
    assert 40 < loss.item() < 201 and hidden.grad.isfinite().all() and hidden.grad[0] == 200


class LargestTensor(TorchDispatchMode):
    "Remembers the largest floating-point tensor that any operation makes."

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel())
        return out


def test_chunks_never_hold_all_logits():
    hidden, decoder = torch.randn(1000, 16, requires_grad=True), torch.nn.Linear(16, 300)
    sizes = {}
    for chunk in (0, 10):
        with LargestTensor() as seen:
            labels = torch.randint(0, 300, (1000,))
            linear_cross_entropy(hidden, decoder, labels, chunk)[0].backward()
        sizes[chunk] = seen.largest
    assert sizes == {0: 1000 * 300, 10: 1000 * 16}  # all logits; the hidden vectors alone


def test_sparse_prediction_compiles_as_one_graph():
    model, graphs = build_model("tiny", 300, loss_chunk_size=8).eval(), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    def loss(b):
        return model(b.input_ids, labels=b.labels, masked_positions=b.positions).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    for b in (batch(), batch()):
        torch.testing.assert_close(compiled(b), loss(b))
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("arch, chunk", [("tiny-crammed", 8), ("tiny", 0)])
def test_compiled_gradients_are_the_same_with_chunks_documents_and_neighbours(arch, chunk):
    b, documents = batch(), (torch.arange(32) > 10).long().expand(4, -1)
    sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64)
    model = build_model(replace(preset("arch", arch), **sizes), 300, loss_chunk_size=chunk).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    given = dict(labels=b.labels, masked_positions=b.positions)
    given |= {} if chunk else dict(document_ids=documents)

    def loss(ids):
        return model(ids, **given).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    want, got = (
        torch.autograd.grad(f(b.input_ids), list(model.parameters())) for f in (loss, compiled)
    )
    for w, g in zip(want, got):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("chunk", [0, 8])
def test_no_value_is_read_back_from_the_device(chunk):
    "On the meta device there are no values: whatever asks for one fails."
    b = batch()
    with torch.device("meta"):
        model = build_model(preset("arch", "tiny"), 300, loss_chunk_size=chunk)
    loss = model(
        b.input_ids.to("meta"), labels=b.labels.to("meta"), masked_positions=b.positions.to("meta")
    ).loss
    loss.backward()
    assert loss.shape == () and all(p.grad is not None for p in model.parameters())


def test_the_first_version_of_the_name_is_understood():
    assert compose(["arch=v1/bert-c5"]).arch == compose(["arch=bert-c5"]).arch
    with pytest.raises(CramError, match="Did you mean 'bert-c5'"):
        compose(["arch=v1/bert-c55"])


@pytest.mark.parametrize("kind", ["padding", "documents", "pairs", "added"])
def test_neighbours_do_not_reach_over_a_border(kind):
    """With every kind of mask a token is worth the same, whatever stands beyond the border."""
    torch.manual_seed(0)
    model = build_model(replace(toy.ARCH, neighbours=True), 100).eval().requires_grad_(False)
    model.model.embeddings.neighbours.weight.normal_()
    ids = torch.randint(5, 100, (2, 12))
    other = torch.cat([ids[:, :8], torch.randint(5, 100, (2, 4))], dim=1)
    first = torch.arange(12) < 8
    pairs = (first[:, None] == first[None]).expand(2, 12, 12)
    given = dict(
        padding=dict(attention_mask=first.long().expand(2, 12)),
        documents=dict(document_ids=first.long().expand(2, 12)),
        pairs=dict(attention_mask=pairs),
        added=dict(attention_mask=torch.where(pairs, 0.0, -torch.inf)[:, None]),
    )[kind]
    a, b = (model(x, **given).logits[:, :8] for x in (ids, other))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, model(ids[:, :8]).logits, atol=1e-5, rtol=1e-4)
    assert (model(ids).logits[:, :8] - a).abs().max() > 1e-3
