"""A checkpoint of one kind made from one of another, by one process, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from modalities.checkpointing import paths
from modalities.checkpointing.conversion.content import Content, content_of
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor, Tally
from modalities.checkpointing.conversion.output import new_outputs, refuse_existing
from modalities.checkpointing.conversion.proof import Progress, prove_files, prove_output, prove_source
from modalities.checkpointing.conversion.targets import (
    Identity,
    Written,
    write_dcp_checkpoint,
    write_fsdp1_checkpoint,
    write_weights,
    write_weights_as_safetensors,
)
from modalities.checkpointing.manifest import FileRecord, Origin
from modalities.checkpointing.reading.safetensors_files import SUFFIX
from modalities.checkpointing.reading.sources import open_source
from modalities.checkpointing.safe_reading import METADATA_FILE
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress

Target = Literal["dcp", "fsdp1", "bin", "safetensors"]

_FILE_SUFFIXES = {".bin": "bin", ".pt": "bin", SUFFIX: "safetensors"}


@dataclass(frozen=True)
class Conversion:
    """What came of a conversion.

    Args:
        source: Folder or file.
        source_kind: ``dcp``, ``fsdp1`` or ``safetensors``.
        source_files: Size and checksum of its files, by name.
        is_proven: Whether the source has a manifest, by which it was proven.
        output: The folder, the file, or the model's file.
        kind: Of the output.
        files: Size and checksum of the output's files, by name.
        num_tensors: In the output; tied ones count once.
        notes: What did not travel, or not as it was, in words.
    """

    source: Path
    source_kind: str
    source_files: Mapping[str, FileRecord]
    is_proven: bool
    output: Path
    kind: Target
    files: Mapping[str, FileRecord]
    num_tensors: int
    notes: list[str]


def target_of(out: Path, to: str | None) -> Target:
    """What is to be written, by what the user asks for and by the name of the output.

    Raises:
        CheckpointError: The two do not fit, or do not tell.
    """
    by_name = _FILE_SUFFIXES.get(out.suffix)
    wanted = to or by_name
    if by_name not in (None, wanted):
        raise CheckpointError(f"{out} is named like one file of weights, which --to {to} does not write: rename it")
    if wanted == "bin" and by_name is None:
        raise CheckpointError(f"--to bin writes one file: let {out} end in .bin or .pt")
    for target in get_args(Target):
        if target == wanted:
            found: Target = target
            return found
    raise CheckpointError(
        f"{out} does not tell what is to be written: add --to dcp, fsdp1 or safetensors, "
        "or let it end in .bin, .pt or .safetensors"
    )


def convert(
    location: Path, out: Path, target: Target, dtype: torch.dtype | None, max_shard_bytes: int, progress: Progress
) -> Conversion:
    """Prove a checkpoint, write it as another kind, read that back, and give it its name.

    Args:
        location: What :func:`open_source` understands.
        out: For ``dcp`` and ``fsdp1`` the folder that gets the checkpoint, else the file or folder itself.
        target: As :func:`target_of` tells.
        dtype: That the floating-point tensors of the model are to have; None leaves them.
        max_shard_bytes: Of the tensors in one safetensors file of a folder.
        progress: A bar for each phase.

    Raises:
        DamagedCheckpoint: The source is not as it was written.
        CheckpointError: It has not what the target needs, or the output is there already or cannot be written.
    """
    if target in ("bin", "safetensors"):
        refuse_existing([out])
    if any((folder / METADATA_FILE).is_file() for folder in (out, *out.parents)):
        raise CheckpointError(f"{out} lies in a checkpoint, which holds nothing but its own files: give another place")
    source = open_source(location)
    proven = prove_source(source, progress)
    tally = Tally(lambda num_bytes: None)
    content = content_of(proven, dtype, tally)
    _require_what_is_needed(content, target, source.path)
    origin = Origin(source.kind, source.path.name, proven.files, content.parameter_groups)
    identity = Identity(
        content.experiment_id or source.path.stem, content.progress or TrainingProgress(0, 0, 0, 0), origin
    )
    finals = _finals(target, out, identity)
    num_bytes = sum(form.num_bytes for form in source.forms.values() if form is not None)
    with new_outputs(list(finals.values())) as temporaries:
        temporary = dict(zip(finals, temporaries, strict=True))
        with progress("converting", num_bytes) as tally.on_bytes:
            written = _write(content, target, temporary, finals, identity, max_shard_bytes)
        with progress("reading back", 2 * sum(record.size for record in written.records.values())) as on_bytes:
            tensors = {key: value for key, value in written.values.items() if isinstance(value, LazyTensor)}
            others = {key: value for key, value in written.values.items() if key not in tensors}
            digests = {key: tally.digests.get(value.key) for key, value in tensors.items()}
            prove_output(written.opened(), digests, others, on_bytes)
            prove_files(written.records, on_bytes)
    return Conversion(
        source.path,
        source.kind,
        proven.files,
        proven.manifest is not None,
        finals["model"],
        target,
        written.files,
        len(set(tensors.values())),
        _notes(content, target, dtype),
    )


def _finals(target: Target, out: Path, identity: Identity) -> dict[str, Path]:
    """Final names by entity, the one that decides last."""
    if target == "fsdp1":
        return {
            entity: out / paths.checkpoint_name(identity.experiment_id, identity.progress, entity)
            for entity in paths.ENTITIES_OF_FSDP1
        }
    if target == "dcp":
        return {"model": out / paths.checkpoint_name(identity.experiment_id, identity.progress)}
    return {"model": out}


def _write(
    content: Content,
    target: Target,
    temporary: Mapping[str, Path],
    finals: Mapping[str, Path],
    identity: Identity,
    max_shard_bytes: int,
) -> Written:
    path, final = temporary["model"], finals["model"]
    if target == "dcp":
        return write_dcp_checkpoint(content, path, identity)
    if target == "fsdp1":
        return write_fsdp1_checkpoint(content, temporary, finals, identity)
    if target == "bin":
        return write_weights(content, path, final)
    return write_weights_as_safetensors(content, path, final, max_shard_bytes)


def _require_what_is_needed(content: Content, target: Target, source: Path) -> None:
    if not content.weights:
        raise CheckpointError(f"{source} holds no tensors of a model (keys `app.model.*`): there is nothing to convert")
    if target != "fsdp1":
        return
    if not content.has_optimizer:
        raise CheckpointError(
            f"{source} has no optimizer state, which an fsdp1 checkpoint needs: convert it to a .bin file instead"
        )
    unnamed = [key for key in content.others if key.startswith("app.optimizer.")]
    if unnamed or not content.options.keys() >= content.states.keys():
        shown = unnamed[0] if unnamed else next(iter(content.states.keys() - content.options.keys()))
        raise CheckpointError(
            f"{source} has an optimizer state that is not by parameter name (`{shown}`), which fsdp1 files cannot hold"
        )


def _notes(content: Content, target: Target, dtype: torch.dtype | None) -> list[str]:
    notes = []
    is_whole = target in ("dcp", "fsdp1")
    if is_whole and not content.has_optimizer:
        notes.append("the source has weights only: there is no optimizer state to go on from")
    elif is_whole and content.resume_state is None:
        notes.append("the source has no resume state: random states and the position in the data are not known")
    if not is_whole and (content.has_optimizer or content.resume_state is not None):
        notes.append("weights only: optimizer, scheduler and resume state stay behind")
    if target == "fsdp1":
        if content.resume_state is None and content.lr_scheduler is not None:
            notes.append(
                "the state of the learning-rate scheduler stays behind: without a resume state it has no place"
            )
        notes += [f"`{key}` stays behind: fsdp1 files have no place for it" for key in content.others]
    if target == "safetensors":
        values = [name for name, value in content.model.items() if not isinstance(value, LazyTensor)]
        notes += [f"`{name}` of the model stays behind: it is no tensor" for name in values]
    if dtype is not None and is_whole and content.has_optimizer:
        notes.append("--dtype changed the model only: the optimizer's state keeps its types")
    if is_whole and (content.progress is None or content.experiment_id is None):
        notes.append("the source does not tell its experiment or its step: named by its file, at step 0")
    return notes
