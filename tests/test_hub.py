"""In and out of Hugging Face: the original's checkpoints, ordinary folders, model cards."""

import types
import copy
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import datasets
import pytest
import torch
from conftest import ROOT, beside, same_numbers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import cramnb.publish as publishing
from cramnb.command import main
from cramnb.encoder import CrammedBertConfig
from cramnb.hub import convert
from cramnb.original import from_heads, from_original
from cramnb.publish import publish, publish_corpus, to_bert, upload, why_not_bert
from cramnb.mlm import CrammedBertForMaskedLM, CrammedBertForSequenceClassification
from cramnb.core import CramError
from cramnb.recipe import compose, preset, tiny, to_dict
from cramnb.text.store import Corpus

V1 = dict(
    z_loss_factor=0,
    gradient_checkpointing=False,
    layer_fusion=True,
    deepnorm_scaling=False,
    layer_drop_theta=None,
    recurrent_layers=None,
    layer_macro_type="transformer",
)


def arch(first=False, nested=None, **changes):
    "An architecture of the original, small, in the form that its runs save."
    out = (
        dict(
            architectures=["ScriptableMaskedLM" if first else "ScriptableCrammedBERT"],
            num_transformer_layers=2,
            hidden_size=32,
            intermed_size=64,
            hidden_dropout_prob=0.1,
            norm="LayerNorm",
            norm_eps=1e-12,
            norm_scheme="pre",
            nonlin="GELUglu",
            tie_weights=True,
            decoder_bias=False,
            sparse_prediction=0.25,
            loss="cross-entropy",
            objective_layout="MLM",
            ffn_layer_frequency=1,
            skip_head_transform=True,
            use_bias=False,
            final_norm=True,
            num_labels=None,
            init=dict(type="normal", std=0.02),
            embedding=dict(
                vocab_size=None,
                pos_embedding="scaled-sinusoidal",
                dropout_prob=0.1,
                pad_token_id=0,
                max_seq_length=24,
                embedding_dim=32,
                normalization=True,
                stable_low_precision=False,
            ),
            attention=dict(
                type="self-attention",
                causal_attention=False,
                num_attention_heads=4,
                dropout_prob=0.1,
                skip_output_projection=False,
                qkv_bias=False,
                rotary_embedding=False,
                seq_op_in_fp32=False,
                sequence_op="torch-softmax",
            ),
            classification_head=dict(
                pooler="avg",
                include_ff_layer=True,
                head_dim=48,
                nonlin="Tanh",
                classifier_dropout=0.1,
            ),
        )
        | (V1 if first else {})
        | changes
    )
    for group, values in (nested or {}).items():
        out[group] = out[group] | values
    return out


SIMPLE = dict(
    nonlin="GELU", decoder_bias=True, skip_head_transform=False, use_bias=True, final_norm=False
)
LEARNED = dict(
    embedding=dict(pos_embedding="learned"),
    attention=dict(qkv_bias=True),
    classification_head=dict(pooler="zero_index", head_dim=32),
)
VARIANTS = {
    "crammed-bert": arch(),
    "crammed-bert-simple": arch(nested=LEARNED, **SIMPLE),
    "rms": arch(norm="RMSNorm", norm_eps=1e-6),
    "swiglu, sinusoidal": arch(
        nonlin="SiLUglu", nested=dict(embedding=dict(pos_embedding="sinusoidal"))
    ),
    "no positions": arch(nested=dict(embedding=dict(pos_embedding=None))),
    "sanity rotary": arch(
        nested=dict(embedding=dict(pos_embedding=None), attention=dict(rotary_embedding="sanity"))
    ),
    "no-op rotary": arch(nested=dict(attention=dict(rotary_embedding=True))),
    "separate queries": arch(nested=dict(attention=dict(type="huggingface"))),
    "bert-c5, flash": arch(True, nested=dict(attention=dict(type="flash-attention-impl"))),
    "bert-c5, pytorch": arch(True, nested=dict(attention=dict(type="pytorch"))),
    "bert-c5, self-attention": arch(True),
    "bert-base": arch(True, norm_scheme="post", norm_eps=1e-6, nested=LEARNED, **SIMPLE),
    "bert-original": arch(
        True, norm_scheme="post", sparse_prediction=False, nested=LEARNED, **SIMPLE
    ),
    "sandwich, deepnorm": arch(True, norm_scheme="sandwich", deepnorm_scaling=True),
}


