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
    BaseModelOutput,
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
    task_loss,
)
from cramnb.core import CramError
from cramnb.options import PRESETS, Arch

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


@pytest.fixture(scope="module")
def tokenizer():
    from cramnb.options import Data
    from cramnb.text.tokenizer import train_tokenizer

    words = [
        "the cat sat on the mat",
        "a dog saw the cat",
        "the dog ran to a mat",
        "a cat and a dog sat",
    ] * 20
    return train_tokenizer(words, Data(), vocab_size=60)


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


def test_output_classes_and_tuples():
    x = ids(2, 8)
    for cls, out, labels, shape in (
        (CrammedBertForMaskedLM, MaskedLMOutput, x, (2, 8, 300)),
        (
            CrammedBertForSequenceClassification,
            SequenceClassifierOutput,
            torch.tensor([0, 3]),
            (2, 4),
        ),
        (CrammedBertForTokenClassification, TokenClassifierOutput, x % 4, (2, 8, 4)),
    ):
        model = cls(small(num_labels=4)).eval()
        with_labels, without = model(x, labels=labels), model(x)
        assert type(with_labels) is type(without) is out
        assert (
            without.loss is None
            and torch.equal(with_labels.logits, without.logits)
            and without.logits.shape == shape
        )  # logits are logits, asked or not
        loss, logits = model(x, labels=labels, return_dict=False)
        assert torch.equal(logits, without.logits) and torch.equal(loss, with_labels.loss)
        assert torch.equal(model(x, return_dict=False)[0], logits)
    encoder = CrammedBertModel(small()).eval()
    assert type(encoder(x)) is BaseModelOutput and torch.equal(
        encoder(x, return_dict=False)[0], encoder(x).last_hidden_state
    )


@pytest.mark.parametrize("final_norm", [True, False])
def test_hidden_states_and_attentions(final_norm):
    model = CrammedBertForMaskedLM(small(attn_implementation="eager", final_norm=final_norm)).eval()
    out = model(ids(2, 8), output_hidden_states=True, output_attentions=True)
    encoder = model.model(ids(2, 8), output_hidden_states=True)
    assert len(out.hidden_states) == 3 and torch.equal(
        encoder.hidden_states[-1], encoder.last_hidden_state
    )
    assert torch.equal(out.hidden_states[0], model.model.embeddings(ids(2, 8)))
    assert [a.shape for a in out.attentions] == [(2, 4, 8, 8)] * 2
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4, 8))
    assert model(ids(2, 8)).hidden_states is None and model(ids(2, 8)).attentions is None


@pytest.mark.parametrize("decoder_bias", [False, True])
def test_resize_token_embeddings(decoder_bias, tmp_path):
    model = CrammedBertForMaskedLM(small(decoder_bias=decoder_bias)).eval()
    before = model(ids(1, 8)).logits
    model.resize_token_embeddings(310, mean_resizing=False)
    out = model(ids(1, 8), labels=torch.full((1, 8), 305))
    assert (
        out.logits.shape == (1, 8, 310) and out.loss.isfinite() and model.config.vocab_size == 310
    )
    assert (
        model.decoder.weight is model.model.embeddings.word_embeddings.weight
        and model.decoder.out_features == 310
    )
    torch.testing.assert_close(out.logits[..., :300], before)
    if decoder_bias:
        assert model.decoder.bias.shape == (310,)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        AutoModelForMaskedLM.from_pretrained(tmp_path).eval()(ids(1, 8)).logits, out.logits
    )


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


def test_token_types_are_accepted_and_ignored():
    model = CrammedBertForSequenceClassification(small()).eval()
    assert torch.equal(
        model(ids(2, 8)).logits,
        model(ids(2, 8), token_type_ids=torch.ones(2, 8, dtype=torch.long)).logits,
    )


def test_inputs_embeds():
    model = CrammedBertForMaskedLM(small()).eval()
    vectors = model.get_input_embeddings()(ids(2, 8))
    assert torch.equal(model(inputs_embeds=vectors).logits, model(ids(2, 8)).logits)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype, tmp_path):
    torch.manual_seed(0)
    model = CrammedBertForMaskedLM(small(qk_norm=True, position_embedding_type="rotary")).eval()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    want = model(ids(2, 8), attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        lower = AutoModelForMaskedLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation=attention
        ).eval()
        out = lower(ids(2, 8), attention_mask=mask, labels=ids(2, 8))
        assert lower.dtype == out.logits.dtype == dtype and out.loss.isfinite()
        torch.testing.assert_close(out.logits.float(), want, atol=3e-2, rtol=3e-2)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids(2, 8), attention_mask=mask)
        torch.testing.assert_close(out.logits.float(), want, atol=3e-2, rtol=3e-2)


