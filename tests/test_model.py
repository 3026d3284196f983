"""The model equals the original's, number for number, and behaves as transformers expects."""
import json

import pytest
import torch
from conftest import beside
from safetensors import safe_open
from safetensors.torch import load_file

import cramnb  # noqa: F401  registers the Auto classes
from cramnb.encoder import CrammedBertConfig
from cramnb.mlm import CrammedBertForMaskedLM, CrammedBertForSequenceClassification, build_model, count_parameters
from cramnb.recipe import CramError, preset

OURS = {"encoder.embedding.word_embedding": "model.embeddings.word_embeddings", "encoder.embedding.pos_embedding.scale_factor": "model.embeddings.position.scale",
        "encoder.embedding.norm": "model.embeddings.norm", "encoder.": "model.", "norm1": "attention_norm", "norm2": "mlp_norm", "attn.self_attention.query_key_value": "attention.qkv",
        "attn.dense": "attention.output", "ffn.dense_in": "mlp.input", "ffn.dense_out": "mlp.output", "pooler.dense": "classifier.dense"}


def ours(name: str) -> str:
    if name.startswith("head."): return name.replace("head", "classifier.out")
    for theirs, mine in OURS.items(): name = name.replace(theirs, mine)
    return name


def load(model, *tensors):
    for given in tensors:
        for name, value in given.items():
            if not name.startswith("state_dict.") or "norm_factor" in name: continue
            if "query_key_value" in name: value = value.view(4, 3, 32, 128).permute(1, 0, 2, 3).reshape(384, 128)   # interleaved per head -> q | k | v
            model.get_parameter(ours(name.removeprefix("state_dict."))).data.copy_(value)
    return model.eval()


def small(**changes): return CrammedBertConfig(**dict(vocab_size=1024, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512) | changes)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masked_lm_equals_the_original(attention):
    folder = beside("fixtures")
    want, facts = load_file(folder/"crammed_bert_mlm.safetensors"), json.loads((folder/"crammed_bert_mlm.json").read_text())
    model = load(CrammedBertForMaskedLM(small(attn_implementation=attention)), want)
    out = model(want["input_ids"], labels=want["labels"], output_hidden_states=True)
    torch.testing.assert_close(model.model(want["input_ids"]).last_hidden_state, want["last_hidden_state"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits.flatten(0, 1)[want["masked_positions"]], want["masked_logits"], atol=1e-4, rtol=1e-4)
    assert out.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    sparse = model(want["input_ids"], labels=want["labels"], masked_positions=want["masked_positions"].view(8, 32) % 128).loss
    assert abs(sparse.item() - out.loss.item()) < 1e-6
    sparse.backward()
    for name, norm in facts["grad_norms"].items(): assert model.get_parameter(ours(name)).grad.norm().item() == pytest.approx(norm, rel=1e-3), name
    rows = model.model.embeddings.word_embeddings.weight.grad
    for row in (0, 4): torch.testing.assert_close(rows[row], want[f"grad_word_embedding_row{row}"], atol=1e-5, rtol=1e-3)


def test_classifier_equals_the_original():
    folder = beside("fixtures")
    body, want = load_file(folder/"crammed_bert_mlm.safetensors"), load_file(folder/"crammed_bert_cls3.safetensors")
    facts = json.loads((folder/"crammed_bert_cls3.json").read_text())
    model = load(CrammedBertForSequenceClassification(small(num_labels=3, classifier_hidden_size=256, classifier_pooling="mean-with-padding")), body, want)
    torch.testing.assert_close(model(want["input_ids"]).logits, want["logits_no_mask"], atol=1e-4, rtol=1e-4)
    out = model(want["input_ids_padded"], attention_mask=want["attention_mask"], labels=want["labels"])
    torch.testing.assert_close(out.logits, want["logits_masked"], atol=1e-4, rtol=1e-4)
    assert out.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    out.loss.backward()
    for name, norm in facts["grad_norms"].items(): assert model.get_parameter(ours(name)).grad.norm().item() == pytest.approx(norm, rel=1e-3), name


COUNTS = {"crammed-bert": 119_589_889, "crammed-bert-simple": 110_945_024, "crammed-large-izsak": 337_081_344, "v1/crammed-bamboo": 83_437_057, "hf-bert-base": 111_241_472,
          "hf-bert-tiny": 4_706_432, "v1/bert-original": 111_239_936, "v1/bert-base": 110_945_024, "v1/bert-c2": 110_846_721, "v1/bert-c3": 110_812_417, "v1/bert-c4": 96_574_465,
          "v1/bert-c5": 120_179_713, "v1/bert-i4": 150_513_921}


@pytest.mark.parametrize("name, parameters", COUNTS.items())
def test_parameter_counts_of_the_original(name, parameters):
    with torch.device("meta"): assert count_parameters(build_model(preset("arch", name), 32_768)) == parameters


@pytest.mark.parametrize("labels, parameters", [(2, 120_379_395), (3, 120_380_420)])
def test_parameter_counts_of_classifiers(labels, parameters):
    with torch.device("meta"): assert count_parameters(CrammedBertForSequenceClassification(CrammedBertConfig(num_labels=labels))) == parameters


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


def test_sequences_beyond_the_position_table():
    ids = torch.randint(5, 300, (1, 129))
    with pytest.raises(CramError, match="129 tokens.*max_position_embeddings=128"): build_model(preset("arch", "tiny-crammed"), 300)(ids)
    assert build_model(preset("arch", "tiny"), 300)(ids).logits.shape == (1, 129, 300)


def test_save_and_load_keep_every_bit_and_tie_once(tmp_path):
    from transformers import AutoModelForMaskedLM
    model = build_model(preset("arch", "tiny"), 300)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    with safe_open(tmp_path/"model.safetensors", "pt") as f: assert sum("word_embeddings" in k or "decoder" in k for k in f.keys()) == 1
    assert again.decoder.weight is again.model.embeddings.word_embeddings.weight


def test_what_transformers_users_expect():
    model = build_model(preset("arch", "tiny"), 300, attn_implementation="eager").eval()
    ids = torch.randint(5, 300, (2, 16))
    out = model(ids, token_type_ids=torch.zeros_like(ids), output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 4 and out.attentions[0].shape == (2, 4, 16, 16) and len(out.hidden_states) == 5
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 16))
    model.gradient_checkpointing_enable()
    model.train()(ids, labels=ids).loss.backward()
    model.resize_token_embeddings(310, mean_resizing=False)
    assert model.decoder.weight.shape == (310, 128) and model.config.vocab_size == 310


def test_values_that_are_not_supported_are_named():
    with pytest.raises(CramError, match="geglue.*geglu"): CrammedBertConfig(hidden_act="geglue")
