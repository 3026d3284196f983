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
    pipeline,
)

import cramnb.run.hub as publishing
from cramnb.cli import main
from cramnb.model.encoder import CrammedBertConfig
from cramnb.run.hub import convert, publish, publish_corpus, to_bert, upload, why_not_bert
from cramnb.model.original import from_original
from cramnb.model.mlm import CrammedBertForMaskedLM, CrammedBertForSequenceClassification
from cramnb.core import CramError
from folders import SCORES, SUMMARY
from cramnb.recipe import compose, preset, tiny, to_dict
from cramnb.text.store import Corpus
from cramnb.text.tokenizer import train_tokenizer

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


NAMES = (  # ours, the original's, tried in order
    ("model.embeddings.word_embeddings", "encoder.embedding.word_embedding"),
    ("model.embeddings.position.scale", "encoder.embedding.pos_embedding.scale_factor"),
    ("model.embeddings.position.table", "encoder.embedding.pos_embedding.embedding"),
    ("model.embeddings.norm", "encoder.embedding.norm"),
    ("model.", "encoder."),
    ("attention_out_norm", "norm3"),
    ("mlp_out_norm", "norm4"),
    ("attention_norm", "norm1"),
    ("mlp_norm", "norm2"),
    ("attention.output", "attn.dense"),
    ("mlp.input", "ffn.dense_in"),
    ("mlp.output", "ffn.dense_out"),
    ("classifier.dense", "pooler.dense"),
    ("classifier.out", "head"),
)


def named(name, config):
    "One of our names as the original spells it."
    head = "prediction_head" if config["skip_head_transform"] else "prediction_head.dense"
    if name.startswith("head."):
        return name.replace("head.dense", head).replace("head.norm", "prediction_head.norm", 1)
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    rms = config["norm"] == "RMSNorm" and "norm" in name
    return name.replace(".weight", ".learnable_scale") if rms else name


PACKED = {
    "self-attention": "query_key_value",
    "pytorch": "attn.in_proj",
    "flash-attention-impl": "flash_mha.Wqkv",
}


def theirs(model, config, clobbered=False):
    "Our weights under the original's names, from its module tree, apart from the code under test."
    kind, out = config["attention"]["type"], {}
    for name, p in model.named_parameters():
        p, name = p.detach().clone(), named(name, config)
        layer, _, end = name.partition("attention.qkv.")
        layer += "attn.self_attention."
        if not end:
            out[name] = p
        elif kind == "huggingface":
            parts = zip(("query", "key", "value"), p.chunk(3))
            out |= {f"{layer}{q}.{end}": part for q, part in parts}
        else:
            dot = "_" if kind == "pytorch" else "."
            packed = to_heads(p, 4) if kind == "self-attention" else p
            out[layer + PACKED[kind] + dot + end] = packed
    for i in range(config["num_transformer_layers"]):
        layer = f"encoder.layers.{i}."
        attention = f"{layer}attn.self_attention."
        if kind == "self-attention":
            out[f"{attention}norm_factor"] = torch.tensor(8**-0.5)
        if config["attention"]["rotary_embedding"]:
            out[f"{attention}rotary_emb.inv_freq"] = torch.rand(4)
        if "layer_macro_type" in config:
            out[f"{layer}alpha"] = torch.tensor(4**0.25 if config["deepnorm_scaling"] else 1.0)
        if kind == "pytorch":
            mix = torch.randn(32, 32) / 6 if clobbered else torch.eye(32)
            out[f"{attention}attn.out_proj.weight"] = mix
            out[f"{attention}attn.out_proj.bias"] = torch.zeros(32)
    if "layer_macro_type" in config:
        out["encoder.p"] = torch.tensor(1.0)
    if config["embedding"]["pos_embedding"] == "learned":
        out["encoder.embedding.pos_embedding.position_ids"] = torch.arange(24)[None]
    if hasattr(model, "decoder"):
        out["decoder.weight"] = out["encoder.embedding.word_embedding.weight"]
    return out


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


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s.pop("encoder.layers.1.ffn.dense_in.weight"), "1 missing: .*dense_in.weight"),
        (lambda s: s.update(odd=torch.ones(32)), "unknown: odd"),
        (lambda s: s.update({"encoder.final_norm.weight": torch.ones(31)}), "expected .32,"),
        (lambda s: s.update({"decoder.weight": s["decoder.weight"] + 1}), "not tied"),
    ],
)
def test_weights_that_do_not_fit_are_named(spoil, message):
    config = VARIANTS["crammed-bert"]
    state = theirs(ours(config), config)
    spoil(state)
    with pytest.raises(CramError, match=message):
        from_original(config, state)


