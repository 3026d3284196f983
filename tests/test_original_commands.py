"""Command lines of the original: its README, its option tables; local text in place of the hub."""

import json
import shutil

import pytest

from cramnb.cli import main, read_command
from cramnb.core import CramError
from cramnb.options import flat
from cramnb.recipe import ALIASES, IGNORED, RETIRED, VALUES, compose, translate

FINAL = "amp_b8192_cb_o4_final"
README = {
    "install": "pretrain name=test arch=hf-bert-base train=bert-base data=sanity-check-2 "
    "dryrun=True impl.microbatch_size=2",
    "first": "pretrain dryrun=True",
    "prepare": "pretrain data=pile-readymade dryrun=True",
    "final": f"pretrain name={FINAL} arch=crammed-bert train=bert-o4 data=pile-readymade",
    "final eval": f"eval eval=GLUE_sane name={FINAL} eval.checkpoint=latest "
    "impl.microbatch_size=16 impl.shuffle_in_dataloader=True impl.compile_torch=False",
    "bert": "pretrain name=bert data=bookcorpus-wikipedia arch=bert-original train=bert-original "
    "budget=10000000",
    "bert4gpu": "pretrain name=bert4gpu data=bookcorpus-wikipedia arch=bert-original "
    "train=bert-original budget=10000000 impl.fullgraph=false "
    "impl._inductor_vars.triton.cudagraphs=False",
    "eval hf": "eval eval=GLUE_sane eval/tasks=rte name=bert-finetuning "
    "eval.checkpoint=hf://bert-base-uncased impl.shuffle_in_dataloader=True "
    "impl.compile_torch=False impl.microbatch_size=16",
    "eval local": f"eval eval=GLUE_sane eval/tasks=rte name={FINAL} eval.checkpoint=latest "
    "impl.shuffle_in_dataloader=True impl.compile_torch=False",
    "cpu check": "pretrain name=cpu_multi_check dryrun=True data=sanity-check-2 "
    "impl.dist_backend=gloo impl.fullgraph=false impl._inductor_vars.triton.cudagraphs=False",
    "old final": "pretrain name=amp_b4096_c5_o3_final arch=bert-c5 train=bert-o3 "
    "train.batch_size=4096 data=c4-subset-processed",
    "sanity check": "pretrain data=sanity-check-1 arch=hf-bert-tiny dryrun=True",
}
SMALL = "arch.hidden_size=16 arch.num_attention_heads=2 arch.intermediate_size=32 "
SMALL = [*(SMALL + "arch.num_hidden_layers=2").split(), "impl.microbatch_size=2"]


@pytest.mark.parametrize("words", README.values(), ids=list(README))
def test_each_command_of_the_readme_is_understood_as_it_stands(words, monkeypatch):
    monkeypatch.delenv("CRAMNB_DATA", raising=False)
    told = []
    verb, recipe = read_command(words.split() + ["base_dir=x", "name=given"], told.append)
    assert verb in ("pretrain", "eval") and recipe.name == "given"
    assert len(told) == sum(
        w.startswith(("impl.fullgraph", "impl._ind", "impl.shuffle")) for w in words.split()
    )
    assert all("changes nothing here" in t for t in told)


def glue(folder):
    "Tiny files for the eight tasks, as GLUE has them."
    from cramnb.judge.tasks import TASKS

    for name in compose(["eval=GLUE_sane"]).eval.tasks.split(","):
        task = TASKS[name]
        (folder / name).mkdir(parents=True)
        parts = (
            ("train", "validation")
            if name != "mnli"
            else ("train", "validation_matched", "validation_mismatched")
        )
        for part in parts:
            labels = (
                [0.5 * (n % 7) for n in range(40)]
                if task.num_labels == 1
                else [n % 2 for n in range(40)]
            )
            rows = [
                dict({f: f"word {n} of the list" for f in task.fields}, label=y, idx=n)
                for n, y in enumerate(labels)
            ]
            (folder / name / f"{part}.jsonl").write_text(
                "".join(json.dumps(r) + "\n" for r in rows)
            )
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory, texts):
    "A folder with text, GLUE, and a run under the name that the README gives it."
    home = tmp_path_factory.mktemp("original")
    shutil.copy(texts, home / "docs.jsonl")
    glue(home / "glue")
    assert main(local(README["final"], home)) == 0
    return home


