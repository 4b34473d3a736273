"""Where fields that many components share take their default from."""

from __future__ import annotations

from modalities.registry.fields import DefaultFrom

GLOBAL_RANK = DefaultFrom("settings.cuda_env.global_rank", "${cuda_env:RANK}")
WORLD_SIZE = DefaultFrom("settings.cuda_env.world_size", "${cuda_env:WORLD_SIZE}")
DP_DEGREE = DefaultFrom("settings.step_profile.dp_degree")
EXPERIMENT_ID = DefaultFrom("settings.experiment_id", "${modalities_env:experiment_id}")
CONFIG_FILE_PATH = DefaultFrom("settings.config_file_path", "${modalities_env:config_file_path}")
CHECKPOINT_PATH = DefaultFrom(
    "settings.paths.checkpoint_saving_path",
    "${modalities_env:experiments_root_path}/${modalities_env:experiment_id}/checkpoints",
)

SAMPLE_KEY = DefaultFrom("settings.referencing_keys.sample_key")
TARGET_KEY = DefaultFrom("settings.referencing_keys.target_key")
PREDICTION_KEY = DefaultFrom("settings.referencing_keys.prediction_key")

SEQUENCE_LENGTH = DefaultFrom("settings.step_profile.sequence_length")
MICRO_BATCH_SIZE = DefaultFrom("settings.step_profile.local_train_micro_batch_size")
ACCUMULATION_STEPS = DefaultFrom("settings.step_profile.gradient_accumulation_steps")
NUM_TARGET_STEPS = DefaultFrom("settings.training_target.num_target_steps")
NUM_SEEN_STEPS = DefaultFrom("settings.training_progress.num_seen_steps")

DEVICE_MESH = DefaultFrom("device_mesh")
TRAINED_MODEL = DefaultFrom("app_state.model", "model")
"""The model that is trained, as it is wrapped: the app state's."""