@pytest.mark.parametrize("name", ["bert-c5, flash", "bert-base"])
def test_a_classifier_saved_with_the_head_of_pretraining(name):
    config = VARIANTS[name]
    model, more = ours(config, 3), theirs(ours(config), config)
    head = {k: v for k, v in more.items() if k.startswith(("prediction_head", "decoder.bias"))}
    same(from_original(config, head | theirs(model, config)), model)


def test_switches_that_are_off_and_keys_of_the_first_version_in_a_later_one():
    config = VARIANTS["crammed-bert"]
    model = ours(config)
    state = theirs(model, config)
    same(
        from_original(config | V1 | dict(something_new=None, another=False), state), model
    )  # crammed-bamboo is such a one
    with pytest.raises(CramError, match="something_new"):
        from_original(config | dict(something_new=1), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_taken(dtype):
    config = VARIANTS["crammed-bert"]
    state = {k: v.to(dtype) for k, v in theirs(ours(config), config).items()}
    assert from_original(config, state).dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        arch(nonlin="ReLU"),
        arch(hidden_sise=3),
        arch(True, recurrent_layers=2),
        arch(nested=dict(embedding=dict(embedding_dim=16))),
        arch(nested=dict(attention=dict(causal_attention=True))),
        arch(num_transformer_layers="2"),
        arch(norm_eps="../../etc/passwd"),
        arch(hidden_dropout_prob={}),
        arch(attention="self-attention"),
        {k: v for k, v in arch().items() if k != "hidden_size"},
        "crammed-bert",
    ],
)
def test_architectures_that_cannot_be_repeated_are_refused(config):
    known = VARIANTS["crammed-bert"]
    a_line(from_original, config, theirs(ours(known), known))


def a_line(call, *words, **options):
    "The one line of the error."
    with pytest.raises(CramError) as told:
        call(*words, **options)
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


# --- convert


def vocabulary():
    "A tokenizer of a few words."
    data = replace(preset("data", "docstrings"), vocab_size=26)
    return train_tokenizer(["the cat sat on the mat"] * 5, data)


def write_original(folder, config, model, tokenizer=True):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"arch": config, "model_type": "crammedBERT"}))
    state = {k: v.contiguous().clone() for k, v in theirs(model, config).items()}
    save_file(state, folder / "model.safetensors")
    if tokenizer:
        vocabulary().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["crammed-bert", "bert-c5, flash"])
def test_convert_writes_an_ordinary_folder(name, tmp_path, capsys):
    model = ours(VARIANTS[name])
    source = write_original(tmp_path / "source", VARIANTS[name], model)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    same(again.eval(), model)
    assert len(pipeline("fill-mask", str(tmp_path / "out"))("the [MASK] sat")) == 5
    kind = AutoModelForSequenceClassification
    assert kind.from_pretrained(tmp_path / "out", num_labels=3).config.num_labels == 3
    for words in ((source, tmp_path / "out"), (tmp_path / "out", tmp_path / "twice")):
        assert main(["convert", *map(str, words)]) == 2


