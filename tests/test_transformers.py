"""The model is a citizen of transformers: its tools, tasks and switches work on it without our
help."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.export import Dim
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.modeling_outputs import (
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from cramnb.model.encoder import CrammedBertConfig, CrammedBertModel
from cramnb.model.mlm import (
    CrammedBertForMaskedLM,
    CrammedBertForMultipleChoice,
    CrammedBertForQuestionAnswering,
    CrammedBertForSequenceClassification,
    CrammedBertForTokenClassification,
    build_model,
)
from cramnb.core import CramError
from cramnb.options import PRESETS, Arch, Data
from cramnb.text.tokenizer import train_tokenizer

SMALL = dict(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    classifier_hidden_size=16,
)


def small(**changes):
    return CrammedBertConfig(**(SMALL | changes))


def ids(*shape):
    return torch.randint(5, 300, shape, generator=torch.Generator().manual_seed(0))


TEXTS = [
    "the cat sat on the mat",
    "a dog saw the cat",
    "the dog ran to a mat",
    "a cat and a dog sat",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 20, Data(), vocab_size=60)


@pytest.mark.parametrize(
    "auto, ours",
    [
        (AutoModel, CrammedBertModel),
        (AutoModelForMaskedLM, CrammedBertForMaskedLM),
        (AutoModelForSequenceClassification, CrammedBertForSequenceClassification),
        (AutoModelForTokenClassification, CrammedBertForTokenClassification),
        (AutoModelForQuestionAnswering, CrammedBertForQuestionAnswering),
        (AutoModelForMultipleChoice, CrammedBertForMultipleChoice),
    ],
)
def test_auto_classes(auto, ours, tmp_path):
    torch.manual_seed(0)
    model = auto.from_config(small())
    assert type(model) is ours
    model.save_pretrained(tmp_path)
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is ours and not any(
        info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    state = again.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert (
        AutoConfig.from_pretrained(tmp_path).to_dict() | dict(_name_or_path="")
        == model.config.to_dict()
    )


@pytest.mark.parametrize(
    "cls, out, shape",
    [
        (CrammedBertForMaskedLM, MaskedLMOutput, (2, 8, 300)),
        (CrammedBertForSequenceClassification, SequenceClassifierOutput, (2, 4)),
        (CrammedBertForTokenClassification, TokenClassifierOutput, (2, 8, 4)),
    ],
)
def test_output_classes_and_tuples(cls, out, shape):
    x, model = ids(2, 8), cls(small(num_labels=4)).eval()
    labels = torch.tensor([0, 3]) if len(shape) == 2 else x % 4
    asked, plain = model(x, labels=labels), model(x)
    assert type(asked) is type(plain) is out and plain.loss is None and plain.logits.shape == shape
    loss, logits = model(x, labels=labels, return_dict=False)
    assert torch.equal(logits, plain.logits) and torch.equal(loss, asked.loss)


def test_hidden_states_and_attentions():
    model = CrammedBertForMaskedLM(small()).eval()
    out = model(ids(2, 8), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[0], model.model.embeddings(ids(2, 8)))
    assert [a.shape for a in out.attentions] == [(2, 4, 8, 8)] * 2
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4, 8))
    assert model(ids(2, 8)).hidden_states is None and model(ids(2, 8)).attentions is None


def test_resize_token_embeddings(tmp_path):
    model = CrammedBertForMaskedLM(small(decoder_bias=True)).eval()
    before = model(ids(1, 8)).logits
    model.resize_token_embeddings(310, mean_resizing=False)
    assert model.decoder.weight is model.model.embeddings.word_embeddings.weight
    out = model(ids(1, 8), labels=torch.full((1, 8), 305))
    assert out.logits.shape == (1, 8, 310) and out.loss.isfinite()
    torch.testing.assert_close(out.logits[..., :300], before)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids(1, 8)).logits, out.logits)


def test_gradient_checkpointing_changes_memory_and_nothing_else():
    grads = []
    for saving in (False, True):
        torch.manual_seed(0)
        model = CrammedBertForMaskedLM(
            small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ).train()
        if saving:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing == saving
        model(ids(2, 8), attention_mask=torch.ones(2, 8), labels=ids(2, 8)).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_vectors_in_place_of_ids_and_token_types_that_nobody_reads():
    model = CrammedBertForMaskedLM(small()).eval()
    vectors, want = model.get_input_embeddings()(ids(2, 8)), model(ids(2, 8)).logits
    assert torch.equal(model(inputs_embeds=vectors).logits, want)
    assert torch.equal(model(ids(2, 8), token_type_ids=torch.ones_like(ids(2, 8))).logits, want)
    for wrong in ({}, dict(input_ids=ids(2, 8), inputs_embeds=vectors)):
        with pytest.raises(CramError, match="either input_ids or inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize(
    "position", ["scaled-sinusoidal", "sinusoidal", "learned", "rotary", "none"]
)
def test_sequences_beyond_the_position_table(position):
    model = CrammedBertModel(small(position_embedding_type=position))
    if position in ("rotary", "none"):
        assert model(ids(1, 33)).last_hidden_state.shape == (1, 33, 32)
    else:
        with pytest.raises(CramError, match="33 tokens.*max_position_embeddings=32"):
            model(ids(1, 33))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype, attention, tmp_path):
    torch.manual_seed(0)
    model = CrammedBertForMaskedLM(small(qk_norm=True, position_embedding_type="rotary")).eval()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    want = model(ids(2, 8), attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    given = dict(dtype=dtype, attn_implementation=attention)
    lower = AutoModelForMaskedLM.from_pretrained(tmp_path, **given).eval()
    out = lower(ids(2, 8), attention_mask=mask, labels=ids(2, 8))
    assert lower.dtype == out.logits.dtype == dtype and out.loss.isfinite()
    torch.testing.assert_close(out.logits.float(), want, atol=3e-2, rtol=3e-2)


SEVERAL = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    "labels, changes",
    [
        (torch.tensor([0, 1, 3]), dict(num_labels=4)),
        (SEVERAL, dict(num_labels=4)),
        (SEVERAL, dict(num_labels=4, problem_type="regression")),
        (torch.tensor([0.5, 2.0, 5.0]), dict(num_labels=1)),
    ],
)
def test_kinds_of_tasks(labels, changes):
    out = CrammedBertForSequenceClassification(small(**changes))(ids(3, 8), labels=labels)
    assert out.logits.shape == (3, changes["num_labels"]) and out.loss.isfinite()
    out.loss.backward()


def test_names_of_classes_are_saved(tmp_path):
    names = {0: "no", 1: "yes", 2: "maybe"}
    CrammedBertForSequenceClassification(small(id2label=names)).save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).config
    assert again.id2label == names and again.num_labels == 3


@pytest.mark.parametrize("how", ["mean", "first", "max", "mean-with-padding"])
def test_pooling_of_masks_that_are_odd(how):
    x, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    model = CrammedBertForSequenceClassification(small(classifier_pooling=how)).eval()
    torch.testing.assert_close(model(x, attention_mask=mask).logits, model(x).logits)
    mask[1] = 0  # a text without a token
    out = model(x, attention_mask=mask, labels=torch.tensor([0, 1]))
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    if how in ("mean", "max"):
        with pytest.raises(CramError, match="mask of .B, T."):
            model(x, attention_mask=torch.ones(2, 8, 8))


REFUSED = dict(num_attention_heads=5, hidden_size="32", intermediate_size=65, rope_theta=math.inf)
REFUSED |= dict(norm_eps="../../etc/passwd", hidden_dropout_prob=2.0, classifier_dropout=-0.1)
REFUSED |= dict(attention_probs_dropout_prob=math.nan, qk_norm=1, hidden_act="gelu_new")
REFUSED |= dict(vocab_size=-3, pad_token_id=300)


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_would_fail_later_are_refused_at_the_door(name):
    with pytest.raises(CramError, match=name):
        small(**{name: REFUSED[name]})
    config = small()
    setattr(config, name, REFUSED[name])  # set later, as from_pretrained(..., hidden_act=…) does
    with pytest.raises(CramError, match=name):
        CrammedBertModel(config)


def test_a_file_with_an_impossible_value_is_not_loaded(tmp_path):
    small().save_pretrained(tmp_path)
    changed = json.loads((tmp_path / "config.json").read_text()) | dict(norm_type="ScaleNorm")
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CramError, match="norm_type=ScaleNorm"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("tiny", dict(num_attention_heads=128)),  # heads of one number, and rotary wants pairs
        ("hf-bert-tiny", dict(qk_norm=True)),
        ("hf-bert-tiny", dict(num_attention_heads=3)),
    ],
)
def test_an_arch_meets_the_same_door(name, changes):
    with pytest.raises(CramError, match=next(iter(changes)).split("_")[0]):
        build_model(Arch(**(PRESETS["arch"][name] | changes)), 300)
    with pytest.raises(CramError, match="loss_chunk_size"):
        build_model("hf-bert-tiny", 300, loss_chunk_size=8)


def test_build_model_reads_the_corpus(tokenizer):
    corpus = SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer))
    for name in ("tiny", "hf-bert-tiny"):
        config = build_model(name, corpus).config
        assert config.vocab_size == len(tokenizer)
        assert config.pad_token_id == tokenizer.pad_token_id


def test_trainer_hands_document_ids_to_the_model(tmp_path):
    torch.manual_seed(0)
    model = CrammedBertForMaskedLM(small(position_embedding_type="rotary"))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    x, documents = ids(4, 8), torch.tensor([[0] * 4 + [1] * 4] * 4)
    rows = [dict(input_ids=row, labels=row, document_ids=d) for row, d in zip(x, documents)]
    args = training(tmp_path, per_device_eval_batch_size=4)
    found = Trainer(model=model, args=args, eval_dataset=rows).evaluate()["eval_loss"]
    apart, alone = model.eval()(x, labels=x, document_ids=documents).loss, model(x, labels=x).loss
    assert found == pytest.approx(apart.item(), rel=1e-5) and abs(apart - alone) > 1e-3


def test_questions_learn_where_the_answer_stands(tmp_path):
    torch.manual_seed(0)
    rows = [dict(input_ids=row, start_positions=3, end_positions=5) for row in ids(8, 8).tolist()]
    model = CrammedBertForQuestionAnswering(small())
    args = training(tmp_path, max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2)
    Trainer(model=model, args=args, train_dataset=rows).train()
    out = model.eval()(ids(8, 8))
    assert (out.start_logits.argmax(-1) == 3).all() and (out.end_logits.argmax(-1) == 5).all()


def test_choices_are_scored_alone():
    torch.manual_seed(0)
    model, four = CrammedBertForMultipleChoice(small(num_labels=3)).eval(), ids(2, 4, 8)
    mask = torch.ones_like(four)
    mask[0, 1, 5:] = 0
    out = model(four, attention_mask=mask, labels=torch.tensor([1, 2]))
    assert out.logits.shape == (2, 4)
    torch.testing.assert_close(model(four.flip(1), mask.flip(1)).logits, out.logits.flip(1))
    alone = model(four[:1, 1:2, :5]).logits
    torch.testing.assert_close(alone, out.logits[:1, 1:2], atol=1e-5, rtol=1e-5)
    want = torch.nn.functional.cross_entropy(out.logits, torch.tensor([1, 2]))
    torch.testing.assert_close(out.loss, want)


def test_the_usual_positions_are_accepted_and_others_refused():
    x, usual = ids(2, 8), torch.arange(8).expand(2, 8)
    model = CrammedBertForQuestionAnswering(small()).eval()
    assert torch.equal(model(x, position_ids=usual)[0], model(x)[0])
    with pytest.raises(ValueError, match="document_ids"):
        model(x, position_ids=torch.arange(4).repeat(2)[None])


NEIGHBOURS = dict(position_embedding_type="rotary", neighbours=True, qk_norm=True)


@pytest.mark.parametrize("changes", [{}, NEIGHBOURS], ids=["crammed", "tiny"])
def test_export_with_any_batch_and_length(changes):
    model = CrammedBertForMaskedLM(small(**changes)).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    axes = {0: Dim("B", max=64), 1: Dim("T", max=32)}
    given = dict(input_ids=ids(2, 8), attention_mask=torch.ones(2, 8, dtype=torch.long))
    traced = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, axes))
    mask = torch.ones(5, 13, dtype=torch.long)
    mask[1, 5:] = 0
    given = dict(input_ids=ids(5, 13), attention_mask=mask)
    torch.testing.assert_close(traced.module()(**given).logits, model(**given).logits)


def test_16_bit_autocast_keeps_the_fused_norms(recwarn):
    model = CrammedBertForMaskedLM(
        small(qk_norm=True, norm_type="RMSNorm", norm_placement="sandwich")
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(ids(2, 8), labels=ids(2, 8)).loss.backward()
    assert not [str(w.message) for w in recwarn if "fused" in str(w.message)]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_files_of_the_first_edition_still_load(tmp_path):
    small().save_pretrained(tmp_path)
    first = json.loads((tmp_path / "config.json").read_text()) | dict(type_vocab_size=2)
    (tmp_path / "config.json").write_text(json.dumps(first))
    assert not hasattr(
        AutoConfig.from_pretrained(tmp_path), "type_vocab_size"
    )  # nobody sends token types to a model without


def test_pipelines(tokenizer):
    config = small(vocab_size=len(tokenizer), num_labels=3)
    given, texts = dict(tokenizer=tokenizer, device="cpu"), ["the cat sat", "a dog ran to the mat"]
    model = CrammedBertForMaskedLM(config).eval()
    blank = f"the {tokenizer.mask_token} sat"
    best = model(**tokenizer(blank, return_tensors="pt")).logits
    place = tokenizer(blank)["input_ids"].index(tokenizer.mask_token_id)
    guesses = pipeline("fill-mask", model=model, **given)(blank, top_k=3)
    assert [g["token"] for g in guesses] == best[0, place].topk(3).indices.tolist()
    names = set(config.id2label.values())
    model = CrammedBertForSequenceClassification(config).eval()
    for row in pipeline("text-classification", model=model, **given)(texts, top_k=None):
        assert {s["label"] for s in row} == names
    model = CrammedBertForTokenClassification(config).eval()
    tags = pipeline("token-classification", model=model, **given)(texts[0])
    assert {t["entity"] for t in tags} <= names and tags[0]["word"] == "the"
    features = pipeline("feature-extraction", model=model.model, **given)(texts[0])
    assert len(features[0][0]) == 32


def training(folder, **changes):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
        lr_scheduler_type="constant",
        **changes,
    )


def test_trainer_of_transformers(tokenizer, tmp_path):
    torch.manual_seed(0)
    rows = [tokenizer(text) for text in TEXTS * 8]
    trainer = Trainer(
        model=CrammedBertForMaskedLM(small(vocab_size=len(tokenizer))),
        args=training(tmp_path, max_steps=30, per_device_train_batch_size=16, learning_rate=3e-3),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.3),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.5


def test_trainer_accumulates_to_the_same_update(tmp_path):
    rows = [dict(input_ids=row, labels=row) for row in ids(8, 8).tolist()]
    results = []
    for size, steps in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = CrammedBertForMaskedLM(
            small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )
        args = training(
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
        )
        Trainer(model=model, args=args, train_dataset=rows).train()
        results.append(model.state_dict())
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], atol=1e-6, rtol=1e-5)