def test_kinds_of_tasks(tmp_path):
    x, zeros = ids(3, 8), torch.zeros(3, 4)
    classes, several, value = (
        torch.tensor([0, 1, 3]),
        torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]),
        torch.tensor([0.5, 2.0, 5.0]),
    )
    assert task_loss(zeros, classes).item() == pytest.approx(1.3863, abs=1e-4)
    assert task_loss(zeros, several).item() == pytest.approx(0.6931, abs=1e-4)
    assert task_loss(zeros, several, "regression").item() == pytest.approx(
        (several**2).mean().item()
    )
    for labels, changes in (
        (classes, dict(num_labels=4)),
        (classes, dict(num_labels=4, problem_type="single_label_classification")),
        (several, dict(num_labels=4)),
        (several, dict(num_labels=4, problem_type="multi_label_classification")),
        (several, dict(num_labels=4, problem_type="regression")),
        (value, dict(num_labels=1)),
        (value, dict(num_labels=1, problem_type="regression")),
    ):
        out = CrammedBertForSequenceClassification(small(**changes))(x, labels=labels)
        assert out.logits.shape == (3, changes["num_labels"]) and out.loss.isfinite()
        out.loss.backward()
    named = CrammedBertForSequenceClassification(
        small(id2label={0: "no", 1: "yes", 2: "maybe"}, label2id={"no": 0, "yes": 1, "maybe": 2})
    )
    named.save_pretrained(tmp_path)
    assert (
        AutoModelForSequenceClassification.from_pretrained(tmp_path).config.id2label[2] == "maybe"
        and named.config.num_labels == 3
    )


def test_pooling_of_masks_that_are_odd():
    x, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    for how in ("mean", "first", "max", "mean-with-padding"):
        model = CrammedBertForSequenceClassification(small(classifier_pooling=how)).eval()
        torch.testing.assert_close(model(x, attention_mask=mask).logits, model(x).logits)
        empty = mask.clone()
        empty[1] = 0
        out = model(x, attention_mask=empty, labels=torch.tensor([0, 1]))
        out.loss.backward()
        assert out.logits.isfinite().all() and all(
            p.grad.isfinite().all() for p in model.parameters()
        )
        if how in ("mean", "max"):
            with pytest.raises(CramError, match="mask of .B, T."):
                model(x, attention_mask=torch.ones(2, 8, 8))


REFUSED = {
    "num_attention_heads": (0, 5, True),
    "num_hidden_layers": (2.5, True),
    "hidden_size": (0, 33, 10**9, "32"),
    "intermediate_size": (65,),
    "max_position_embeddings": (0,),
    "rope_theta": (0.0, math.inf),
    "norm_eps": (-1.0, "../../etc/passwd"),
    "hidden_dropout_prob": (2.0, {}),
    "classifier_dropout": (-0.1,),
    "attention_probs_dropout_prob": (math.nan,),
    "qk_norm": (1,),
    "hidden_act": ("gelu_new",),
    "vocab_size": (-3,),
    "pad_token_id": (300, 2.5),
}


@pytest.mark.parametrize("name, value", [(n, v) for n in REFUSED for v in REFUSED[n]])
def test_values_that_would_fail_later_are_refused_at_the_door(name, value):
    with pytest.raises(CramError, match=name):
        small(**{name: value})
    config = small()
    setattr(config, name, value)  # set later, as from_pretrained(..., hidden_act=…) does
    with pytest.raises(CramError, match=name):
        CrammedBertModel(config)


@pytest.mark.parametrize(
    "changes",
    [dict(num_attention_heads=32), dict(hidden_size=12)],
    ids=["heads of 1", "heads of 3"],
)
def test_rotary_wants_even_heads(changes):
    with pytest.raises(CramError, match="not even as rotary wants"):
        small(position_embedding_type="rotary", **changes)