def test_pickles_are_refused_with_a_way_out(tmp_path):
    config = VARIANTS["crammed-bert"]
    source = write_original(tmp_path / "source", config, ours(config), tokenizer=False)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "safetensors/convert" in a_line(convert, source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


# --- publish


@pytest.fixture
def run(tmp_path):
    "A finished run, as `cramnb pretrain` and `cramnb eval` leave it."

    def make(**changes):
        recipe, folder = tiny("name=small", "budget=24"), tmp_path / "runs/small"
        size = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
        shape = replace(recipe.arch, **size, intermediate_size=64, **changes)
        recipe = replace(recipe, arch=shape)
        torch.manual_seed(0)
        values = {k: v for k, v in asdict(shape).items() if k != "model_type"}
        model = CrammedBertForMaskedLM(CrammedBertConfig(vocab_size=60, **values))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        model.save_pretrained(folder / "model")
        vocabulary().save_pretrained(folder / "model")
        summary = dict(device_name="a card", parameters=123, tokens=456, updates=7, torch="2")
        scores = [dict(name="rte", metric="accuracy", median=0.6)]
        scores += [dict(name="cola", metric="matthews", median=0.2)]
        files = {
            "recipe.json": to_dict(recipe),
            "pretrain.json": SUMMARY | summary | dict(heldout=2.5, unigram=6.5),
            "glue.json": SCORES | dict(protocol=asdict(recipe.eval), scores=scores),
        }
        for name, values in files.items():
            (folder / name).write_text(json.dumps(values))
        (folder / "metrics.jsonl").write_text("")
        (folder / "glue.md").write_text("| task | score |\n|---|---|\n| rte | 60.0 |\n")
        return folder, model.eval()

    return make


def test_publish_writes_a_card_that_the_hub_reads(run, tmp_path, monkeypatch):
    folder, model = run()
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "name=small"]) == 0
    out = folder / "hub"
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    assert {r.metric_value for r in card.data.eval_results} == {0.6, 0.2}
    for fact in ("import cramnb", "456", "2.500 nats", "rte | 60.0", "0.001", "median of 1 trial"):
        assert fact in card.text, fact
    parts = {f"{part}_budget_hours_24.json" for part in ("arch", "data", "train")}
    parts |= {"model.safetensors", "tokenizer.json", "config.json"}
    assert parts <= {p.name for p in out.iterdir()}
    again = AutoModelForMaskedLM.from_pretrained(out).eval()
    assert torch.equal(again(IDS % 40).logits, model(IDS % 40).logits)


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
    "words",
    [
        ["convert"],
        ["convert", "nowhere", "out"],
        ["convert", ".", "out"],
        ["publish", "name=small", "format=onnx"],
        ["publish", "name=small", "push=nobody"],
        ["publish", "name=smal"],
    ],
)
def test_mistakes_cost_one_line(words, run, tmp_path, monkeypatch, capsys):
    folder, _ = run()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list(folder.glob("hub*")) and not (tmp_path / "out").exists()


# --- hostile folders: one line, nothing written


WEIGHTS = {
    "transposed": lambda s: {k: v.T if v.dim() == 2 else v for k, v in s.items()},
    "bool": lambda s: {k: v > 0 for k, v in s.items()},
    "scalars": lambda s: {k: v.sum() for k, v in s.items()},
    "not finite": lambda s: {k: v * float("nan") for k, v in s.items()},
    "none": lambda s: {},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_hostile_weights_cost_one_line(name, tmp_path):
    config = VARIANTS["bert-c5, pytorch"]
    source = write_original(tmp_path / "source", config, ours(config), tokenizer=False)
    state = WEIGHTS[name](theirs(ours(config), config))
    save_file({k: v.contiguous().clone() for k, v in state.items()}, source / "model.safetensors")
    a_line(convert, source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("index", [[], {"weight_map": {"a": 3}}, {"weight_map": {"a": "../x"}}])
def test_a_hostile_index_costs_one_line(index, tmp_path):
    config = VARIANTS["crammed-bert"]
    source = write_original(tmp_path / "source", config, ours(config))
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    a_line(convert, source, tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "key gone", "nan", "tokenizer.json", "recipe.json"])
def test_publish_writes_only_what_it_has_loaded(damage, run):
    folder, _ = run()
    weights = folder / "model/model.safetensors"
    state = load_file(weights)
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "key gone":
        save_file(dict(list(state.items())[1:]), weights, metadata={"format": "pt"})
    elif damage == "nan":
        save_file({k: v / 0 * 0 for k, v in state.items()}, weights, metadata={"format": "pt"})
    else:
        next(folder.rglob(damage)).write_text('{"train": null}')
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


def test_a_card_escapes_what_comes_from_outside(run):
    folder, _ = run()
    summary = json.loads((folder / "pretrain.json").read_text())
    (folder / "pretrain.json").write_text(
        json.dumps(summary | dict(device_name="<script>x</script>"))
    )
    assert "<script>" not in (publish(folder) / "README.md").read_text(encoding="utf-8")


def test_errors_of_other_libraries_become_one_line(tmp_path, monkeypatch):
    "Some say nothing at all."

    def fail(*words, **options):
        raise OSError("")

    monkeypatch.setattr(publishing, "snapshot_download", fail)
    assert "OSError" in a_line(publishing.fetch, "somebody/something")
    monkeypatch.setattr(publishing, "load_file", fail)
    assert "OSError" in a_line(publishing.read_weights, tmp_path)
    api = type("Api", (), dict(whoami=lambda self: {}, create_repo=fail))
    monkeypatch.setattr(publishing, "HfApi", api)
    assert "OSError" in a_line(upload, tmp_path, "me/small")