def to_heads(qkv, heads):
    return qkv.view(3, heads, -1, *qkv.shape[1:]).transpose(0, 1).reshape(qkv.shape)


def theirs(model, config, clobbered=False):
    "Our weights under the original's names, from its module tree, apart from the code under test."
    kind, heads, rms, out = (
        config["attention"]["type"],
        config["attention"]["num_attention_heads"],
        config["norm"] == "RMSNorm",
        {},
    )
    for name, p in model.named_parameters():
        p = p.detach().clone()
        n = name.replace(
            "model.embeddings.word_embeddings", "encoder.embedding.word_embedding"
        ).replace("model.embeddings.position.scale", "encoder.embedding.pos_embedding.scale_factor")
        n = (
            n.replace(
                "model.embeddings.position.table", "encoder.embedding.pos_embedding.embedding"
            )
            .replace("model.embeddings.norm", "encoder.embedding.norm")
            .replace("model.", "encoder.")
        )
        n = (
            n.replace("attention_out_norm", "norm3")
            .replace("mlp_out_norm", "norm4")
            .replace("attention_norm", "norm1")
            .replace("mlp_norm", "norm2")
            .replace("attention.output", "attn.dense")
        )
        n = n.replace("mlp.input", "ffn.dense_in").replace("mlp.output", "ffn.dense_out")
        if name.startswith("head."):
            n = (
                n.replace(
                    "head.dense" if not config["skip_head_transform"] else "head.dense",
                    "prediction_head.dense"
                    if not config["skip_head_transform"]
                    else "prediction_head",
                )
                .replace("head.norm", "prediction_head.norm")
                .replace("prediction_prediction_", "prediction_")
            )
        n = n.replace("classifier.dense", "pooler.dense").replace("classifier.out", "head")
        if rms and "norm" in n:
            n = n.replace(".weight", ".learnable_scale")
        if "attention.qkv" in n:
            layer, end = n.split("attention.qkv.")
            if kind == "huggingface":
                out |= {
                    f"{layer}attn.self_attention.{q}.{end}": part
                    for q, part in zip(("query", "key", "value"), p.chunk(3))
                }
            elif kind == "self-attention":
                out[f"{layer}attn.self_attention.query_key_value.{end}"] = to_heads(p, heads)
            elif kind == "pytorch":
                out[f"{layer}attn.self_attention.attn.in_proj_{end}"] = p
            else:
                out[f"{layer}attn.self_attention.flash_mha.Wqkv.{end}"] = p
        else:
            out[n] = p
    for i in range(config["num_transformer_layers"]):
        layer = f"encoder.layers.{i}."
        if kind == "self-attention":
            out[f"{layer}attn.self_attention.norm_factor"] = torch.tensor((32 // heads) ** -0.5)
        if config["attention"]["rotary_embedding"]:
            out[f"{layer}attn.self_attention.rotary_emb.inv_freq"] = torch.rand(4)
        if "layer_macro_type" in config:
            out[f"{layer}alpha"] = torch.tensor(4**0.25 if config["deepnorm_scaling"] else 1.0)
        if kind == "pytorch":
            mix = torch.randn(32, 32) / 6 if clobbered else torch.eye(32)
            out |= {
                f"{layer}attn.self_attention.attn.out_proj.weight": mix,
                f"{layer}attn.self_attention.attn.out_proj.bias": torch.zeros(32),
            }
    if "layer_macro_type" in config:
        out["encoder.p"] = torch.tensor(1.0)
    if config["embedding"]["pos_embedding"] == "learned":
        out["encoder.embedding.pos_embedding.position_ids"] = torch.arange(24)[None]
    return out | (
        {"decoder.weight": out["encoder.embedding.word_embedding.weight"]}
        if hasattr(model, "decoder")
        else {}
    )


def ours(config, labels=0, seed=0):
    "One of our models for that architecture, every weight random."
    torch.manual_seed(seed)
    first, emb, att = "layer_macro_type" in config, config["embedding"], config["attention"]
    rotary = att["rotary_embedding"] == "sanity"
    c = CrammedBertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_act=dict(GELU="gelu", GELUglu="geglu", SiLUglu="swiglu")[config["nonlin"]],
        position_embedding_type="rotary" if rotary else emb["pos_embedding"] or "none",
        max_position_embeddings=24,
        norm_type=config["norm"],
        norm_eps=config["norm_eps"],
        norm_placement=config["norm_scheme"],
        deepnorm=first and config["deepnorm_scaling"],
        final_norm=config["final_norm"],
        use_bias=config["use_bias"],
        qkv_bias=att["qkv_bias"] or att["type"] == "huggingface",
        head_transform="dense"
        if not config["skip_head_transform"]
        else "linear"
        if first
        else "none",
        decoder_bias=config["decoder_bias"],
        classifier_pooling=dict(avg="mean-with-padding", zero_index="first")[
            config["classification_head"]["pooler"]
        ],
        classifier_hidden_size=config["classification_head"]["head_dim"],
        **dict(num_labels=labels) if labels else {},
    )
    model = (CrammedBertForSequenceClassification if labels else CrammedBertForMaskedLM)(c).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1) * 0.5)
    return model


