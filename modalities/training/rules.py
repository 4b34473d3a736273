"""What must hold between the parts of a training run. Free of torch: checked from the config, and again once built."""

from __future__ import annotations

from collections.abc import Sequence

from modalities.registry.interfaces import FSDP1Model, Interface
from modalities.registry.rules import Rule

_PROFILE = "settings.step_profile"
_TARGET = "settings.training_target"
_LOADER = "train_dataloader"


def tokens_per_step(
    num_target_tokens: int,
    num_target_steps: int,
    gradient_accumulation_steps: int,
    local_train_micro_batch_size: int,
    sequence_length: int,
    dp_degree: int,
    global_num_seen_tokens: int | None = 0,
    num_seen_steps: int | None = 0,
    is_enforced: bool | None = True,
) -> str | None:
    """Steps and tokens must be two names of one target."""
    remaining_steps = num_target_steps - (num_seen_steps or 0)
    remaining_tokens = num_target_tokens - (global_num_seen_tokens or 0)
    step = gradient_accumulation_steps * local_train_micro_batch_size * sequence_length * dp_degree
    if is_enforced is False or remaining_tokens == remaining_steps * step:
        return None
    return (
        f"{remaining_steps} steps of {step} tokens make {remaining_steps * step} tokens, "
        f"but settings.training_target leaves {remaining_tokens}; change one of them, or set "
        "settings.consistency_enforcement.enforce_tokens_per_step_consistency: false"
    )


def sequence_fits_model(model_length: int, step_length: int) -> str | None:
    """A model with learned positions has no more of them than it was made with."""
    if model_length >= step_length:
        return None
    return f"the model takes sequences of {model_length} tokens, but a step has sequences of {step_length}"


def data_has_sequence_length(data_length: int, step_length: int) -> str | None:
    """Samples must have the length that steps are counted with."""
    if data_length == step_length:
        return None
    return (
        f"train_dataset makes samples of {data_length} tokens, but settings.step_profile.sequence_length is {step_length}; "
        "write sequence_length: ${settings.step_profile.sequence_length}"
    )


def batch_is_micro_batch(batch_size: int, micro_batch_size: int) -> str | None:
    """The loader must make the batches that steps are counted with."""
    if batch_size == micro_batch_size:
        return None
    return (
        f"train_dataloader makes batches of {batch_size} samples, but "
        f"settings.step_profile.local_train_micro_batch_size is {micro_batch_size}; "
        "write batch_size: ${settings.step_profile.local_train_micro_batch_size}"
    )


def replicas_are_ranks(num_replicas: int, dp_degree: int) -> str | None:
    """The sampler must deal samples out to the ranks that there are."""
    if num_replicas == dp_degree:
        return None
    return (
        f"train_dataloader's sampler deals samples out to {num_replicas} replicas, but {dp_degree} ranks "
        "train on different data; write num_replicas: ${settings.cuda_env.world_size}"
    )


def saves_before_the_end(interval: int, num_target_steps: int) -> str | None:
    """A run that saves only at its end loses all of it when it is cut short."""
    if interval <= num_target_steps:
        return None
    return f"checkpoints are {interval} steps apart, but the run has {num_target_steps}: only its end is saved"


def saves_when_asked(every: int, interval: int) -> str | None:
    """Saving is asked for at the interval only."""
    if every % interval == 0:
        return None
    return (
        f"checkpoint_saving.every {every} is no multiple of settings.intervals.checkpointing_interval_in_steps "
        f"{interval}, at which it is asked: those steps would not be saved"
    )


def metric_is_measured(metric: str, tags: Sequence[str]) -> str | None:
    """Checkpoints can only be kept by what evaluations measure."""
    measured = [metric_name(tag) for tag in tags]
    if metric in measured:
        return None
    there = f"evaluations measure {', '.join(measured)}" if measured else "there are no eval_dataloaders"
    return f"checkpoints are to be kept by `{metric}`, but {there}"


def metric_name(tag: str) -> str:
    """Under which the loss of an evaluation is known."""
    return f"{tag} loss"


def names_agree(key: str, giver: str, taker: str) -> Rule:
    """What one component hands on must have the name under which the next one looks for it."""

    def check(taken: str, given: str) -> str | None:
        return name_mismatch(key, giver, given, taker, taken)

    return Rule((f"{taker}.{key}", f"{giver}.{key}"), check)


def name_mismatch(key: str, giver: str, given: str, taker: str, taken: str) -> str | None:
    """The message about two names that should be one."""
    if given == taken:
        return None
    return (
        f"{giver} hands on `{given}`, but {taker} looks for `{taken}`: their {key} differs; "
        f"write ${{settings.referencing_keys.{key}}} in both"
    )


def fsdp1_saves_fsdp1(execution: str | None, saving: str, model: type[Interface]) -> str | None:
    """Full FSDP1 state dicts can only be gathered from a model that FSDP1 wraps."""
    if "fsdp1" not in (execution, saving) or issubclass(model, FSDP1Model):
        return None
    return (
        "checkpoints of kind fsdp1 need a `model: fsdp1_wrapped`, and the app state's model is none; "
        "save with checkpoint_saving: dcp"
    )


NAMES = (
    ("sample_key", "train_dataset", "train_dataloader.collate_fn"),
    ("sample_key", "train_dataloader.collate_fn", "model_raw"),
    ("prediction_key", "model_raw", "loss_fn"),
    ("target_key", "train_dataloader.collate_fn", "loss_fn"),
)
"""Which name goes from which part to which."""

TRAINING_RULES = (
    Rule(
        (
            f"{_TARGET}.num_target_tokens",
            f"{_TARGET}.num_target_steps",
            f"{_PROFILE}.gradient_accumulation_steps",
            f"{_PROFILE}.local_train_micro_batch_size",
            f"{_PROFILE}.sequence_length",
            f"{_PROFILE}.dp_degree",
            "settings.training_progress.global_num_seen_tokens?",
            "settings.training_progress.num_seen_steps?",
            "settings.consistency_enforcement.enforce_tokens_per_step_consistency?",
        ),
        tokens_per_step,
    ),
    Rule(("model_raw.sequence_length", f"{_PROFILE}.sequence_length"), sequence_fits_model),
    Rule(("train_dataset.sequence_length", f"{_PROFILE}.sequence_length"), data_has_sequence_length),
    Rule((f"{_LOADER}.batch_sampler.batch_size", f"{_PROFILE}.local_train_micro_batch_size"), batch_is_micro_batch),
    Rule((f"{_LOADER}.batch_sampler.sampler.num_replicas", f"{_PROFILE}.dp_degree"), replicas_are_ranks),
    Rule(
        ("settings.intervals.checkpointing_interval_in_steps", f"{_TARGET}.num_target_steps"),
        saves_before_the_end,
        severity="warning",
    ),
    Rule(("checkpoint_saving.every", "settings.intervals.checkpointing_interval_in_steps"), saves_when_asked),
    Rule(
        (
            "checkpoint_saving.checkpoint_saving_execution.variant_key?",
            "checkpoint_saving.variant_key",
            "app_state.model:provides",
        ),
        fsdp1_saves_fsdp1,
    ),
    *(names_agree(key, giver, taker) for key, giver, taker in NAMES),
)
