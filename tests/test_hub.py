"""In and out of Hugging Face: the original's checkpoints, ordinary folders, model cards."""

import json
import shutil
import types
from dataclasses import asdict, replace

import datasets
import pytest
import torch
from conftest import ROOT, beside, same_numbers
from folders import SCORES, SUMMARY
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers import BertForMaskedLM, pipeline

import cramnb.run.hub as publishing
from cramnb.cli import main
from cramnb.core import CramError, fingerprint
from cramnb.model.encoder import CrammedBertConfig
from cramnb.model.mlm import CrammedBertForMaskedLM, CrammedBertForSequenceClassification
from cramnb.model.original import from_original
from cramnb.recipe import compose, preset, tiny
from cramnb.run.hub import _metadata, convert, publish, publish_corpus, to_bert
from cramnb.text.store import Corpus
from cramnb.text.tokenizer import train_tokenizer

ARCH = json.loads("""{
"architectures": ["ScriptableCrammedBERT"], "num_transformer_layers": 2, "hidden_size": 32,
"intermed_size": 64, "hidden_dropout_prob": 0.1, "norm": "LayerNorm", "norm_eps": 1e-12,
"norm_scheme": "pre", "nonlin": "GELUglu", "tie_weights": true, "decoder_bias": false,
"sparse_prediction": 0.25, "loss": "cross-entropy", "objective_layout": "MLM",
"ffn_layer_frequency": 1, "skip_head_transform": true, "use_bias": false, "final_norm": true,
"num_labels": null, "init": {"type": "normal", "std": 0.02},
"embedding": {"vocab_size": null, "pos_embedding": "scaled-sinusoidal", "dropout_prob": 0.1,
  "pad_token_id": 0, "max_seq_length": 24, "embedding_dim": 32, "normalization": true,
  "stable_low_precision": false},
"attention": {"type": "self-attention", "causal_attention": false, "num_attention_heads": 4,
  "dropout_prob": 0.1, "skip_output_projection": false, "qkv_bias": false,
  "rotary_embedding": false, "seq_op_in_fp32": false, "sequence_op": "torch-softmax"},
"classification_head": {"pooler": "avg", "include_ff_layer": true, "head_dim": 48,
  "nonlin": "Tanh", "classifier_dropout": 0.1}}""")
V1 = json.loads("""{"z_loss_factor": 0, "gradient_checkpointing": false, "layer_fusion": true,
"deepnorm_scaling": false, "layer_drop_theta": null, "recurrent_layers": null,
"layer_macro_type": "transformer"}""")


def arch(first=False, nested=None, **changes):
    "An architecture of the original, small, in the form that its runs save."
    out = ARCH | (V1 | dict(architectures=["ScriptableMaskedLM"]) if first else {}) | changes
    return out | {group: out[group] | values for group, values in (nested or {}).items()}


SIMPLE = dict(nonlin="GELU", decoder_bias=True, use_bias=True, final_norm=False)
SIMPLE["skip_head_transform"] = False
LEARNED = dict(embedding=dict(pos_embedding="learned"), attention=dict(qkv_bias=True))
LEARNED["classification_head"] = dict(pooler="zero_index", head_dim=32)
FIXED = dict(embedding=dict(pos_embedding="sinusoidal"))
NOWHERE = dict(embedding=dict(pos_embedding=None))


def kernel(name):
    return dict(attention=dict(type=name))