def local(words, home):
    "The same command with local text in place of the hub, and a model that a CPU can train."
    kept = [
        w for w in words.split() if not w.startswith(("data=", "budget=")) or "sanity-check-1" in w
    ]
    text = f"data=files data.files={home / 'docs.jsonl'} data.vocab_size=800 data.heldout=0.2 "
    text = [] if "sanity-check-1" in words else (text + "data.deduplicate=False").split()
    places = [f"impl.path={home / 'corpora'}", f"base_dir={home / 'runs'}"]
    if words.startswith("eval"):
        few = f"eval.glue_dir={home / 'glue'} eval.epochs=1 eval.max_train_examples=32"
        return kept + text + few.split() + places
    more = SMALL if "microbatch" not in words else SMALL[:-1]
    train = ["budget=1s", "train.eval_rows=8", "train.batch_size=4"]
    return kept + text + more + train + places


@pytest.mark.parametrize("which", [k for k in README if k != "eval hf"])
def test_each_command_of_the_readme_runs_on_local_text(which, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = main(local(README[which], home))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert ("Dry run: 2 updates" in out) == ("dryrun=True" in README[which])
    if "eval" in which:
        assert "| rte | accuracy |" in out
    if which == "final eval":
        assert "Mean of" in out and "| stsb |" in out


def test_evaluating_a_foreign_folder_writes_into_the_run_that_was_named(home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    model = home / "runs" / FINAL / "model"
    before = sorted(p.name for p in model.parent.iterdir())
    words = local(README["eval hf"].replace("hf://bert-base-uncased", str(model)), home)
    assert main(words) == 0, capsys.readouterr().err
    assert (home / "runs/bert-finetuning/eval").is_dir()
    assert sorted(p.name for p in model.parent.iterdir()) == before


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("train/optim=adam", "train.optimizer", "adamw"),
        ("train/optim=adam_classic", "train.optimizer", "adam"),
        ("train.optim.lr=2e-3", "train.lr", 2e-3),
        ("train.optim.betas=[0.9,0.95]", "train.betas", [0.9, 0.95]),
        ("arch.num_transformer_layers=4", "arch.num_hidden_layers", 4),
        ("arch.nonlin=GELUglu", "arch.hidden_act", "geglu"),
        ("arch.attention.rotary_embedding=True", "arch.position_embedding_type", "rotary"),
        ("arch.classification_head.pooler=avg", "arch.classifier_pooling", "mean"),
        (
            "eval.arch_modifications.classification_head.pooler=zero_index",
            "eval.classifier_pooling",
            "first",
        ),
        ("data.max_entries_in_raw_dataset=8e6", "data.max_documents", 8_000_000),
        ("data.remove_trash=False", "data.trash_cutoff", 0.0),
        ("eval/tasks=rte", "eval.tasks", "rte"),
        ("train.gradient_clipping=null", "train.gradient_clipping", 0.0),
        ("impl.microbatch_size=null", "impl.microbatch_size", "auto"),
        ("impl.mixed_precision=False", "impl.precision", "float32"),
        ("impl.early_termination.enabled=True", "train.early_termination", True),
        ("+train.steps=900000", "train.max_updates", 0),
    ],
)
def test_words_of_the_original_mean_ours(word, key, value):
    assert flat(compose([word]))[key] == value