IDS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 15:] = MASK[2, 4:] = 0


def same(a, b):
    with torch.no_grad():
        assert torch.equal(a(IDS).logits, b(IDS).logits)
        assert torch.equal(a(IDS, attention_mask=MASK).logits, b(IDS, attention_mask=MASK).logits)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("labels", [0, 3])
def test_every_architecture_comes_back(name, labels):
    config, model = VARIANTS[name], ours(VARIANTS[name], labels)
    got = from_original(config, theirs(model, config))
    assert type(got) is type(model) and not got.training and got.config.num_labels == (labels or 2)
    same(got, model)


def test_the_fixtures_come_back_with_their_gradients():
    folder = beside("fixtures")
    want, facts = (
        load_file(folder / "crammed_bert_mlm.safetensors"),
        json.loads((folder / "crammed_bert_mlm.json").read_text()),
    )
    state = {
        k.removeprefix("state_dict."): v for k, v in want.items() if k.startswith("state_dict.")
    }
    model = from_original(facts["arch_config"], state)
    out = model(want["input_ids"], labels=want["labels"])
    same_numbers(model, out, want, facts)
    cls = load_file(folder / "crammed_bert_cls3.safetensors")
    config = json.loads((folder / "crammed_bert_cls3.json").read_text())["arch_config"]
    encoder = {k: v for k, v in state.items() if k.startswith("encoder.")}
    classifier = from_original(
        config,
        encoder
        | {k.removeprefix("state_dict."): v for k, v in cls.items() if k.startswith("state_dict.")},
    )
    torch.testing.assert_close(
        classifier(cls["input_ids"]).logits, cls["logits_no_mask"], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        classifier(cls["input_ids_padded"], attention_mask=cls["attention_mask"]).logits,
        cls["logits_masked"],
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
        lambda s: {k.replace("encoder.", "encoder._orig_mod."): v for k, v in s.items()},
        lambda s: {k: v for k, v in s.items() if k != "decoder.weight"},
        lambda s: {k: v for k, v in s.items() if k != "encoder.embedding.word_embedding.weight"},
    ],
)
def test_prefixes_and_either_name_of_the_tied_matrix(change):
    config = VARIANTS["crammed-bert"]
    model = ours(config)
    same(from_original(config, change(theirs(model, config))), model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: c,
        lambda c: {
            "arch": c,
            "model_type": "crammedBERT",
            "architectures": ["ScriptableLMForPreTraining"],
            "transformers_version": "4.26.1",
        },
        lambda c: types.MappingProxyType(c),
    ],
)
def test_the_configuration_may_be_wrapped(wrap):
    config = VARIANTS["bert-c5, flash"]
    model = ours(config)
    same(from_original(wrap(copy.deepcopy(config)), theirs(model, config)), model)


