"""Every attention kernel answers the same question; what is hidden stays hidden; what cannot run
is refused before it starts."""

from dataclasses import replace

import pytest
import torch

from cramnb.model.attention import check_attention
from cramnb.model.mlm import build_model
from cramnb.core import CramError
from cramnb.recipe import preset

KERNELS = ["eager", "sdpa", "flex_attention"]


def loud(attention: str = "sdpa", arch: str = "tiny-crammed", **changes):
    "A small model whose layers all do something: fresh ones hardly speak."
    torch.manual_seed(0)
    model = build_model(
        replace(preset("arch", arch), num_hidden_layers=2, **changes),
        300,
        attn_implementation=attention,
    ).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def padded():
    torch.manual_seed(1)
    ids, mask = torch.randint(5, 300, (3, 20)), torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = 0
    return ids, mask


@pytest.mark.parametrize("kernel", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("arch", ["tiny", "tiny-crammed"])
def test_kernels_agree(kernel, arch):
    ids, mask = padded()
    with torch.compiler.set_stance("force_eager"), torch.no_grad():  # flex: without its compiler
        a, b = (loud(k, arch)(ids, attention_mask=mask).logits for k in ("eager", kernel))
    torch.testing.assert_close(a[mask.bool()], b[mask.bool()], atol=1e-5, rtol=1e-5)


def test_eager_and_sdpa_have_the_same_gradients():
    ids, mask = padded()
    mask[2] = 0  # a row of padding spoils none
    grads = []
    for kernel in ("eager", "sdpa"):
        model = loud(kernel)
        model(ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100)).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name, want in grads[0].items():
        assert want.isfinite().all()
        torch.testing.assert_close(grads[1][name], want, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["sdpa", "flex_attention", "flash_attention_2"])
def test_kernels_agree_on_a_gpu_in_bfloat16(kernel):
    try:
        check_attention(kernel, "cuda", "bfloat16")
    except CramError as e:
        pytest.skip(str(e))
    ids, mask = (t.cuda() for t in padded())
    results = []
    for name in ("eager", kernel):
        model = loud(name).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100))
        out.loss.backward()
        results.append((out.loss.item(), [p.grad.norm().item() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-2)
    assert results[0][1] == pytest.approx(results[1][1], rel=0.1, abs=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_under_the_mask_changes_nothing(kernel):
    ids, mask = padded()
    model, other = loud(kernel), torch.where(mask.bool(), ids, torch.randint(5, 300, ids.shape))
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        a, b = model(ids, attention_mask=mask).logits, model(other, attention_mask=mask).logits
    assert torch.equal(a[mask.bool()], b[mask.bool()])
    assert not torch.equal(a[~mask.bool()], b[~mask.bool()])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_of_ones_is_no_mask_and_a_row_of_padding_is_no_accident(kernel):
    ids, mask = padded()
    model, empty, close = loud(kernel), mask.clone(), dict(atol=1e-5, rtol=1e-5)
    empty[2] = 0
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        none, ones = model(ids).logits, model(ids, attention_mask=torch.ones_like(mask)).logits
        want, out = (model(ids, attention_mask=m).logits for m in (mask, empty))
    torch.testing.assert_close(ones, none, **close)
    torch.testing.assert_close(out[0], want[0], **close)
    assert out.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("position", ["rotary", "none"])
def test_documents_of_one_row_do_not_see_each_other(kernel, position):
    ids, _ = padded()
    documents = torch.tensor([0] * 7 + [1] * 13).expand(3, -1)
    other = torch.cat([torch.randint(5, 300, (3, 7)), ids[:, 7:]], 1)
    model = loud(kernel, position_embedding_type=position)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        both, changed = (model(x, document_ids=documents).logits for x in (ids, other))
        alone = model(ids[:, 7:]).logits
    assert torch.equal(both[:, 7:], changed[:, 7:])
    assert not torch.equal(both[:, :7], changed[:, :7])
    torch.testing.assert_close(both[:, 7:], alone, atol=1e-4, rtol=1e-4)  # distances stay


@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_of_three_and_four_axes(kernel):
    ids, mask = padded()
    model, pairs = loud(kernel), mask[:, None] * mask[:, :, None]  # (B, T, T)
    hidden = mask[:, None, None] == 0
    added = torch.zeros(3, 1, 20, 20).masked_fill(hidden, torch.finfo(torch.float32).min)
    one = dict(attention_mask=mask, document_ids=torch.zeros_like(mask))  # a single document
    masks = (pairs, pairs[:, None], pairs.bool()[:, None], added)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        want = model(ids, attention_mask=mask).logits[mask.bool()]
        for given in (one, *(dict(attention_mask=m) for m in masks)):
            got = model(ids, **given).logits[mask.bool()]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        with pytest.raises(CramError, match="document_ids"):
            model(ids, attention_mask=added, document_ids=mask)


def test_attention_dropout_is_for_training_alone():
    ids, _ = padded()
    for kernel in ("eager", "sdpa"):
        model = loud(kernel, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)
        model.config.attention_probs_dropout_prob = 0.0
        assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "given, answer",
    [
        (("flash_attention_2", "cpu", "bfloat16"), "not cpu and bfloat16. Or choose sdpa"),
        (("flash_attention_2", "cuda", "float32"), "float32. Or choose sdpa"),
        (("flex_attention", "cpu", "float32"), "no backward pass. Or choose sdpa"),
        (
            ("flex_attention", "cuda", "bfloat16", 0.1),
            "attention_probs_dropout_prob=0. Or choose sdpa",
        ),
    ],
)
def test_kernels_that_would_fail_in_the_first_batch(given, answer):
    with pytest.raises(CramError, match=answer):
        check_attention(*given)


def test_flash_attention_without_its_package(monkeypatch):
    import cramnb.model.attention

    monkeypatch.setattr(cramnb.model.attention, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(CramError, match=r"pip install cramnb\[flash\]"):
        check_attention("flash_attention_2", "cuda", "bfloat16")
    monkeypatch.setattr(cramnb.model.attention, "is_flash_attn_2_available", lambda: True)
    check_attention("flash_attention_2", "cuda", "bfloat16")


def test_flash_attention_takes_padding_and_nothing_more():
    from cramnb.model.encoder import CrammedBertConfig, mask_for

    config = CrammedBertConfig()
    config._attn_implementation = "flash_attention_2"
    x, mask = torch.zeros(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert mask_for(config, x, mask).shape == (2, 4)  # the lengths: transformers unpads the rows
    with pytest.raises(CramError, match="choose attn_implementation=sdpa"):
        mask_for(config, x, mask, document_ids=mask)