TABLES = """
impl: path local_staging_dir forbid_dataset_preprocessing temporary_corpus max_raw_chunk_size
print_loss_every_nth_step save_intermediate_checkpoints save_every_nth_step resume_run_after_preempt
troubleshoot_strategy early_termination.enabled early_termination.budget
early_termination.loss_threshold
microbatch_size threads benchmark deterministic non_blocking tf32_allowed matmul_precision
pad_to_multiple_of shuffle_in_dataloader pin_memory prefetch_factor persistent_workers
default_precision
dist_backend sharing_strategy enable_huggingface_offline_mode local_rank push_to_huggingface_hub
hf_directoy_name add_env_variables name mixed_precision grad_scaling mixed_precision_target_dtype
zero_redundancy_optimizer broadcast_buffers bucket_cap_mb gradient_as_bucket_view static_graph
foreach_optimizer compile_torch mode dynamic fullgraph backend _inductor_vars
_inductor_vars.max_autotune_gemm _inductor_vars.max_autotune_pointwise
_inductor_vars.triton.cudagraphs
_inductor_vars.triton.cudagraph_trees _inductor_vars.permute_fusion _inductor_vars.shape_padding
enable_mem_efficient_sdp enable_math_sdp enable_flash_sdp optimizer_context train_batch_size
train_micro_batch_size_per_gpu optimizer gradient_clipping scheduler.type
scheduler.params.warmup_min_lr
fp16.enabled zero_optimization.stage zero_optimization.offload_param.device steps_per_print
wall_clock_breakdown dump_state flops_profiler.enabled tensorboard.enabled tensorboard.output_path
jit
jit_instruction_type no_jit_compilation data_structure
train: name optim.type optim.lr optim.betas optim.eps optim.weight_decay optim.amsgrad optim.fused
optim_mod.name limited_decay_keys warmup_steps cooldown_steps steps scheduler batch_size
batch_size_ramp
gradient_clipping pretrain_in_train_mode objective.name objective.mlm_probability
objective.use_80_20_rule objective.disable_mlm objective.token_drop reverse_dataset_order budget
sequence_curriculum.lengths weight_averaging.type gradinit.enabled
arch: architectures num_transformer_layers hidden_size intermed_size hidden_dropout_prob norm
norm_eps
norm_scheme nonlin tie_weights decoder_bias sparse_prediction loss objective_layout
embedding.vocab_size
embedding.pos_embedding embedding.dropout_prob embedding.pad_token_id embedding.max_seq_length
embedding.embedding_dim embedding.normalization embedding.stable_low_precision attention.type
attention.causal_attention attention.num_attention_heads attention.dropout_prob
attention.skip_output_projection attention.qkv_bias attention.rotary_embedding
attention.seq_op_in_fp32
attention.sequence_op init.type init.std ffn_layer_frequency skip_head_transform use_bias final_norm
num_labels classification_head.pooler classification_head.include_ff_layer
classification_head.head_dim
classification_head.nonlin classification_head.classifier_dropout z_loss_factor
gradient_checkpointing
layer_fusion attention.high_level_fusion attention.low_level_fusion attention.hybrid_layers
deepnorm_scaling layer_drop_theta recurrent_layers layer_macro_type setup training_scheme
maximal_recurrence attention_probs_dropout_prob hidden_act initializer_range intermediate_size
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers pad_token_id
position_embedding_type type_vocab_size use_cache
data: name sources normalizer.force_lowercase normalizer.strip_accents
normalizer.force_english_keyboard
normalizer.whitespace_escape tokenizer vocab_size seq_length include_cls_token_in_corpus
include_sep_token_in_corpus use_type_ids max_entries_in_raw_dataset max_seq_in_tokenized_dataset
named_entity_simplification remove_whitespaces remove_trash trash_cutoff deduplicate_entries
deduplication_threshold ordering sources.c4.provider
eval: name tasks optim.lr optim.weight_decay optim.betas optim.eps optim.type batch_size epochs
scheduler
warmup_steps max_seq_length arch_modifications.classification_head.pooler
arch_modifications.classification_head.include_ff_layer evaluation_set checkpoint path
batch_size_ramp
gradient_clipping limited_decay_keys optim_mod.name eval_in_train_mode cooldown_steps steps
testing.batch_size
wandb: enabled entity project tags
""".split()


def test_every_key_of_the_originals_tables_is_known():
    group, unknown, known = "", [], flat(compose([]))
    for word in TABLES + [
        "train/optim",
        "train/optim_mod",
        "data/sources",
        "eval/tasks",
        "eval/optim",
        "hydra.run.dir",
    ]:
        if word.endswith(":"):
            group = word[:-1]
            continue
        key = word if "/" in word or word.startswith("hydra") else f"{group}.{word}"
        ours, value, note = translate(key, "1")
        if not (note or value is None or ours in known):
            unknown.append(key)
        assert not (note and ours in known), f"{key} is an option here, and said to do nothing"
    assert not unknown


WORDS = {"impl.microbatch_size", "impl.recompute", "impl.compile_torch"}  # our keys, its words


def test_no_key_stands_twice():
    assert (
        not set(ALIASES) & set(IGNORED)
        and not set(ALIASES) & set(flat(compose([])))
        and set(VALUES) - WORDS <= set(ALIASES)
    )


@pytest.mark.parametrize("group, name", [(g, n) for g, names in RETIRED.items() for n in names])
def test_a_preset_that_is_gone_names_the_nearest(group, name):
    with pytest.raises(CramError, match=f"{group}={name} .*{RETIRED[group][name][:4]}"):
        compose([f"{group}={name}"])


def test_a_key_that_points_to_one_of_ours_points_to_one_that_is_there():
    assert {ours for ours in IGNORED.values() if ours} <= {"data", *flat(compose([]))}


def test_a_card_that_was_a_preset_is_left_to_auto_and_says_so():
    name, told = "rtx-4090", []
    assert compose([f"impl={name}"], say=told.append) == compose([])
    assert len(told) == 1 and f"impl={name}" in told[0] and "auto" in told[0]


def test_a_word_that_sets_nothing_is_told_and_an_empty_one_is_refused():
    told = []
    compose(["data=wikipedia", "data.remove_trash=True"], say=told.append)
    assert told == ["data.remove_trash=True changes nothing here: see data.trash_cutoff."]
    with pytest.raises(CramError):
        compose(["arch="])