def test_a_way_out_that_was_filled_with_noise_is_multiplied_in():
    config = VARIANTS["bert-c5, pytorch"]
    model = ours(config)
    state = theirs(model, config, clobbered=True)
    for i in range(2):  # what the original computes: dense(out_proj(attention))
        w = model.model.layers[i].attention.output.weight
        w.data = w.data @ state[f"encoder.layers.{i}.attn.self_attention.attn.out_proj.weight"]
    torch.testing.assert_close(
        from_original(config, state)(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4
    )


def test_packings_are_inverse():
    x = torch.randn(96, 32)
    assert torch.equal(from_heads(to_heads(x, 4), 4), x) and not torch.equal(to_heads(x, 4), x)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda s: s.pop("encoder.layers.1.ffn.dense_in.weight"),
            "1 missing: encoder.layers.1.ffn.dense_in.weight",
        ),
        (
            lambda s: s.update({"encoder.layers.9.norm1.weight": torch.ones(32)}),
            "unknown: encoder.layers.9.norm1.weight",
        ),
        (
            lambda s: s.update({"encoder.final_norm.weight": torch.ones(31)}),
            r"encoder.final_norm.weight: \(31,\), float32, expected \(32,\)",
        ),
        (lambda s: s.update({"decoder.weight": s["decoder.weight"] + 1}), "not tied"),
        (
            lambda s: s.update({"prediction_head.weight": torch.ones(32, 32)}),
            "unknown: prediction_head.weight",
        ),
        (
            lambda s: [
                s.pop(k) for k in ("decoder.weight", "encoder.embedding.word_embedding.weight")
            ],
            "no encoder.embedding.word_embedding.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(spoil, message):
    config = VARIANTS["crammed-bert"]
    state = theirs(ours(config), config)
    spoil(state)
    with pytest.raises(CramError, match=message):
        from_original(config, state)
    with pytest.raises(ValueError):
        from_original(config, state)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("labels", [0, 3])
def test_what_is_missing_has_the_name_it_has_in_the_file(name, labels):
    config, fixed = (
        VARIANTS[name],
        (
            "norm_factor",
            "alpha",
            "encoder.p",
            "position_ids",
            "inv_freq",
            "out_proj",
            "decoder.weight",
            "word_embedding",
        ),
    )
    state = theirs(ours(config, labels), config)
    for key in state:
        if not key.endswith(fixed) and not any(f in key for f in fixed) and key != "head.weight":
            with pytest.raises(CramError, match="1 missing: " + key.replace(".", r"\.") + r"\."):
                from_original(config, {k: v for k, v in state.items() if k != key})


def test_the_part_of_attention_that_is_missing():
    config = VARIANTS["separate queries"]
    state = theirs(ours(config), config)
    del state["encoder.layers.0.attn.self_attention.key.bias"]
    with pytest.raises(
        CramError,
        match=r"configuration\. 1 missing: encoder\.layers\.0\.attn\.self_attention\.key\.bias\.$",
    ):
        from_original(config, state)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("bert-c5, flash", "flash_mha.Wqkv.", "attn.in_proj_"),
        ("bert-c5, flash", "flash_mha.", ""),
        ("bert-c5, pytorch", "attn.in_proj_", "in_proj_"),
    ],
)
def test_the_type_of_attention_tells_the_packing_whatever_its_module_is_called(name, old, new):
    config = VARIANTS[name]
    model = ours(config)
    same(
        from_original(
            config,
            {
                k.replace(f"self_attention.{old}", f"self_attention.{new}"): v
                for k, v in theirs(model, config).items()
            },
        ),
        model,
    )


def test_a_classifier_saved_with_the_head_of_pretraining():
    for name in ("bert-c5, flash", "bert-base"):
        config = VARIANTS[name]
        model = ours(config, 3)
        same(
            from_original(
                config,
                {
                    k: v
                    for k, v in theirs(ours(config), config).items()
                    if k.startswith(("prediction_head", "decoder.bias"))
                }
                | theirs(model, config),
            ),
            model,
        )


def test_switches_that_are_off_and_keys_of_the_first_version_in_a_later_one():
    config = VARIANTS["crammed-bert"]
    model = ours(config)
    state = theirs(model, config)
    same(
        from_original(config | V1 | dict(something_new=None, another=False), state), model
    )  # crammed-bamboo is such a one
    with pytest.raises(CramError, match="something_new"):
        from_original(config | dict(something_new=1), state)


def test_half_precision_weights_are_taken():
    for dtype in (torch.bfloat16, torch.float16):
        config = VARIANTS["crammed-bert"] | dict(
            hidden_size=24, embedding=VARIANTS["crammed-bert"]["embedding"] | dict(embedding_dim=24)
        )
        c = CrammedBertConfig(
            vocab_size=50,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=24,
        )
        state = {
            k: v.to(dtype) if v.is_floating_point() else v
            for k, v in theirs(CrammedBertForMaskedLM(c), config).items()
            if "norm_factor" not in k
        }
        state |= {
            f"encoder.layers.{i}.attn.self_attention.norm_factor": torch.tensor(
                6**-0.5, dtype=dtype
            )
            for i in range(2)
        }
        assert from_original(config, state).dtype == torch.float32


