"""``modalities checkpoint``: what lies on disk, seen, proven and mended."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modalities.cli.converting import convert_command
from modalities.cli.hugging_face import export_hf, import_hf
from modalities.exceptions import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from modalities.checkpointing.catalogue import Catalogue, Entry

_location = click.Path(path_type=Path)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for programs.")
_level_option = click.option(
    "--level",
    type=click.Choice(["full", "sizes"]),
    default="full",
    show_default=True,
    help="Read all data and compare checksums, or compare the sizes of the files only.",
)


class _Group(click.Group):
    """A damaged checkpoint is a finding here, not a mistake of the user's."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DamagedCheckpoint as error:
            click.echo(f"error: {error}", err=True)
            return 1


@click.group(cls=_Group)
def checkpoint() -> None:
    """List, inspect, verify, compare, convert and mend checkpoints.

    Exit code 0: good; 1: something is damaged or different; 2: a mistake in the call.
    """


checkpoint.add_command(convert_command)
checkpoint.add_command(export_hf)
checkpoint.add_command(import_hf)


@checkpoint.command("list")
@click.argument("directory", metavar="DIR", type=_location)
@_json_option
def list_command(directory: Path, as_json: bool) -> int:
    """List the checkpoints in DIR: a run's folder, a folder of checkpoints, or one checkpoint.

    Manifests and sizes are looked at; no data is read.
    """
    from modalities.cli.checkpoint_output import show_catalogue

    catalogue = _catalogue(directory)
    show_catalogue(catalogue, as_json)
    has_bad_pointer = catalogue.pointer is not None and catalogue.pointer.problem is not None
    return 1 if has_bad_pointer or any(entry.is_bad for entry in catalogue.entries) else 0


@checkpoint.command()
@click.argument("location", metavar="CHECKPOINT", type=_location)
@click.argument("pattern", required=False)
@click.option("--norms", is_flag=True, help="Add the L2 norm of each tensor, one read at a time.")
@_json_option
def inspect(location: Path, pattern: str | None, norms: bool, as_json: bool) -> int:
    """Tell what is in a CHECKPOINT: progress, origin, files, and keys with shape, type and bytes.

    PATTERN limits the keys to those that it is a part of, or that match it if it has * or ? in it. The keys are those
    of a DCP folder, also for full files.
    """
    from modalities.checkpointing.catalogue import entry_at
    from modalities.checkpointing.comparison import l2_norm, matching
    from modalities.checkpointing.reading.sources import open_source
    from modalities.cli.checkpoint_output import show_inspection
    from modalities.cli.output import byte_progress

    source = open_source(_located(location))
    entry = entry_at(source.path)
    forms = {key: source.forms[key] for key in matching(source.forms, pattern)}
    norm_of: dict[str, float] = {}
    tensors = {key: form for key, form in forms.items() if form is not None} if norms else {}
    with byte_progress("reading", sum(form.num_bytes for form in tensors.values())) as on_bytes:
        for key, form in tensors.items():
            norm_of[key] = l2_norm(source.read(key))
            on_bytes(form.num_bytes)
    show_inspection(source, entry, forms, norm_of, as_json)
    return 1 if entry is not None and entry.is_bad else 0


@checkpoint.command()
@click.argument("location", metavar="CHECKPOINT|DIR", type=_location)
@_level_option
@_json_option
def verify(location: Path, level: str, as_json: bool) -> int:
    """Prove that a CHECKPOINT, or all in DIR, are as they were written; every bad file is named."""
    from modalities.cli.checkpoint_output import show_verdicts
    from modalities.cli.output import byte_progress

    entries = _catalogue(location).entries
    if not entries:
        raise CheckpointError(f"no checkpoint in {location}, only what killed runs left; `modalities checkpoint list`")
    total = sum(entry.manifest.num_bytes for entry in entries if entry.manifest is not None and level == "full")
    with byte_progress("verifying", total) as on_bytes:
        looked_into = [_verified(entry, level, on_bytes) for entry in entries]
    show_verdicts(looked_into, level, as_json)
    for entry in looked_into:
        if entry.state == "unverified":
            path = entry.checkpoint.path
            click.echo(
                f"warning: {path} has no manifest: its structure is sound, its data cannot be verified; "
                f"`modalities checkpoint adopt {path}` writes a manifest",
                err=True,
            )
    return 1 if any(entry.is_bad for entry in looked_into) else 0


@checkpoint.command()
@click.argument("a", metavar="A", type=_location)
@click.argument("b", metavar="B", type=_location)
@click.option("--all", "show_all", is_flag=True, help="Show equal keys, too.")
@_json_option
def diff(a: Path, b: Path, show_all: bool, as_json: bool) -> int:
    """Compare checkpoints A and B, of any kind, tensor by tensor; exit code 1 if they differ.

    Equal is bit for bit; where values differ, the largest absolute difference and |A-B| / |A| are told.
    """
    from modalities.checkpointing.comparison import compare, sections_left_out
    from modalities.checkpointing.reading.sources import open_source
    from modalities.cli.checkpoint_output import show_differences
    from modalities.cli.output import byte_progress

    sources = open_source(_located(a)), open_source(_located(b))
    found = []
    with byte_progress("comparing", sum(form.num_bytes for form in sources[0].forms.values() if form)) as on_bytes:
        for difference in compare(*sources):
            found.append(difference)
            on_bytes(difference.a.num_bytes if difference.a else 0)
    show_differences(found, sections_left_out(*sources), show_all, as_json)
    return 0 if all(difference.status == "equal" for difference in found) else 1


