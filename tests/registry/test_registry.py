"""The map of components, standard ones and users' own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from enum import Enum

import pytest
from pydantic import ValidationError

from modalities.exceptions import RegistrationError
from modalities.registry.fields import ComponentConfig, EnumField, Instance, Pending
from modalities.registry.interfaces import Loss, Model, Optimizer
from modalities.registry.registry import Registry

STANDARD = Registry.standard()


def test_collecting_the_standard_components_imports_nothing_heavy() -> None:
    program = (
        "import sys; from modalities.registry.registry import Registry; assert len(Registry.standard()) > 50; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'wandb', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("spec", list(STANDARD), ids=lambda spec: spec.name)
def test_a_door_sign_tells_the_truth(spec: object) -> None:
    assert spec.summary  # type: ignore[attr-defined]
    fields = spec.config.model_fields  # type: ignore[attr-defined]
    assert [name for name, field in fields.items() if not field.description] == []
    if not spec.is_available:  # type: ignore[attr-defined]
        return
    parameters = inspect.signature(spec.builder()).parameters  # type: ignore[attr-defined]
    assert set(fields) <= set(parameters)
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert needed <= set(fields)


KNOWN = [
    "app_state/dcp",
    "app_state/raw",
    "batch_sampler/default",
    "checkpoint_loading/dcp",
    "checkpoint_loading/fsdp1",
    "checkpoint_loading/torch",
    "checkpoint_saving/default",
    "checkpoint_saving_execution/dcp",
    "checkpoint_saving_execution/fsdp1",
    "checkpoint_saving_strategy/save_every_k_steps_checkpointing_strategy",
    "checkpoint_saving_strategy/save_k_most_recent_checkpoints_strategy",
    "collate_fn/coca_collator",
    "collate_fn/gpt_2_llm_collator",
    "collate_fn/mask_loss_collator_wrapper",
    "data_loader/default",
    "dataset/combined",
    "dataset/dummy_dataset",
    "dataset/mem_map_dataset",
    "dataset/packed_mem_map_dataset_continuous",
    "dataset/packed_mem_map_dataset_megatron",
    "dataset_batch_generator/random",
    "debugging/settings",
    "device_mesh/default",
    "gradient_clipper/fsdp1",
    "gradient_clipper/fsdp1_logging_only",
    "gradient_clipper/fsdp2",
    "gradient_clipper/fsdp2_logging_only",
    "layer_norm/layer_norm",
    "layer_norm/pytorch_rms_norm",
    "layer_norm/rms_norm",
    "loss/clm_cross_entropy_loss",
    "mfu_calculator/gpt2",
    "model/activation_checkpointed",
    "model/activation_checkpointed_fsdp1",
    "model/coca",
    "model/compiled",
    "model/debugging_enriched",
    "model/fsdp1_checkpointed",
    "model/fsdp1_wrapped",
    "model/fsdp2_wrapped",
    "model/gpt2",
    "model/gpt2_tp",
    "model/huggingface_pretrained_model",
    "model/model_initialized",
    "model_debugging_hook/nan_hook",
    "model_debugging_hook/print_forward_hook",
    "model_initialization/composed",
    "model_initialization/gpt2_llama3_like",
    "number_conversion/global_num_seen_tokens_from_checkpoint_path",
    "number_conversion/global_num_target_tokens_from_checkpoint_path",
    "number_conversion/last_step_from_checkpoint_path",
    "number_conversion/local_num_batches_from_num_samples",
    "number_conversion/local_num_batches_from_num_tokens",
    "number_conversion/num_samples_from_num_tokens",
    "number_conversion/num_seen_steps_from_checkpoint_path",
    "number_conversion/num_steps_from_num_samples",
    "number_conversion/num_steps_from_num_tokens",
    "number_conversion/num_steps_from_raw_dataset_index",
    "number_conversion/num_target_steps_from_checkpoint_path",
    "number_conversion/num_tokens_from_num_steps",
    "number_conversion/num_tokens_from_packed_mem_map_dataset_continuous",
    "number_conversion/parallel_degree",
    "optimizer/adam",
    "optimizer/adam_w",
    "optimizer/fsdp1_checkpointed",
    "pipeline/builder",
    "pipeline/scheduled",
    "pipeline/selector",
    "pipeline/staged",
    "progress_subscriber/dummy",
    "progress_subscriber/rich",
    "results_subscriber/dummy",
    "results_subscriber/rich",
    "results_subscriber/to_disc",
    "results_subscriber/wandb",
    "sampler/distributed_sampler",
    "sampler/resumable_distributed_multi_dim_sampler",
    "sampler/resumable_distributed_sampler",
    "sampler/sequential_sampler",
    "scheduler/constant_lr",
    "scheduler/cosine_annealing_lr",
    "scheduler/dummy_lr",
    "scheduler/linear_lr",
    "scheduler/linear_warmup_cosine_annealing_lr",
    "scheduler/onecycle_lr",
    "scheduler/step_lr",
    "stages_generator/gpt2_stages_generator",
    "steppable_component/forward_pass",
    "steppable_profiler/combined",
    "steppable_profiler/kernel_tracing",
    "steppable_profiler/memory_tracing",
    "steppable_profiler/no_profiler",
    "tokenizer/pretrained_hf_tokenizer",
    "tokenizer/pretrained_sp_tokenizer",
]
"""Every component that files of the older framework can name."""

UPCOMING = {
    "collate_fn/coca_collator",
    "collate_fn/mask_loss_collator_wrapper",
    "dataset/combined",
    "dataset/dummy_dataset",
    "dataset/packed_mem_map_dataset_megatron",
    "dataset_batch_generator/random",
    "debugging/settings",
    "inference_component/text",
    "model/activation_checkpointed",
    "model/activation_checkpointed_fsdp1",
    "model/coca",
    "model/debugging_enriched",
    "model/gpt2_tp",
    "model/huggingface_pretrained_model",
    "model_debugging_hook/nan_hook",
    "model_debugging_hook/print_forward_hook",
    "pipeline/builder",
    "pipeline/scheduled",
    "pipeline/selector",
    "pipeline/staged",
    "stages_generator/gpt2_stages_generator",
    "steppable_component/forward_pass",
    "steppable_profiler/combined",
    "steppable_profiler/kernel_tracing",
    "steppable_profiler/memory_tracing",
    "steppable_profiler/no_profiler",
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_component_of_existing_files_is_known(name: str) -> None:
    spec = STANDARD.get(*name.split("/"))
    assert spec is not None
    assert spec.is_available == (name not in UPCOMING)


def test_what_is_not_available_yet_is_listed() -> None:
    assert len(KNOWN) == 94
    assert {spec.name for spec in STANDARD if not spec.is_available} == UPCOMING


class _Loss:
    def __init__(self, weight: float, tag: str = "mine") -> None:
        self.weight, self.tag = weight, tag


def test_a_signature_is_a_schema() -> None:
    registry = Registry()
    registry.add("loss", "mine", _Loss)
    spec = registry.get("loss", "mine")
    assert spec is not None
    assert spec.config(weight="2").weight == 2.0  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        spec.config(weight=1, other=2)


def test_a_pair_registered_twice_names_both_places() -> None:
    registry = Registry.standard()
    with pytest.raises(RegistrationError, match=r"CLMCrossEntropyLossConfig.*_Loss"):
        registry.add("loss", "clm_cross_entropy_loss", _Loss)


def test_signatures_that_are_no_schema_are_refused() -> None:
    def untyped(x) -> None: ...  # type: ignore[no-untyped-def]

    def loose(**fields: int) -> None: ...

    for builds, told in ((untyped, "`x` needs a type annotation"), (loose, "`fields` has no fixed name")):
        with pytest.raises(RegistrationError, match=told):
            Registry().add("loss", "x", builds)


class _Colour(Enum):
    RED = "1"
    BLUE = "2"


class _Fields(ComponentConfig):
    colour: EnumField[_Colour] = _Colour.RED
    model: Instance[Model] | None = None


@pytest.mark.parametrize("spelling", ["BLUE", "2", _Colour.BLUE])
def test_enums_are_spelled_by_name_or_value(spelling: object) -> None:
    assert _Fields(colour=spelling).colour is _Colour.BLUE


def test_a_wrong_enum_lists_the_names() -> None:
    with pytest.raises(ValidationError, match="RED, BLUE"):
        _Fields(colour="GREEN")


def test_a_slot_takes_what_provides_its_interface_only() -> None:
    assert _Fields(model=Pending(Model, ("m",), "m")).model is not None
    for wrong in (Pending(Loss, ("l",), "`l` = loss/x"), Pending(Optimizer, ("o",), "o"), "text", 3):
        with pytest.raises(ValidationError, match="needs"):
            _Fields(model=wrong)