@pytest.mark.parametrize(
    "config, message",
    [
        (arch(nested=dict(attention=dict(type="fourier"))), "attention.type=fourier"),
        (arch(nonlin="ReLU"), "nonlin=ReLU"),
        (arch(norm="ScaleNorm"), "norm=ScaleNorm"),
        (arch(hidden_sise=3), "hidden_sise.*Did you mean 'hidden_size'"),
        (arch(True, recurrent_layers=2), "recurrent_layers=2"),
        (arch(nested=dict(embedding=dict(embedding_dim=16))), "factorised"),
        (arch(nested=dict(attention=dict(sequence_op="cumsum"))), "sequence_op=cumsum"),
        (arch(nested=dict(attention=dict(causal_attention=True))), "causal_attention=True"),
        (arch(nested=dict(classification_head=dict(pooler="lse"))), "pooler=lse"),
        (arch(num_transformer_layers="2"), "num_hidden_layers='2'"),
        (arch(attention="self-attention"), "attention='self-attention'"),
        (arch(nonlin="SiLUglu", skip_head_transform=False), "nonlin=SiLUglu stands in the head"),
        (arch(True, norm="RMSNorm"), "length of a vector"),
        ({k: v for k, v in arch().items() if k != "hidden_size"}, "misses hidden_size"),
        ("crammed-bert", "not a dict"),
        (arch(nested=dict(attention=dict(rotary_embedding="llama"))), "rotary_embedding=llama"),
    ],
)
def test_architectures_that_cannot_be_repeated_are_named(config, message):
    with pytest.raises(CramError, match=message):
        from_original(config, theirs(ours(VARIANTS["crammed-bert"]), VARIANTS["crammed-bert"]))


# --- convert


def write_original(folder, config, model, tokenizer=True):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"arch": config, "model_type": "crammedBERT"}))
    save_file(
        {k: v.contiguous().clone() for k, v in theirs(model, config).items()},
        folder / "model.safetensors",
    )
    if tokenizer:
        from cramnb.text.tokenizer import train_tokenizer

        train_tokenizer(
            ["the cat sat on the mat"] * 5, replace(preset("data", "docstrings"), vocab_size=26)
        ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["crammed-bert", "bert-c5, flash"])
def test_convert_writes_an_ordinary_folder(name, tmp_path, capsys):
    model = ours(VARIANTS[name])
    source = write_original(tmp_path / "source", VARIANTS[name], model)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    same(again.eval(), model)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").mask_token_id == 4
        and len(pipeline("fill-mask", str(tmp_path / "out"))("the [MASK] sat")) == 5
    )
    assert (
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "out", num_labels=3
        ).config.num_labels
        == 3
    )
    assert (
        main(["convert", str(source), str(tmp_path / "out")]) == 2
        and "exists" in capsys.readouterr().err
    )
    assert (
        main(["convert", str(tmp_path / "out"), str(tmp_path / "twice")]) == 2
        and "already" in capsys.readouterr().err
    )


def test_pickles_are_refused_with_a_way_out(tmp_path):
    source = write_original(
        tmp_path / "source",
        VARIANTS["crammed-bert"],
        ours(VARIANTS["crammed-bert"]),
        tokenizer=False,
    )
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(
        CramError, match="pytorch_model.bin.*code of its author.*refs/pr/1.*weights_only"
    ):
        convert(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["convert"], "convert SOURCE TARGET"),
        (["convert", "nowhere", "out"], "not a folder"),
        (["convert", ".", "out"], "holds none of config.json"),
    ],
)
def test_mistakes_of_convert_cost_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


# --- publish


