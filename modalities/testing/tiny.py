"""The tiniest experiment that is real: packed random tokens, a two-block GPT, a whole training config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from modalities.checkpointing.reading.sources import open_source
from modalities.data.files import output_file
from modalities.data.packed_file import PackedFileWriter


def write_tokens(path: Path, num_tokens: int, vocab_size: int, seed: int = 0) -> Path:
    """A packed file of one document of random token ids."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, num_tokens)
    with output_file(path) as file:
        writer = PackedFileWriter(file, vocab_size)
        writer.write_document(ids.tolist())
        writer.finish()
    return path


def reference(name: str) -> dict[str, str]:
    """A reference to a top-level entry."""
    return {"instance_key": name, "pass_type": "BY_REFERENCE"}


def component(kind: str, variant: str, **config: Any) -> dict[str, Any]:
    """A component's entry."""
    return {"component_key": kind, "variant_key": variant, "config": config}


def tiny_config(
    folder: Path,
    *,
    wrapper: str = "fsdp2",
    num_steps: int = 8,
    checkpointing_interval: int = 4,
    global_batch: int = 4,
    gradient_accumulation_steps: int = 1,
    num_tokens: int = 2000,
    num_workers: int = 0,
    vocab_size: int = 128,
    seed: int = 1,
    **model: Any,
) -> dict[str, Any]:
    """A training config as a tree, to be changed at will and written with :func:`write_config`.

    Args:
        folder: Gets the data; checkpoints go below the run's folder.
        wrapper: ``fsdp1`` or ``fsdp2``.
        num_steps: Steps of the run.
        checkpointing_interval: Steps between checkpoints, all of which are kept.
        global_batch: Samples per step over all ranks.
        gradient_accumulation_steps: Micro-batches per step.
        num_tokens: Of the training data; few make several epochs.
        num_workers: Of the training data loader.
        vocab_size: Of data and model.
        seed: Of the weights.
        model: Other fields of the model.
    """
    train = write_tokens(folder / "train.pbin", num_tokens, vocab_size)
    heldout = write_tokens(folder / "heldout.pbin", 200, vocab_size, seed=1)
    width, heads = 16, 4
    norm = {"norm_type": "rms_norm", "config": {"ndim": width, "bias": False}}
    rotary = {"n_embd": width, "n_head": heads, "seq_length_dim": -2, "base_freq": 10000}
    ranks = {"rank": "${cuda_env:RANK}", "num_replicas": "${cuda_env:WORLD_SIZE}"}
    micro_batch = "${settings.step_profile.local_train_micro_batch_size}"

    def dataset(path: Path) -> dict[str, Any]:
        variant = "packed_mem_map_dataset_continuous"
        return component("dataset", variant, raw_data_path=str(path), sequence_length=16, sample_key="x")

    def loader(tag: str, data: str, sampler: dict[str, Any], workers: int) -> dict[str, Any]:
        return component(
            "data_loader",
            "default",
            dataloader_tag=tag,
            num_workers=workers,
            pin_memory=False,
            dataset=reference(data),
            collate_fn=component("collate_fn", "gpt_2_llm_collator", sample_key="x", target_key="y"),
            batch_sampler=component("batch_sampler", "default", batch_size=micro_batch, sampler=sampler),
        )

    config: dict[str, Any] = {
        "settings": {
            "experiment_id": "${modalities_env:experiment_id}",
            "config_file_path": "${modalities_env:config_file_path}",
            "referencing_keys": {"sample_key": "x", "target_key": "y", "prediction_key": "logits"},
            "intervals": {
                "training_log_interval_in_steps": 1,
                "checkpointing_interval_in_steps": checkpointing_interval,
                "evaluation_interval_in_steps": checkpointing_interval,
            },
            "consistency_enforcement": {"enforce_enough_tokens_in_dataset": False},
            "step_profile": {
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "local_train_micro_batch_size": component(
                    "number_conversion",
                    "local_micro_batch_size_from_global_batch_size",
                    global_num_samples_per_step=global_batch,
                    dp_degree="${cuda_env:WORLD_SIZE}",
                    gradient_accumulation_steps=gradient_accumulation_steps,
                ),
                "sequence_length": 16,
                "dp_degree": "${cuda_env:WORLD_SIZE}",
            },
            "training_target": {"num_target_steps": num_steps, "num_target_tokens": num_steps * global_batch * 16},
        },
        "train_dataset": dataset(train),
        "heldout_dataset": dataset(heldout),
        "train_dataloader": loader(
            "train",
            "train_dataset",
            component(
                "sampler",
                "resumable_distributed_sampler",
                dataset=reference("train_dataset"),
                shuffle=True,
                seed=3,
                **ranks,
            ),
            num_workers,
        ),
        "eval_dataloaders": [
            loader(
                "heldout",
                "heldout_dataset",
                component(
                    "sampler", "distributed_sampler", dataset=reference("heldout_dataset"), shuffle=False, **ranks
                ),
                0,
            )
        ],
        "loss_fn": component("loss", "clm_cross_entropy_loss", target_key="y", prediction_key="logits"),
        "device_mesh": component(
            "device_mesh", "default", data_parallel_shard_degree=-1, world_size="${cuda_env:WORLD_SIZE}"
        ),
        "model_raw": component(
            "model",
            "gpt2",
            **{
                "sample_key": "x",
                "prediction_key": "logits",
                "seed": seed,
                "poe_type": "NOPE",
                "sequence_length": 16,
                "vocab_size": vocab_size,
                "n_layer": 2,
                "n_head_q": heads,
                "n_head_kv": 2,
                "n_embd": width,
                "ffn_hidden": 32,
                "enforce_swiglu_hidden_dim_multiple_of": 16,
                "dropout": 0.0,
                "bias": False,
                "use_weight_tying": False,
                "activation_type": "swiglu",
                "attention_implementation": "pytorch_flash",
                "attention_config": {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": rotary}]},
                "attention_norm_config": norm,
                "ffn_norm_config": norm,
                "lm_head_norm_config": norm,
                **model,
            },
        ),
        "optimizer": component(
            "optimizer",
            "adam_w",
            wrapped_model=reference("model"),
            lr=1e-2,
            betas=[0.9, 0.95],
            eps=1e-8,
            weight_decay=0.1,
            weight_decay_groups_excluded=["embedding", "layernorm"],
        ),
        "lr_scheduler": component(
            "scheduler",
            "linear_warmup_cosine_annealing_lr",
            optimizer=reference("optimizer"),
            warmup_steps=2,
            total_steps=num_steps,
            initial_lr=1e-3,
            max_lr=1e-2,
            final_lr=1e-4,
        ),
        "app_state": component(
            "app_state",
            "raw",
            model=reference("model"),
            optimizer=reference("optimizer"),
            lr_scheduler=reference("lr_scheduler"),
        ),
        "checkpoint_saving": component(
            "checkpoint_saving",
            "default",
            checkpoint_saving_strategy=component(
                "checkpoint_saving_strategy", "save_k_most_recent_checkpoints_strategy", k=-1
            ),
            checkpoint_saving_execution=component(
                "checkpoint_saving_execution",
                "fsdp1" if wrapper == "fsdp1" else "dcp",
                checkpoint_path="${modalities_env:experiments_root_path}/${modalities_env:experiment_id}/checkpoints",
                experiment_id="${modalities_env:experiment_id}",
                global_rank="${cuda_env:RANK}",
            ),
        ),
        "gradient_clipper": component(
            "gradient_clipper", wrapper, wrapped_model=reference("model"), norm_type="P2_NORM", max_norm=1.0
        ),
    }
    initializer = component(
        "model_initialization",
        "composed",
        model_type="gpt2",
        weight_init_type="scaled",
        mean=0.0,
        std=0.02,
        num_layers=2,
    )
    if wrapper == "fsdp1":
        config["initialized_model"] = component(
            "model", "model_initialized", model=reference("model_raw"), model_initializer=initializer
        )
        config["model"] = component(
            "model",
            "fsdp1_wrapped",
            model=reference("initialized_model"),
            sync_module_states=True,
            mixed_precision_settings="NO_MIXED_PRECISION",
            sharding_strategy="FULL_SHARD",
            block_names=["GPT2Block"],
        )
    else:
        config["model_raw"]["config"]["use_meta_device"] = True
        config["sharded_model"] = component(
            "model",
            "fsdp2_wrapped",
            model=reference("model_raw"),
            device_mesh=reference("device_mesh"),
            mixed_precision_settings={"param_dtype": "FP_32", "reduce_dtype": "FP_32"},
            block_names=["GPT2Block"],
        )
        config["model"] = component(
            "model", "model_initialized", model=reference("sharded_model"), model_initializer=initializer
        )
    return config


def write_config(config: dict[str, Any], path: Path) -> Path:
    """Write a config tree as YAML."""
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a DCP checkpoint, whole, by its key."""
    source = open_source(checkpoint)
    return {key: source.read(key) for key, form in source.forms.items() if form is not None}