def test_a_file_with_an_impossible_value_is_not_loaded(tmp_path):
    small().save_pretrained(tmp_path)
    changed = json.loads((tmp_path / "config.json").read_text()) | dict(norm_type="ScaleNorm")
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CramError, match="norm_type=ScaleNorm"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, value", [("norm_type", "ScaleNorm"), ("hidden_dropout_prob", 2), ("vocab_size", 0)]
)
def test_a_configuration_does_not_save_what_it_would_not_load(name, value, tmp_path):
    config = small()
    setattr(config, name, value)
    with pytest.raises(CramError, match=f"{name}={value}"):
        config.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.parametrize(
    "name, near", [("hidden_dropout", "hidden_dropout_prob"), ("rms_norm_eps", "norm_eps")]
)
def test_a_name_nearly_ours_in_a_file_is_reported_and_left_out(name, near, tmp_path):
    config = small()
    setattr(config, name, 0.3)  # as other models call it
    config.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=f"{name} is not a setting of crammed_bert. Did you mean '{near}'"
    ):
        again = AutoConfig.from_pretrained(tmp_path)
    assert getattr(again, near) == getattr(small(), near) and not hasattr(again, name)


def test_an_arch_meets_the_same_door():
    for name, changes, message in (
        ("crammed-bert", dict(hidden_dropout_prob=2.0), "hidden_dropout_prob=2"),
        ("tiny", dict(num_attention_heads=128), "not even as rotary wants"),
        ("hf-bert-tiny", dict(qk_norm=True), "qk_norm=True is not read with model_type=bert"),
        ("hf-bert-tiny", dict(num_attention_heads=3), "does not divide"),
    ):
        with pytest.raises(CramError, match=message):
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
    rows = [
        dict(input_ids=row, labels=row, document_ids=[0] * 4 + [1] * 4)
        for row in ids(4, 8).tolist()
    ]
    model = CrammedBertForMaskedLM(small(position_embedding_type="rotary"))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    losses = [
        Trainer(
            model=model, args=training(tmp_path, per_device_eval_batch_size=4), eval_dataset=rows
        ).evaluate()["eval_loss"]
        for rows in (rows, [{k: v for k, v in r.items() if k != "document_ids"} for r in rows])
    ]
    x, documents = ids(4, 8), torch.tensor([[0] * 4 + [1] * 4] * 4)
    want = [
        model.eval()(x, labels=x, document_ids=given).loss.item() for given in (documents, None)
    ]
    assert losses == pytest.approx(want, rel=1e-5) and abs(want[0] - want[1]) > 1e-3


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
    for cls in (CrammedBertModel, CrammedBertForMaskedLM, CrammedBertForQuestionAnswering):
        model = cls(small()).eval()
        assert torch.equal(model(x, position_ids=usual)[0], model(x)[0])
        for other in (usual + 1, torch.arange(4).repeat(2)[None]):
            with pytest.raises(ValueError, match="document_ids") as told:
                model(x, position_ids=other)
            assert type(told.value) is ValueError


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


def test_pipelines(tokenizer, tmp_path):
    model = CrammedBertForMaskedLM(small(vocab_size=len(tokenizer))).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    guesses = pipeline("fill-mask", model=str(tmp_path), tokenizer=str(tmp_path))(
        f"the {tokenizer.mask_token} sat", top_k=3
    )
    encoded = tokenizer(f"the {tokenizer.mask_token} sat", return_tensors="pt")
    place = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0, 0]
    best = model(**encoded).logits[0, place].softmax(-1).topk(3)
    assert [g["token"] for g in guesses] == best.indices.tolist() and guesses[0][
        "score"
    ] == pytest.approx(best.values[0].item(), rel=1e-4)
    texts = ["the cat sat", "a dog ran to the mat and the cat"]
    for config, names in (
        (small(vocab_size=len(tokenizer), num_labels=3), {"LABEL_0", "LABEL_1", "LABEL_2"}),
    ):
        scored = pipeline(
            "text-classification",
            model=CrammedBertForSequenceClassification(config).eval(),
            tokenizer=tokenizer,
        )(texts, batch_size=2, top_k=None)
        assert all(
            {s["label"] for s in row} == names
            and sum(s["score"] for s in row) == pytest.approx(1, abs=1e-5)
            for row in scored
        )
        tags = pipeline(
            "token-classification",
            model=CrammedBertForTokenClassification(config).eval(),
            tokenizer=tokenizer,
        )(texts[0])
        assert {t["entity"] for t in tags} <= names and tags[0]["word"] == "the"
    features = pipeline("feature-extraction", model=model.model, tokenizer=tokenizer)(texts[0])
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
    rows = [
        tokenizer(t)
        for t in [
            "the cat sat on the mat",
            "a dog saw the cat",
            "the dog ran to a mat",
            "a cat and a dog sat",
        ]
        * 8
    ]
    model = CrammedBertForMaskedLM(small(vocab_size=len(tokenizer)))
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.3)
    trainer = Trainer(
        model=model,
        args=training(tmp_path, max_steps=30, per_device_train_batch_size=16, learning_rate=3e-3),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator,
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
