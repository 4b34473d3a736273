"""Door sign of ``tracking/``: who listens to a run."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, Instance
from modalities.registry.interfaces import DataLoader, ProgressSubscriber, ResultsSubscriber
from modalities.registry.spec import Sign
from modalities.tracking.settings import WandbMode

sign = Sign()

_RUN_FOLDER = "${modalities_env:experiments_root_path}/${modalities_env:experiment_id}"


@sign.component(
    "progress_subscriber",
    "dummy",
    builds="modalities.tracking.subscribers:DummyProgressSubscriber",
    provides=ProgressSubscriber,
)
class DummyProgressConfig(ComponentConfig):
    """Shows nothing."""


@sign.component(
    "progress_subscriber",
    "rich",
    builds="modalities.tracking.console:make_progress_subscriber",
    provides=ProgressSubscriber,
)
class RichProgressConfig(ComponentConfig):
    """A live progress bar with the latest figures; without a terminal, plain lines."""

    eval_dataloaders: list[Instance[DataLoader]] | None = Field([], description="evaluation data, for existing files")
    train_dataloader_tag: Annotated[str, DefaultFrom("train_dataloader.dataloader_tag")] = Field(
        description="tag of the training data, for existing files"
    )
    num_seen_steps: Annotated[int, places.NUM_SEEN_STEPS] = Field(
        0, strict=True, ge=0, description="steps done before this run"
    )
    num_target_steps: Annotated[int, places.NUM_TARGET_STEPS] = Field(
        strict=True, gt=0, description="steps at the end of the run"
    )
    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")


@sign.component(
    "results_subscriber",
    "dummy",
    builds="modalities.tracking.subscribers:DummyResultsSubscriber",
    provides=ResultsSubscriber,
)
class DummyResultsConfig(ComponentConfig):
    """Drops the figures; the run folder has them in any case."""


@sign.component(
    "results_subscriber",
    "to_disc",
    builds="modalities.tracking.metrics_file:make_metrics_file",
    provides=ResultsSubscriber,
)
class ToDiscConfig(ComponentConfig):
    """One JSON object per line in a file of one's own."""

    output_file_path: Path = Field(description="the file; rank 0 appends to it")


@sign.component(
    "results_subscriber",
    "rich",
    builds="modalities.tracking.console:make_results_subscriber",
    provides=ResultsSubscriber,
)
class RichResultsConfig(ComponentConfig):
    """A line on the screen per evaluation."""

    num_ranks: Annotated[int, places.WORLD_SIZE] = Field(description="number of ranks, for existing files")
    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")


@sign.component(
    "results_subscriber", "wandb", builds="modalities.tracking.remote:make_wandb_subscriber", provides=ResultsSubscriber
)
class WandbConfig(ComponentConfig):
    """Weights & Biases, online or offline."""

    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    entity: str | None = Field(None, description="user or team")
    project: str = Field(description="project that the run belongs to")
    experiment_id: Annotated[str, places.EXPERIMENT_ID] = Field(description="name of the run")
    mode: EnumField[WandbMode] = Field(description="ONLINE, OFFLINE or DISABLED")
    directory: Annotated[Path, DefaultFrom(f"{_RUN_FOLDER}/wandb")] = Field(description="folder for W&B's files")
    config_file_path: Annotated[Path, places.CONFIG_FILE_PATH] = Field(
        description="the experiment's YAML, uploaded with the run"
    )


@sign.component(
    "results_subscriber",
    "tensorboard",
    builds="modalities.tracking.remote:make_tensorboard_subscriber",
    provides=ResultsSubscriber,
)
class TensorBoardConfig(ComponentConfig):
    """TensorBoard event files."""

    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    directory: Annotated[Path, DefaultFrom(f"{_RUN_FOLDER}/tensorboard")] = Field(
        description="folder for the event files"
    )