@checkpoint.command()
@click.argument("directory", metavar="DIR", type=_location)
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many good ones stay of each experiment.")
@click.option("--damaged", is_flag=True, help="Delete damaged ones, too, where a good one remains.")
@click.option("--dry-run", "--dry_run", "dry_run", is_flag=True, help="Only tell what would go.")
@_level_option
@_json_option
def prune(directory: Path, keep: int, damaged: bool, dry_run: bool, level: str, as_json: bool) -> int:
    """Delete all but the newest good checkpoints of each experiment in DIR.

    Those that stay are verified first, so that no good one goes for a newer one that is damaged.
    """
    from modalities.checkpointing.pruning import delete, plan_pruning
    from modalities.cli.checkpoint_output import show_pruning
    from modalities.cli.output import byte_progress

    catalogue = _catalogue_of_several(directory)
    with byte_progress("verifying", None) as on_bytes:

        def prove(entry: Entry) -> Entry:
            return _verified(entry, level, on_bytes)

        plan = plan_pruning(catalogue.entries, keep, with_damaged=damaged, prove=prove)
    stuck = [] if dry_run else [entry for entry in plan.deleted if not delete(entry)]
    show_pruning(plan, stuck, dry_run, as_json)
    if any(entry.is_last for entry in plan.deleted) and not dry_run:
        click.echo(
            "warning: last_checkpoint_info.json pointed at a deleted one; "
            f"`modalities checkpoint repair {directory}` writes it anew",
            err=True,
        )
    return 1 if stuck else 0


@checkpoint.command()
@click.argument("directory", metavar="DIR", type=_location)
@_json_option
def repair(directory: Path, as_json: bool) -> int:
    """Write last_checkpoint_info.json of DIR anew: it names the newest checkpoint that passes full verification."""
    from modalities.checkpointing.adoption import repair as repair_pointer
    from modalities.cli.checkpoint_output import show_repair
    from modalities.cli.output import byte_progress

    with byte_progress("verifying", None) as on_bytes:
        done = repair_pointer(_catalogue_of_several(directory), on_bytes)
    show_repair(done, as_json)
    return 1 if done.chosen is None else 0


@checkpoint.command()
@click.argument("location", metavar="CHECKPOINT", type=_location)
@_json_option
def adopt(location: Path, as_json: bool) -> int:
    """Write the manifest that a CHECKPOINT of other tools, or of older versions, lacks; every tensor is read once.

    Files that hold more than tensors and plain values are refused. Its name must tell its experiment and progress.
    """
    from modalities.checkpointing.adoption import adopt as adopt_checkpoint
    from modalities.checkpointing.adoption import checkpoint_to_adopt
    from modalities.cli.output import as_size, byte_progress, show_json

    found = checkpoint_to_adopt(_located(location))
    with byte_progress("adopting", None) as on_bytes:
        try:
            manifest = adopt_checkpoint(found, on_bytes)
        except CheckpointError as error:
            # no mistake in the call: the checkpoint is not what it should be
            click.echo(f"error: {found.path} is not adopted: {error}", err=True)
            return 1
    if as_json:
        show_json({"manifest": str(found.manifest_path), **asdict(manifest)})
    else:
        size = as_size(manifest.num_bytes)
        click.echo(f"{found.manifest_path}: {len(manifest.tensors)} tensors in {len(manifest.files)} files, {size}")
    return 0


def _located(path: Path) -> Path:
    """A path of the command line: a URL, or one that has a name even if it is ``.``."""
    from modalities.checkpointing.storage import as_location

    location = as_location(path)
    return location if location.name not in ("", "..") else location.resolve()


def _catalogue(path: Path) -> Catalogue:
    """What lies where the user points; a run may keep its checkpoints elsewhere than in its folder."""
    from modalities.checkpointing.catalogue import open_catalogue
    from modalities.run_folder import find_checkpoint

    location = _located(path)
    try:
        return open_catalogue(location)
    except CheckpointError:
        return open_catalogue(find_checkpoint(location).path.parent)


def _catalogue_of_several(directory: Path) -> Catalogue:
    catalogue = _catalogue(directory)
    if catalogue.is_of_one:
        raise click.UsageError(f"{directory} is one checkpoint; give the folder that it lies in")
    return catalogue


def _verified(entry: Entry, level: str, on_bytes: Any) -> Entry:
    from modalities.checkpointing.catalogue import prove

    if entry.state == "unverified":
        from modalities.checkpointing.adoption import check_without_manifest

        findings = check_without_manifest(entry.checkpoint)
        return replace(entry, findings=tuple(findings), state="damaged" if findings else "unverified")
    return prove(entry, on_bytes) if level == "full" else entry
