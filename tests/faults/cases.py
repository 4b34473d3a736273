"""Faulty configs, one mistake each: an edit of ``base.yaml``, or override words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BASE = (Path(__file__).parent / "base.yaml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """What is edited, or said on the command line."""

    name: str
    old: str = ""
    new: str = ""
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        assert self.old in BASE, self.name
        return BASE.replace(self.old, self.new, 1) if self.old else BASE + self.new


def _override(name: str, *words: str) -> Case:
    return Case(name, words=words)


CASES = [
    # names, at every level
    Case("top-level entry misspelt", "gradient_clipper:", "gradient_cliper:"),
    Case("optional top-level entry misspelt", "mfu_calculator:", "mfu_calculatr:"),
    Case("shared entry misspelt", "collate_fn: gpt", "colate_fn: gpt"),
    Case("section misspelt", "  intervals:", "  intervalls:"),
    Case("setting misspelt", "    gradient_accumulation_steps: 1", "    gradient_accumulation_step: 1"),
    Case("optional setting misspelt", "  paths: {data", "  sed: 3\n  paths: {data"),
    Case("field misspelt", "    eps: 1e-8", "    epz: 1e-8"),
    Case(
        "optional field misspelt",
        "  block_names: [GPT2Block]",
        "  block_names: [GPT2Block]\n  reshard_after_foward: false",
    ),
    Case("field of a nested component misspelt", "shuffle: true", "shufle: true"),
    Case("field of a nested section misspelt", "param_dtype: FP_32", "param_dtyp: FP_32"),
    Case("field in a list misspelt", "seq_length_dim: -2", "seq_len_dim: -2"),
    Case("variant misspelt in the short form", "checkpoint_saving: dcp", "checkpoint_saving: dpc"),
    Case("variant misspelt in the flat form", "variant_key: gpt2\n", "variant_key: gtp2\n"),
    Case("variant misspelt in the canonical form", "variant_key: adam_w", "variant_key: adamw"),
    Case("component key misspelt", "component_key: optimizer", "component_key: optimiser"),
    Case("variant of another kind", "checkpoint_saving: dcp", "checkpoint_saving: adam_w"),
    Case(
        "variant that is known, but not available", "progress_subscriber", "profiler: no_profiler\nprogress_subscriber"
    ),
    Case("enum misspelt", "param_dtype: FP_32", "param_dtype: FP32"),
    Case("nested kind misspelt", "norm_type: rms_norm", "norm_type: rmsnorm"),
    Case("block name misspelt", "[GPT2Block]", "[GPT2Blok]"),
    Case("one block name of two misspelt", "[GPT2Block]", "[GPT2Block, Linaer]"),
    Case("weight decay group misspelt", "[embedding, layernorm]", "[embeding, layernorm]"),
    # values
    Case("word for a number", "n_layer: 2", "n_layer: two"),
    Case("quoted number", "lr: 0.01", 'lr: "1e-5"'),
    Case("yes for a number", "n_layer: 2", "n_layer: yes"),
    Case("yes for a text", "dataloader_tag: train", "dataloader_tag: yes"),
    Case("octal-looking number", "n_layer: 2", "n_layer: 08"),
    Case("octal number", "vocab_size: 128", "vocab_size: 0200"),
    Case("base-60 number", "vocab_size: 128", "vocab_size: 2:08"),
    Case("null for a number", "n_layer: 2", "n_layer: null"),
    Case("nothing for a number", "n_layer: 2", "n_layer:"),
    Case("number for a truth value", "bias: false", "bias: 2"),
    Case("word for a truth value", "bias: false", 'bias: "no"'),
    Case("fraction for a whole number", "n_layer: 2", "n_layer: 2.5"),
    Case("negative where positive", "vocab_size: 128", "vocab_size: -128"),
    Case("not a number", "lr: 0.01", "lr: .nan"),
    Case("infinite", "max_norm: 1.0", "max_norm: .inf"),
    Case("zero steps", "checkpointing_interval_in_steps: 4", "checkpointing_interval_in_steps: 0"),
    Case("list too short", "betas: [0.9, 0.95]", "betas: [0.9]"),
    Case("list too long", "betas: [0.9, 0.95]", "betas: [0.9, 0.95, 0.99]"),
    Case("number where a list is wanted", "betas: [0.9, 0.95]", "betas: 0.9"),
    Case("text where a list is wanted", "[GPT2Block]", "GPT2Block"),
    Case("list where a number is wanted", "n_layer: 2", "n_layer: [2]"),
    Case("mapping where a number is wanted", "n_layer: 2", "n_layer: {n: 2}"),
    Case("number where a section is wanted", "  intervals:\n", "  x-old:\n"),
    Case("text where a component is wanted", "  model: ${ref:model_raw}", "  model: model_raw"),
    Case("number where a component is wanted", "app_state: raw", "app_state: 1"),
    Case("list where a component is wanted", "app_state: raw", "app_state: [raw]"),
    Case("missing required field", "    eps: 1e-8\n", ""),
    Case("missing required entry", "loss_fn: clm_cross_entropy_loss\n", ""),
    Case("missing variant", "  variant_key: gpt2\n", ""),
    Case(
        "missing component key", "  component_key: model\n  variant_key: fsdp2_wrapped", "  variant_key: fsdp2_wrapped"
    ),
    # files
    Case("data file that is not there", "data: train.pbin", "data: trian.pbin"),
    Case("folder for a data file", "data: train.pbin", "data: ."),
    Case("data shorter than one sample", "sequence_length: 16", "sequence_length: 4000"),
    # rules between fields
    Case("heads do not divide the width", "n_head_q: 4", "n_head_q: 3"),
    Case(
        "norm of another width",
        "ffn_norm_config: {norm_type: rms_norm, config: {ndim: 16}}",
        "ffn_norm_config: {norm_type: rms_norm, config: {ndim: 8}}",
    ),
    Case("rotary of another width", "config: {n_embd: 16, n_head: 4", "config: {n_embd: 32, n_head: 4"),
    Case("tokens are not steps", "num_target_tokens: 256", "num_target_tokens: 250"),
    Case("mesh of another world", "data_parallel_shard_degree: -1", "data_parallel_shard_degree: 3"),
    Case(
        "two open degrees",
        "data_parallel_shard_degree: -1",
        "data_parallel_shard_degree: -1, data_parallel_replicate_degree: -1",
    ),
    Case(
        "batch of another size",
        "  batch_sampler:\n    variant_key: default\n",
        "  batch_sampler:\n    variant_key: default\n    batch_size: 3\n",
    ),
    Case(
        "names that differ",
        "loss_fn: clm_cross_entropy_loss",
        "loss_fn: {variant_key: clm_cross_entropy_loss, target_key: z}",
    ),
    Case("saving of another wrapper", "checkpoint_saving: dcp", "checkpoint_saving: fsdp1"),
    Case("saving never asked for", "checkpoint_saving: dcp", "checkpoint_saving: {variant_key: dcp, every: 6}"),
    Case("checkpoints beyond the end", "checkpointing_interval_in_steps: 4", "checkpointing_interval_in_steps: 400"),
    # references and interpolations
    Case("reference to nothing", "${ref:sharded_model}", "${ref:shraded_model}"),
    Case(
        "reference to nothing, canonical",
        "  model: ${ref:sharded_model}",
        "  model: {instance_key: shraded_model, pass_type: BY_REFERENCE}",
    ),
    Case("reference to the wrong interface", "  model: ${ref:sharded_model}", "  model: ${ref:optimizer}"),
    Case("wrapper of the wrong kind", "gradient_clipper: {variant_key: fsdp2", "gradient_clipper: {variant_key: fsdp1"),
    Case("reference into a component", "  model: ${ref:sharded_model}", "  model: ${ref:sharded_model.model}"),
    Case("reference within a text", "  dataloader_tag: train", "  dataloader_tag: a ${ref:model}"),
    Case("components in a circle", "  model: ${ref:model_raw}", "  model: ${ref:model}"),
    Case("copied model", "  model: ${ref:sharded_model}", "  model: ${sharded_model}"),
    Case("interpolation without quotes in brackets", "data: train.pbin", "data: ${train_dataset.raw_data_path}"),
    Case("interpolation to nothing", "${settings.paths.data}", "${settings.paths.dta}"),
    Case("interpolation into nothing", "${settings.paths.data}", "${setings.paths.data}"),
    Case("interpolation in a circle", "data: train.pbin", 'data: "${train_dataset.raw_data_path}"'),
    Case("unknown resolver", "${settings.paths.data}", "${oc.emv:DATA}"),
    Case("missing environment variable", "${settings.paths.data}", "${oc.env:MODALITIES_NO_SUCH_VARIABLE}"),
    Case("unclosed interpolation", "${settings.paths.data}", '"${settings.paths.data"'),
    Case(
        "wrong pass type",
        "  model: ${ref:sharded_model}",
        "  model: {instance_key: sharded_model, pass_type: BY_MAGIC}",
    ),
    # the text itself
    Case("key given twice", "    eps: 1e-8\n", "    eps: 1e-8\n    eps: 1e-6\n"),
    Case("entry given twice", "app_state: raw\n", "app_state: raw\nloss_fn: clm_cross_entropy_loss\n"),
    Case("tab", "    eps: 1e-8", "\teps: 1e-8"),
    Case("wrong indentation", "    eps: 1e-8", "   eps: 1e-8"),
    Case("unclosed bracket", "[0.9, 0.95]", "[0.9, 0.95"),
    Case("colon within a text", "dataloader_tag: train", "dataloader_tag: a: b"),
    Case("Python tag", "dataloader_tag: train", "dataloader_tag: !!python/object/apply:os.getcwd []"),
    Case("alias that holds itself", "app_state: raw\n", "x-loop: &loop [*loop]\napp_state: raw\n"),
    Case("alias to nothing", "app_state: raw", "app_state: *raw"),
    Case(
        "aliases that multiply",
        "app_state: raw\n",
        "x-a: &a [1,1,1,1,1,1,1,1]\nx-b: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nx-c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nx-d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\nx-e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nx-f: [*e,*e,*e,*e,*e,*e,*e,*e]\napp_state: raw\n",
    ),
    Case("nested too deep", "app_state: raw\n", "x-deep: " + "[" * 200 + "]" * 200 + "\napp_state: raw\n"),
    Case("merge of no mapping", "app_state: raw\n", "x-merge: {<<: 3}\napp_state: raw\n"),
    Case("fields beside config", "  config:\n    lr: 0.01", "  weight_decay: 0.1\n  config:\n    lr: 0.01"),
    Case("config that is no mapping", "  config:\n    lr: 0.01", "  config: 3\n  x:\n    lr: 0.01"),
    Case(
        "one field under two names",
        "gradient_clipper: {",
        'gradient_clipper: {wrapped_model: "${ref:model}", model_parts: "${ref:model}", ',
    ),
    Case("open value", "dataloader_tag: train", "dataloader_tag: ???"),
    Case("option that is not there", "settings:\n", "defaults: [optimizer: fats, _self_]\nsettings:\n"),
    Case("group that is not there", "settings:\n", "defaults: [optimiser: adam_w, _self_]\nsettings:\n"),
    Case("config that is not there", "settings:\n", "defaults: [bsae, _self_]\nsettings:\n"),
    Case("module that is not there", "settings:\n", "imports: [no_such_module_of_mine]\nsettings:\n"),
    Case("import of a path", "settings:\n", "imports: [../evil.py]\nsettings:\n"),
    # overrides
    _override("override of an unknown field", "optimizer.lrr=1"),
    _override("override of an unknown entry", "optimzer.lr=1"),
    _override("override of an unknown section", "step_profle.sequence_length=4"),
    _override("override within a number", "optimizer.lr.x=1"),
    _override("override by an unknown variant", "optimizer=sgd"),
    _override("override of a section by a text", "settings.intervals=often"),
    _override("override by a wrong type", "optimizer.lr=fast"),
    _override("override adds what is there", "+optimizer=adam"),
    _override("override removes what is not there", "~optimzer"),
    _override("override that is none", "optimizer.lr"),
    _override("override with an open quote", "optimizer.lr='1"),
    _override("override with two dots", "optimizer..lr=1"),
    _override("override of Hydra", "hydra.job.name=x"),
    _override("override of the imports", "+imports=[my_components]"),
    _override("override by nothing", "app_state.model=null"),
    _override("override by a device that is none", "device_mesh.device_type=tpu"),
    _override("several values without multirun", "optimizer.lr=1e-3,1e-4"),
    _override("item beyond a list", "optimizer.betas.5=0.9"),
    _override("variant without its fields", "+lr_scheduler=step_lr", "+app_state.lr_scheduler=${ref:lr_scheduler}"),
]