@pytest.fixture
def run(tmp_path):
    "A finished run, as `cramnb pretrain` and `cramnb eval` leave it."

    def make(**changes):
        from cramnb.text.tokenizer import train_tokenizer

        recipe = tiny("name=small", "budget=24")
        recipe = replace(
            recipe,
            arch=replace(
                recipe.arch,
                hidden_size=32,
                num_attention_heads=2,
                num_hidden_layers=2,
                intermediate_size=64,
                **changes,
            ),
        )
        folder = tmp_path / "runs/small"
        torch.manual_seed(0)
        values = {k: v for k, v in asdict(recipe.arch).items() if k != "model_type"}
        model = CrammedBertForMaskedLM(CrammedBertConfig(vocab_size=60, **values))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        model.save_pretrained(folder / "model")
        train_tokenizer(
            ["the cat sat on the mat"] * 5, replace(preset("data", "docstrings"), vocab_size=26)
        ).save_pretrained(folder / "model")
        (folder / "recipe.json").write_text(json.dumps(to_dict(recipe)))
        (folder / "pretrain.json").write_text(
            json.dumps(
                dict(
                    device_name="a card",
                    parameters=123,
                    tokens=456,
                    updates=7,
                    heldout=2.5,
                    unigram=6.5,
                    torch="2",
                )
            )
        )
        (folder / "metrics.jsonl").write_text("")
        (folder / "glue.json").write_text(
            json.dumps(
                dict(
                    protocol=asdict(recipe.eval),
                    scores=[
                        dict(name="rte", metric="accuracy", median=0.6),
                        dict(name="cola", metric="matthews", median=0.2),
                    ],
                )
            )
        )
        (folder / "glue.md").write_text("| task | score |\n|---|---|\n| rte | 60.0 |\n")
        return folder, model.eval()

    return make


def test_publish_writes_a_card_that_the_hub_reads(run, tmp_path, monkeypatch, capsys):
    folder, model = run()
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "name=small"]) == 0
    out = folder / "hub"
    card = ModelCard.load(out / "README.md")
    assert (
        card.data.pipeline_tag == "fill-mask"
        and card.data.library_name == "transformers"
        and {r.metric_value for r in card.data.eval_results} == {0.6, 0.2}
    )
    for word in (
        "import cramnb",
        "456",
        "2.500 nats",
        "rte | 60.0",
        "learning rate 0.001",
        '"batch_size"',
        "median of 1 trial",
    ):
        assert word in card.text, word
    assert {
        "arch_budget_hours_24.json",
        "data_budget_hours_24.json",
        "train_budget_hours_24.json",
        "model.safetensors",
        "tokenizer.json",
        "config.json",
    } <= {p.name for p in out.iterdir()}
    assert torch.equal(
        AutoModelForMaskedLM.from_pretrained(out).eval()(IDS % 40).logits, model(IDS % 40).logits
    )


BERT = dict(
    norm_placement="post",
    position_embedding_type="learned",
    hidden_act="gelu",
    head_transform="dense",
    final_norm=False,
    use_bias=True,
    qkv_bias=True,
    decoder_bias=True,
    qk_norm=False,
    neighbours=False,
    zero_init_residual=False,
)


@pytest.mark.parametrize("biases", [True, False])
def test_a_bert_shaped_model_needs_no_cramnb(run, biases):
    folder, model = run(**BERT | dict(use_bias=biases, qkv_bias=biases, decoder_bias=biases))
    out = publish(folder, form="bert")
    code = (
        "import sys; from transformers import AutoModelForMaskedLM as A; "
        "m = A.from_pretrained(sys.argv[1]); print(type(m).__name__, 'cramnb' in sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", code, str(out)], text=True, capture_output=True, check=True
    ).stdout.split() == ["BertForMaskedLM", "False"]
    ids = IDS % 40
    torch.testing.assert_close(
        AutoModelForMaskedLM.from_pretrained(out).eval()(ids, attention_mask=MASK).logits,
        model(ids, attention_mask=MASK).logits,
        atol=1e-4,
        rtol=1e-4,
    )


def test_other_models_say_why_they_are_no_bert(run):
    folder, model = run()
    with pytest.raises(CramError, match="norm_placement=pre .BERT has post.*rotary"):
        publish(folder, form="bert")
    assert not (folder / "hub-bert").exists() and len(why_not_bert(model.config)) >= 4
    with pytest.raises(CramError, match="bert"):
        to_bert(model)


