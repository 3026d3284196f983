"""The model equals the original's, number for number, and behaves as transformers expects."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import beside, same_numbers
import toy
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cramnb  # noqa: F401  registers the Auto classes
from cramnb.model.encoder import CrammedBertConfig
from cramnb.model.mlm import (
    CrammedBertForMaskedLM,
    CrammedBertForSequenceClassification,
    build_model,
    count_parameters,
)
from cramnb.core import CramError
from cramnb.recipe import compose, preset

OURS = {
    "encoder.embedding.word_embedding": "model.embeddings.word_embeddings",
    "encoder.embedding.pos_embedding.scale_factor": "model.embeddings.position.scale",
    "encoder.embedding.norm": "model.embeddings.norm",
    "encoder.": "model.",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "attn.self_attention.query_key_value": "attention.qkv",
    "attn.dense": "attention.output",
    "ffn.dense_in": "mlp.input",
    "ffn.dense_out": "mlp.output",
    "pooler.dense": "classifier.dense",
}


def ours(name: str) -> str:
    if name.startswith("head."):
        return name.replace("head", "classifier.out")
    for theirs, mine in OURS.items():
        name = name.replace(theirs, mine)
    return name


def load(model, *tensors):
    for given in tensors:
        for name, value in given.items():
            if not name.startswith("state_dict.") or "norm_factor" in name:
                continue
            if "query_key_value" in name:
                value = (
                    value.view(4, 3, 32, 128).permute(1, 0, 2, 3).reshape(384, 128)
                )  # interleaved per head -> q | k | v
            model.get_parameter(ours(name.removeprefix("state_dict."))).data.copy_(value)
    return model.eval()


def small(**changes):
    return CrammedBertConfig(
        **dict(
            vocab_size=1024,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
        )
        | changes
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masked_lm_equals_the_original(attention):
    folder = beside("fixtures")
    want, facts = (
        load_file(folder / "crammed_bert_mlm.safetensors"),
        json.loads((folder / "crammed_bert_mlm.json").read_text()),
    )
    model = load(CrammedBertForMaskedLM(small(attn_implementation=attention)), want)
    out = model(want["input_ids"], labels=want["labels"], output_hidden_states=True)
    same_numbers(model, out, want, facts)
    sparse = model(
        want["input_ids"],
        labels=want["labels"],
        masked_positions=want["masked_positions"].view(8, 32) % 128,
    ).loss
    assert sparse.item() == pytest.approx(out.loss.item(), rel=1e-5)
    sparse.backward()
    for name, norm in facts["grad_norms"].items():
        assert model.get_parameter(ours(name)).grad.norm().item() == pytest.approx(
            norm, rel=1e-3
        ), name
    rows = model.model.embeddings.word_embeddings.weight.grad
    for row in (0, 4):
        torch.testing.assert_close(
            rows[row], want[f"grad_word_embedding_row{row}"], atol=1e-5, rtol=1e-3
        )


def test_classifier_equals_the_original():
    folder = beside("fixtures")
    body, want = (
        load_file(folder / "crammed_bert_mlm.safetensors"),
        load_file(folder / "crammed_bert_cls3.safetensors"),
    )
    facts = json.loads((folder / "crammed_bert_cls3.json").read_text())
    model = load(
        CrammedBertForSequenceClassification(
            small(num_labels=3, classifier_hidden_size=256, classifier_pooling="mean-with-padding")
        ),
        body,
        want,
    )
    torch.testing.assert_close(
        model(want["input_ids"]).logits, want["logits_no_mask"], atol=1e-4, rtol=1e-4
    )
    out = model(
        want["input_ids_padded"], attention_mask=want["attention_mask"], labels=want["labels"]
    )
    torch.testing.assert_close(out.logits, want["logits_masked"], atol=1e-4, rtol=1e-4)
    assert out.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    out.loss.backward()
    for name, norm in facts["grad_norms"].items():
        assert model.get_parameter(ours(name)).grad.norm().item() == pytest.approx(
            norm, rel=1e-3
        ), name


COUNTS = {
    "crammed-bert": 119_589_889,
    "crammed-bert-simple": 110_945_024,
    "crammed-large-izsak": 337_081_344,
    "v1/crammed-bamboo": 83_437_057,
    "hf-bert-base": 111_241_472,
    "hf-bert-tiny": 4_706_432,
    "v1/bert-original": 111_239_936,
    "v1/bert-base": 110_945_024,
    "v1/bert-c2": 110_846_721,
    "v1/bert-c3": 110_812_417,
    "v1/bert-c4": 96_574_465,
    "v1/bert-c5": 120_179_713,
    "v1/bert-i4": 150_513_921,
}


@pytest.mark.parametrize("name, parameters", COUNTS.items())
def test_parameter_counts_of_the_original(name, parameters):
    with torch.device("meta"):
        assert count_parameters(build_model(preset("arch", name), 32_768)) == parameters


@pytest.mark.parametrize("labels, parameters", [(2, 120_379_395), (3, 120_380_420)])
def test_parameter_counts_of_classifiers(labels, parameters):
    with torch.device("meta"):
        assert (
            count_parameters(
                CrammedBertForSequenceClassification(CrammedBertConfig(num_labels=labels))
            )
            == parameters
        )


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
    from cramnb.text.masking import mask_tokens

    g = torch.Generator().manual_seed(1)
    return mask_tokens(
        torch.randint(5, 300, (rows, 32), generator=g),
        mlm_probability=0.25,
        mask_token_id=4,
        vocab_size=300,
        generator=g,
    )


def ways(model, b):
    "Loss and gradients, dense, sparse, and sparse in chunks of rows."
    for positions, chunk in (
        (None, 0),
        (b.positions, 0),
        (None, 7),
        (b.positions, 1),
        (b.positions, 1000),
    ):
        model.zero_grad()
        model.loss_chunk_size = chunk
        out = model(b.input_ids, labels=b.labels, masked_positions=positions)
        out.loss.backward()
        yield chunk, out, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("decoder_bias", [False, True])
def test_dense_sparse_and_chunked_losses_are_one(decoder_bias):
    torch.manual_seed(0)
    arch = replace(
        preset("arch", "tiny-crammed"),
        decoder_bias=decoder_bias,
        num_hidden_layers=2,
        head_transform="linear",
    )
    model, b = build_model(arch, 300).eval(), batch()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    (_, want, grads), *others = ways(model, b)
    for chunk, got, gradient in others:
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
        assert (got.logits is None) == bool(chunk)
        for a, g in zip(grads, gradient):
            torch.testing.assert_close(a, g, atol=1e-6, rtol=1e-4)
    assert model(b.input_ids).logits.shape == (
        4,
        32,
        300,
    )  # without labels there is nothing to save


def test_chunks_agree_with_torchs_own_function():
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has none")
    from cramnb.model.mlm import linear_cross_entropy

    torch.manual_seed(0)
    hidden, decoder, labels = (
        torch.randn(10, 8),
        torch.nn.Linear(8, 30),
        torch.tensor([3, -100, 4, 0, 29, 7, -100, -100, 1, 2]),
    )
    want = torch.nn.functional.linear_cross_entropy(
        hidden, decoder.weight, labels, linear_bias=decoder.bias
    )
    for chunk in (0, 1, 3, 100):
        torch.testing.assert_close(linear_cross_entropy(hidden, decoder, labels, chunk)[0], want)


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
    from cramnb.model.mlm import linear_cross_entropy

    torch.manual_seed(0)
    hidden, decoder, labels = (
        torch.randn(1000, 16, requires_grad=True),
        torch.nn.Linear(16, 300),
        torch.randint(0, 300, (1000,)),
    )
    sizes = {}
    for chunk in (0, 10):
        with LargestTensor() as seen:
            linear_cross_entropy(hidden, decoder, labels, chunk)[0].backward()
        sizes[chunk] = seen.largest
    assert sizes == {0: 1000 * 300, 10: 1000 * 16}  # all logits; the hidden vectors alone


@pytest.mark.parametrize("arch, chunk", [("tiny", 8), ("tiny-crammed", 0)])
def test_sparse_prediction_compiles_as_one_graph(arch, chunk):
    model, b = build_model(preset("arch", arch), 300, loss_chunk_size=chunk).eval(), batch()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda b: model(b.input_ids, labels=b.labels, masked_positions=b.positions).loss,
        backend=backend,
        fullgraph=True,
        dynamic=False,
    )
    for b in (batch(), batch()):
        torch.testing.assert_close(
            compiled(b), model(b.input_ids, labels=b.labels, masked_positions=b.positions).loss
        )
    assert len(graphs) == 1 and not {"item", "nonzero", "tolist"} & {
        str(node.target) for node in graphs[0].graph.nodes
    }
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


def test_the_chunk_size_of_a_recipe_reaches_the_model():
    recipe = compose(["impl.loss_chunk_size=64"])
    assert (
        build_model(recipe.arch, 300, loss_chunk_size=recipe.impl.loss_chunk_size).loss_chunk_size
        == 64
    )
    with pytest.raises(CramError, match="loss_chunk_size=64 needs arch.model_type=crammed_bert"):
        compose(["arch=hf-bert-tiny", "impl.loss_chunk_size=64"])
    with pytest.raises(CramError, match="loss_chunk_size=-1 is not possible"):
        compose(["impl.loss_chunk_size=-1"])


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
