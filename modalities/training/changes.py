"""What a run may change when it goes on from a checkpoint. Free of torch.

A change is free if it has nothing to do with what is learned, told if it has but is a run's own business (its size, its
layout, its length), and else it is refused until the user allows it by name. Shapes cannot change: loading compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from modalities.config.suggestions import did_you_mean
from modalities.config.yaml_writer import scalar_text
from modalities.exceptions import UserError
from modalities.training.meaning import Meaning

ALLOW_ALL = "all"


class Kind(Enum):
    """What becomes of a change."""

    FREE = "free"
    TOLD = "told"
    ASKED = "asked"


_FREE = (
    "settings.paths.*",
    "settings.experiment_id",
    "settings.config_file_path",
    "settings.config_folder_path",
    "settings.cuda_env.*",
    "settings.intervals.*",
    "settings.consistency_enforcement.*",
    "settings.referencing_keys.*",
    "settings.training_progress.*",
    "settings.warmstart_checkpoint_paths*",
    "settings.debugging*",
    "settings.deterministic",
    "*.sample_key",
    "*.target_key",
    "*.prediction_key",
    "app_state",
    "app_state.*",
    "data_loader.dataloader_tag",
    "data_loader.num_workers",
    "data_loader.pin_memory",
    "sampler.rank",
    "sampler.num_replicas",
    "sampler.skip_num_global_samples",
    "scheduler.last_epoch",
    "model/gpt2.use_meta_device",
    "model/model_initialized",
    "gradient_clipper",
)
"""Names, places, and numbers that are derived from others or taken from the checkpoint."""

_OF_THE_START = ("settings.seed", "model/*.seed", "model_initialization*")
"""Drawn from before the first step only."""

_TOLD = (
    *_OF_THE_START,
    "settings.step_profile.gradient_accumulation_steps",
    "settings.step_profile.local_train_micro_batch_size",
    "settings.step_profile.dp_degree",
    "settings.training_target.*",
    "settings.autocast",
    "number_conversion*",
    "device_mesh*",
    "batch_sampler.batch_size",
    "model/fsdp1_wrapped*",
    "model/fsdp2_wrapped*",
    "model/fsdp1_checkpointed*",
    "model/compiled*",
    "model/activation_checkpointed*",
    "model/*.attention_implementation",
    "optimizer.foreach",
    "optimizer.fused",
)
"""The batch, the length, the layout, and how the same is computed."""

_MADE_OF = ("dataset.raw_data_path", "dataset.index_path", "packing*", "tokenizer*")
"""Where the training data comes from, which does not matter where the data itself is the same."""

_NAMED = 4
"""So many paths are written out in the words that would allow them."""

_HYPERPARAMETERS = ("optimizer.*", "scheduler", "scheduler.*")

DATA = "dataset.content"
"""Key of the fingerprint of the training data."""


@dataclass(frozen=True)
class Change:
    """A key whose value in the checkpoint's config is another than in the run's.

    Args:
        key: Of the meaning.
        path: Where it stands in the run's config; the key where it stands there no more.
        old: In the checkpoint; None if it was not there.
        new: In the run; None if it is not there.
        kind: What becomes of it.
    """

    key: str
    path: str
    old: Any
    new: Any
    kind: Kind

    @property
    def is_hyperparameter(self) -> bool:
        """Whether optimizer or schedule must take it over after the checkpoint is loaded."""
        return self.kind is Kind.ASKED and _matches(self.key, _HYPERPARAMETERS)


def changes_between(old: Meaning, new: Meaning) -> list[Change]:
    """Every change that is not free, in the order of the run's config.

    Args:
        old: The checkpoint's.
        new: The run's.
    """
    is_same_data = DATA in old.values and old.values[DATA] == new.values.get(DATA)
    keys = [*new.values, *(key for key in old.values if key not in new.values)]
    found = []
    for key in keys:
        before, after = old.values.get(key), new.values.get(key)
        if before == after and isinstance(before, bool) == isinstance(after, bool):
            continue
        if key == DATA and None in (before, after):
            continue  # one of the two cannot tell
        if before is None and key in new.defaults:
            continue  # a field that the version which saved did not have
        kind = _kind_of(key)
        if is_same_data and _matches(key, _MADE_OF):
            kind = Kind.FREE
        if kind is not Kind.FREE:
            found.append(Change(key, new.paths.get(key, key), before, after, kind))
    return found


def require_allowed(changes: Sequence[Change], allowed: Sequence[str], checkpoint: str, meaning: Meaning) -> None:
    """Check that every change that must be allowed is.

    Args:
        changes: Between checkpoint and run.
        allowed: Words of ``--allow-changed``: ``all``, a path, the end of one, what it is in, or a pattern.
        checkpoint: Its name, for the message.
        meaning: The run's, which has the paths that there are.

    Raises:
        UserError: One is not; or a word names nothing that there is.
    """
    names = {name for change in changes for name in (change.key, change.path)}
    names |= {*meaning.values, *meaning.paths.values()}
    for word in allowed:
        if not any(_names(word, name) for name in names):
            raise UserError(f"--allow-changed {word} names nothing in the config; {did_you_mean(word, names, 'paths')}")
    refused = [
        change
        for change in changes
        if change.kind is Kind.ASKED and not any(_names(w, change.key) or _names(w, change.path) for w in allowed)
    ]
    if refused:
        words = " ".join(f"--allow-changed {change.path}" for change in refused)
        raise UserError(
            f"the config means another run than the checkpoint {checkpoint} is from:\n"
            f"{table_of(refused)}\n"
            "put the old values back, or go on with the new ones by\n"
            f"  {words if len(refused) <= _NAMED else f'--allow-changed {ALLOW_ALL}'}"
        )


def _names(word: str, name: str) -> bool:
    return word == ALLOW_ALL or fnmatchcase(name, word) or name.endswith(f".{word}") or name.startswith(f"{word}.")


def table_of(changes: Sequence[Change]) -> str:
    """The changes, a line each."""
    width = max(len(change.path) for change in changes)
    lines = []
    for change in changes:
        remark = " (of the start only: without effect now)" if _matches(change.key, _OF_THE_START) else ""
        lines.append(f"  {change.path:<{width}}  {_shown(change.old)} -> {_shown(change.new)}{remark}")
    return "\n".join(lines)


def _kind_of(key: str) -> Kind:
    if _matches(key, _FREE):
        return Kind.FREE
    return Kind.TOLD if _matches(key, _TOLD) else Kind.ASKED


def _matches(key: str, patterns: Iterable[str]) -> bool:
    # a second component of a kind is judged as the first
    plain = ".".join(part.partition("#")[0] for part in key.split("."))
    return any(fnmatchcase(plain, pattern) for pattern in patterns)


def _shown(value: Any) -> str:
    return "absent" if value is None else scalar_text(value)