VARIANTS = {
    "crammed-bert": arch(),
    "crammed-bert-simple": arch(nested=LEARNED, **SIMPLE),
    "rms": arch(norm="RMSNorm", norm_eps=1e-6),
    "swiglu, sinusoidal": arch(nonlin="SiLUglu", nested=FIXED),
    "no positions": arch(nested=NOWHERE),
    "sanity rotary": arch(nested=NOWHERE | dict(attention=dict(rotary_embedding="sanity"))),
    "no-op rotary": arch(nested=dict(attention=dict(rotary_embedding=True))),
    "separate queries": arch(nested=kernel("huggingface")),
    "bert-c5, flash": arch(True, nested=kernel("flash-attention-impl")),
    "bert-c5, pytorch": arch(True, nested=kernel("pytorch")),
    "bert-c5, self-attention": arch(True),
    "bert-base": arch(True, LEARNED, norm_scheme="post", norm_eps=1e-6, **SIMPLE),
    "bert-original": arch(True, LEARNED, norm_scheme="post", sparse_prediction=False, **SIMPLE),
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


def ours(config, labels=0):
    "One of our models for that architecture, every weight random."
    torch.manual_seed(0)
    first, emb, att = "layer_macro_type" in config, config["embedding"], config["attention"]
    rotary, head = att["rotary_embedding"] == "sanity", config["classification_head"]
    pooling = dict(avg="mean-with-padding", zero_index="first")
    c = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    c |= dict(intermediate_size=64, max_position_embeddings=24, norm_type=config["norm"])
    c["hidden_act"] = dict(GELU="gelu", GELUglu="geglu", SiLUglu="swiglu")[config["nonlin"]]
    c["position_embedding_type"] = "rotary" if rotary else emb["pos_embedding"] or "none"
    c |= {k: config[k] for k in ("norm_eps", "final_norm", "use_bias", "decoder_bias")}
    c |= dict(norm_placement=config["norm_scheme"], deepnorm=first and config["deepnorm_scaling"])
    c["qkv_bias"] = att["qkv_bias"] or att["type"] == "huggingface"
    linear = "linear" if first else "none"
    c["head_transform"] = linear if config["skip_head_transform"] else "dense"
    c |= dict(classifier_pooling=pooling[head["pooler"]], classifier_hidden_size=head["head_dim"])
    c |= dict(num_labels=labels) if labels else {}
    kind = CrammedBertForSequenceClassification if labels else CrammedBertForMaskedLM
    model = kind(CrammedBertConfig(**c)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1) * 0.5)
    return model


IDS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 15:] = MASK[2, 4:] = 0


def same(a, b):
    with torch.no_grad():
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

    def read(name):
        want = load_file(folder / f"{name}.safetensors")
        state = {k[11:]: v for k, v in want.items() if k.startswith("state_dict.")}
        return want, state, json.loads((folder / f"{name}.json").read_text())

    want, state, facts = read("crammed_bert_mlm")
    model = from_original(facts["arch_config"], state)
    same_numbers(model, model(want["input_ids"], labels=want["labels"]), want, facts)
    cls, head, facts = read("crammed_bert_cls3")
    encoder = {k: v for k, v in state.items() if k.startswith("encoder.")}
    model = from_original(facts["arch_config"], encoder | head)
    padded = model(cls["input_ids_padded"], attention_mask=cls["attention_mask"]).logits
    close = dict(atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(cls["input_ids"]).logits, cls["logits_no_mask"], **close)
    torch.testing.assert_close(padded, cls["logits_masked"], **close)


def without(state, name):
    return {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    "wrap, change",
    [
        (lambda c: c, lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()}),
        (lambda c: {"arch": c}, lambda s: without(s, "decoder.weight")),
        (types.MappingProxyType, lambda s: without(s, "encoder.embedding.word_embedding.weight")),
        (lambda c: c | V1 | dict(something_new=None), lambda s: s),  # crammed-bamboo is such a one
    ],
)
def test_wrapped_configurations_prefixes_and_either_name_of_the_tied_matrix(wrap, change):
    config = VARIANTS["crammed-bert"]
    model = ours(config)
    same(from_original(wrap(config), change(theirs(model, config))), model)