def test_push_asks_who_is_there_and_says_where_the_folder_is(run, monkeypatch):
    folder, _ = run()
    calls = []

    class Api:
        known = False

        def whoami(self):
            if not self.known:
                raise OSError("no token")

        def create_repo(self, name, repo_type, exist_ok):
            calls.append((name, repo_type))

        def upload_folder(self, repo_id, repo_type, folder_path):
            calls.append((folder_path, repo_type))
            return f"https://example.org/{repo_id}"

    monkeypatch.setattr(publishing, "HfApi", Api)
    with pytest.raises(CramError, match="hf auth login.*hub"):
        publish(folder, push="me/small")
    assert (folder / "hub/README.md").exists() and not calls
    monkeypatch.setattr(Api, "known", True)
    said = []
    publish(folder, push="me/small", say=said.append)
    assert calls == [("me/small", "model"), (folder / "hub", "model")] and "me/small" in said[0]
    assert upload(folder / "hub", "me/small").endswith("me/small")


def test_a_corpus_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    "Several files, a stand-in for the hub that keeps what it gets, and `data=tokens` reading it."
    monkeypatch.setattr(publishing, "PART", 64)
    kept = tmp_path / "hub"

    class Api:
        def whoami(self):
            pass

        def create_repo(self, name, repo_type, exist_ok):
            assert (name, repo_type) == ("me/rows", "dataset")

        def upload_folder(self, repo_id, repo_type, folder_path):
            shutil.copytree(folder_path, kept)

    monkeypatch.setattr(publishing, "HfApi", Api)
    words = ["data=files", f"data.files={ROOT / 'README.md'},{ROOT / 'CONTRIBUTING.md'}"]
    words += ["data.trash_cutoff=0"]  # these pages hold many tables and commands
    text = compose([*words, "data.vocab_size=512", "data.seq_length=16"]).data
    corpus = Corpus.build(text, tmp_path / "data")
    folder = publish_corpus(corpus, tmp_path / "rows", "me/rows")
    assert len(list((folder / "data").iterdir())) == -(-len(corpus.rows) // 64) > 1
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    assert card.data.to_dict()["configs"][0]["data_files"][0]["path"] == "data/train-*"
    size = f"data.vocab_size={len(corpus.tokenizer)}"
    words = ["data=pile-readymade", f"data.hub_path={kept}", size, "data.seq_length=16"]
    back = Corpus.build(compose(words).data, tmp_path / "data")
    there = sorted(map(bytes, [*back.rows[:], *back.heldout[:]]))
    assert there == sorted(map(bytes, corpus.rows[:]))
    sample = "The rows of a corpus."
    assert back.tokenizer(sample)["input_ids"] == corpus.tokenizer(sample)["input_ids"]
    again = datasets.load_dataset(str(kept), split="train", cache_dir=str(tmp_path / "cache"))
    assert again[0]["input_ids"] == list(corpus.rows[0])


@pytest.mark.parametrize(
    "words, message",
    [
        (["format=onnx"], "choose from cramnb, bert"),
        (["push=nobody"], "me/my-bert"),
        (["name=smal"], "Did you mean 'small'?"),
    ],
)
def test_mistakes_of_publish_cost_one_line(words, message, run, tmp_path, monkeypatch, capsys):
    run()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["publish", "name=small", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1


# --- hostile folders: one line, nothing written


def a_line(call, *words, **options):
    "The one line of the error."
    with pytest.raises(CramError) as told:
        call(*words, **options)
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


CONFIGS = {
    "architectures": dict(architectures=-1, hidden_sise=3),
    "whole numbers": dict(hidden_size=2.5),
    "padding": dict(nested=dict(embedding=dict(pad_token_id=2.5))),
    "a path": dict(norm_eps="../../etc/passwd"),
    "below zero": dict(norm_eps=-1),
    "a dict": dict(hidden_dropout_prob={}),
    "dropout": dict(hidden_dropout_prob=2),
    "a switch": dict(use_bias="yes"),
    "heads": dict(nested=dict(attention=dict(num_attention_heads=True))),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_configuration_costs_one_line(name, tmp_path):
    changes = dict(CONFIGS[name])
    spoilt = arch(**changes)
    model = ours(VARIANTS["crammed-bert"])
    source = write_original(tmp_path / "source", VARIANTS["crammed-bert"], model, tokenizer=False)
    (source / "config.json").write_text(json.dumps({"arch": spoilt, "model_type": "crammedBERT"}))
    a_line(convert, source, tmp_path / "out", say=print)
    assert not list(tmp_path.glob("out*"))


WEIGHTS = {
    "transposed": lambda s: {k: v.T if v.dim() == 2 else v for k, v in s.items()},
    "bool": lambda s: {k: v > 0 for k, v in s.items()},
    "scalars": lambda s: {k: v.sum() for k, v in s.items()},
    "not finite": lambda s: {k: v * float("nan") for k, v in s.items()},
    "none": lambda s: {},
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", ["crammed-bert", "separate queries", "bert-c5, pytorch"])
def test_hostile_weights_cost_one_line(name, kind, tmp_path):
    config = VARIANTS[kind]
    source = write_original(tmp_path / "source", config, ours(config), tokenizer=False)
    state = WEIGHTS[name](theirs(ours(config), config))
    save_file({k: v.contiguous().clone() for k, v in state.items()}, source / "model.safetensors")
    a_line(convert, source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "index", [[], {"weight_map": {"a": 3}}, {"weight_map": 7}, {"weight_map": {"a": "../x"}}, {}]
)
def test_a_hostile_index_costs_one_line(index, tmp_path):
    source = write_original(
        tmp_path / "source", VARIANTS["crammed-bert"], ours(VARIANTS["crammed-bert"])
    )
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    told = a_line(convert, source, tmp_path / "out")
    assert "index.json is damaged" in told or "no sound weights" in told


@pytest.mark.parametrize(
    "damage", ["gone", "cut", "key gone", "nan", "tokenizer empty", "config", "recipe", "pretrain"]
)
def test_publish_writes_only_what_it_has_loaded(damage, run):
    folder, _ = run()
    weights = folder / "model/model.safetensors"
    state = load_file(weights)
    if damage == "gone":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "key gone":
        save_file(dict(list(state.items())[1:]), weights, metadata={"format": "pt"})
    elif damage == "nan":
        save_file({k: v / 0 * 0 for k, v in state.items()}, weights, metadata={"format": "pt"})
    elif damage == "tokenizer empty":
        (folder / "model/tokenizer.json").write_text("{}")
    elif damage == "config":
        (folder / "model/config.json").write_text("[]")
    elif damage == "recipe":
        (folder / "recipe.json").write_text('{"train": null}')
    else:
        (folder / "pretrain.json").write_text("[]")
    a_line(publish, folder)
    assert not list(folder.glob("hub*"))


def test_publish_leaves_code_and_pickles_behind(run):
    folder, _ = run()
    config = folder / "model/config.json"
    remote = {"AutoModelForMaskedLM": "evil.Model", "AutoConfig": "evil.Config"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": remote}))
    (folder / "model/evil.py").write_text("raise SystemExit('ran')")
    (folder / "model/pytorch_model.bin").write_bytes(b"")
    out = publish(folder)
    assert not [p.name for p in out.iterdir() if p.suffix in (".py", ".bin")]
    assert "auto_map" not in (out / "config.json").read_text()


def test_publish_takes_the_checkpoint_that_is_asked_for(run):
    folder, model = run()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    model.save_pretrained(folder / "best")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "best")
    out = publish(folder, checkpoint=folder / "best")
    got = AutoModelForMaskedLM.from_pretrained(out).eval()
    assert torch.equal(got(IDS % 40).logits, model(IDS % 40).logits)


def test_a_card_escapes_what_comes_from_outside(run):
    folder, _ = run()
    summary = json.loads((folder / "pretrain.json").read_text())
    (folder / "pretrain.json").write_text(
        json.dumps(summary | dict(device_name="<script>x</script>"))
    )
    assert "<script>" not in (publish(folder) / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("said", ["", "\n", "first\nsecond"])
def test_errors_of_other_libraries_become_one_line(said, tmp_path, monkeypatch):
    "Some say nothing at all."
    import cramnb.hub as hub

    def fail(*words, **options):
        raise OSError(said)

    want = "first" if said.strip() else "OSError"
    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert want in a_line(hub.fetch, "somebody/something")
    monkeypatch.setattr(hub, "load_file", fail)
    assert want in a_line(hub.read_weights, tmp_path)
    api = type("Api", (), dict(whoami=lambda self: {}, create_repo=fail))
    monkeypatch.setattr(publishing, "HfApi", api)
    assert want in a_line(upload, tmp_path, "me/small")


def test_a_card_says_what_the_model_is_not_for(run):
    folder, _ = run()
    text = (publish(folder) / "README.md").read_text(encoding="utf-8")
    for word in ("Intended use, limits and bias", "decisions about people", "at most 128 tokens"):
        assert word in text, word