def test_a_way_out_that_was_filled_with_noise_is_multiplied_in():
    config = VARIANTS["bert-c5, pytorch"]
    model = ours(config)
    state = theirs(model, config, clobbered=True)
    for i in range(2):  # what the original computes: dense(out_proj(attention))
        w = model.model.layers[i].attention.output.weight
        w.data = w.data @ state[f"encoder.layers.{i}.attn.self_attention.attn.out_proj.weight"]
    got = from_original(config, state)(IDS).logits
    torch.testing.assert_close(got, model(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert-c5, flash", "bert-base"])
def test_a_classifier_saved_with_the_head_of_pretraining(name):
    config = VARIANTS[name]
    model, more = ours(config, 3), theirs(ours(config), config)
    head = {k: v for k, v in more.items() if k.startswith(("prediction_head", "decoder.bias"))}
    same(from_original(config, head | theirs(model, config)), model)


def a_line(call, *words, **options):
    "The one line of the error."
    with pytest.raises(CramError) as told:
        call(*words, **options)
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s.pop("encoder.layers.1.ffn.dense_in.weight"), "dense_in.weight"),
        (lambda s: s.update(odd=torch.ones(32)), "unknown: odd"),
        (lambda s: s.update({"encoder.final_norm.weight": torch.ones(31)}), "expected (32,"),
        (lambda s: s.update({"decoder.weight": s["decoder.weight"] + 1}), "not tied"),
    ],
)
def test_weights_that_do_not_fit_are_named(spoil, message):
    config = VARIANTS["crammed-bert"]
    state = theirs(ours(config), config)
    spoil(state)
    assert message in a_line(from_original, config, state)


@pytest.mark.parametrize(
    "config", [arch(nonlin="ReLU"), arch(True, recurrent_layers=2), without(ARCH, "hidden_size")]
)
def test_architectures_that_cannot_be_repeated_are_refused(config):
    a_line(from_original, config, theirs(ours(ARCH), ARCH))


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
    same(AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval(), model)
    assert len(pipeline("fill-mask", str(tmp_path / "out"))("the [MASK] sat")) == 5
    kind = AutoModelForSequenceClassification
    assert kind.from_pretrained(tmp_path / "out", num_labels=3).config.num_labels == 3
    for words in ((source, tmp_path / "out"), (tmp_path / "out", tmp_path / "twice")):
        assert main(["convert", *map(str, words)]) == 2


def pickled(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def infinite(source):
    state = load_file(source / "model.safetensors")
    save_file({k: v / 0 for k, v in state.items()}, source / "model.safetensors")


def outside(source):
    index = json.dumps({"weight_map": {"a": "../x"}})
    (source / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize("spoil", [pickled, infinite, outside])
def test_hostile_weights_cost_one_line_and_nothing_is_written(spoil, tmp_path):
    spoil(source := write_original(tmp_path / "source", ARCH, ours(ARCH), tokenizer=False))
    told = a_line(convert, source, tmp_path / "out")
    assert spoil is not pickled or "safetensors/convert" in told
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
        summary = dict(device_name="a card | <b>", tokens=456, heldout=2.5, unigram=6.5)
        summary["model"] = fingerprint(folder / "model/model.safetensors")
        scores = [dict(name="rte", metric="accuracy", median=0.6)]
        scores += [dict(name="cola", metric="matthews", median=0.2)]
        files = {
            "recipe.json": asdict(recipe),
            "pretrain.json": SUMMARY | summary,
            "glue.json": SCORES | dict(protocol=asdict(recipe.eval), scores=scores),
        }
        for name, values in files.items():
            (folder / name).write_text(json.dumps(values))
        (folder / "metrics.jsonl").write_text("")
        (folder / "glue.md").write_text("| task | score |\n|---|---|\n| rte | 60.0 |\n")
        return folder, model.eval()

    return make


def test_publish_writes_a_card_that_the_hub_reads_and_no_code(run, tmp_path, monkeypatch):
    folder, model = run()
    config = folder / "model/config.json"
    remote = {"AutoModelForMaskedLM": "evil.Model", "AutoConfig": "evil.Config"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": remote}))
    (folder / "model/evil.py").write_text("raise SystemExit('ran')")
    (folder / "model/pytorch_model.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "name=small"]) == 0
    out = folder / "hub"
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    assert {r.metric_value for r in card.data.eval_results} == {0.6, 0.2}
    for fact in ("456", "2.500 nats", "rte | 60.0", "0.001"):
        assert fact in card.text, fact
    assert "<b>" not in card.text
    there = {p.name for p in out.iterdir()}
    parts = {f"{part}_budget_hours_24.json" for part in ("arch", "data", "train")}
    assert parts | {"model.safetensors", "tokenizer.json", "config.json"} <= there
    assert not [name for name in there if name.endswith((".py", ".bin"))]
    assert "auto_map" not in (out / "config.json").read_text()
    again = AutoModelForMaskedLM.from_pretrained(out).eval()
    assert torch.equal(again(IDS % 40).logits, model(IDS % 40).logits)


BERT = dict(norm_placement="post", position_embedding_type="learned", hidden_act="gelu")
BERT |= dict(head_transform="dense", final_norm=False, qk_norm=False, neighbours=False)
BERT["zero_init_residual"] = False


@pytest.mark.parametrize("biases", [True, False])
def test_a_bert_shaped_model_needs_no_cramnb(biases, run):
    folder, model = run(**BERT, use_bias=biases, qkv_bias=biases, decoder_bias=biases)
    out = publish(folder, form="bert")
    bert = BertForMaskedLM.from_pretrained(out).eval()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    got = bert(IDS % 40, attention_mask=MASK).logits
    want = model(IDS % 40, attention_mask=MASK).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_other_models_say_why_they_are_no_bert(run):
    folder, model = run()
    told = a_line(publish, folder, form="bert")
    assert "norm_placement=pre" in told and "rotary" in told
    assert not (folder / "hub-bert").exists()
    a_line(to_bert, model)


class Hub:
    "A stand-in that keeps what it gets."

    def __init__(self, kept, known=True):
        self.kept, self.known, self.calls = kept, known, []

    def __call__(self):
        return self

    def whoami(self):
        if not self.known:
            raise OSError("")  # some say nothing at all

    def create_repo(self, name, repo_type, exist_ok):
        self.calls.append((name, repo_type))

    def upload_folder(self, repo_id, repo_type, folder_path):
        shutil.copytree(folder_path, self.kept)
        return f"https://example.org/{repo_id}"


def test_push_asks_who_is_there_and_says_where_the_folder_is(run, tmp_path, monkeypatch):
    folder, _ = run()
    hub, said = Hub(tmp_path / "kept", known=False), []
    monkeypatch.setattr(publishing, "HfApi", hub)
    told = a_line(publish, folder, push="me/small")
    assert "hf auth login` (OSError)" in told and str(folder / "hub") in told and not hub.calls
    hub.known = True
    publish(folder, push="me/small", say=said.append)
    assert hub.calls == [("me/small", "model")] and "me/small" in said[0]
    assert (hub.kept / "README.md").read_text() == (folder / "hub/README.md").read_text()


def test_a_corpus_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    "In several files, and `data=tokens` reads it."
    monkeypatch.setattr(publishing, "PART", 64)
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(publishing, "HfApi", hub)
    words = ["data=files", f"data.files={ROOT / 'README.md'},{ROOT / 'CONTRIBUTING.md'}"]
    words += ["data.trash_cutoff=0"]  # these pages hold many tables and commands
    text = compose([*words, "data.vocab_size=512", "data.seq_length=16"]).data
    corpus = Corpus.build(text, tmp_path / "data")
    folder = publish_corpus(corpus, tmp_path / "rows", "me/rows")
    assert hub.calls == [("me/rows", "dataset")]
    assert len(list((folder / "data").iterdir())) == -(-len(corpus.rows) // 64) > 1
    again = datasets.load_dataset(str(hub.kept), split="train", cache_dir=str(tmp_path / "cache"))
    assert again[0]["input_ids"] == list(corpus.rows[0])
    size = f"data.vocab_size={len(corpus.tokenizer)}"
    words = ["data=pile-readymade", f"data.hub_path={hub.kept}", size, "data.seq_length=16"]
    back = Corpus.build(compose(words).data, tmp_path / "data")
    there = sorted(map(bytes, [*back.rows[:], *back.heldout[:]]))
    assert there == sorted(map(bytes, corpus.rows[:]))


def test_only_tasks_of_glue_are_announced_as_glue():
    score = dict(metric="accuracy", median=0.5)
    scores = [score | dict(name=n) for n in ("order", "rte", "mnli_mm", "own-rte")]
    found = _metadata("x", dict(source="docstrings"), dict(scores=scores)).eval_results
    assert [r.dataset_config for r in found] == ["rte", "mnli_mismatched"]
