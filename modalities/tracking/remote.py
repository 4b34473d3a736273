"""Figures for Weights & Biases and TensorBoard, both optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modalities.exceptions import UserError
from modalities.tracking.settings import WandbMode
from modalities.tracking.subscribers import DummyResultsSubscriber, EvaluationResultBatch, ResultsSubscriberIF


class WandbResultsSubscriber(ResultsSubscriberIF):
    """Logs to Weights & Biases, online or into a local folder.

    Args:
        project: Project that the run belongs to.
        experiment_id: Name of the run; the same ID continues it.
        mode: Online, offline or disabled.
        directory: Where W&B keeps its files.
        config_file_path: The experiment's YAML, uploaded with the run.
        entity: User or team.
    """

    def __init__(
        self,
        project: str,
        experiment_id: str,
        mode: WandbMode,
        directory: Path,
        config_file_path: Path,
        entity: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "results_subscriber wandb needs the package wandb: pip install 'modalities[wandb]', or choose `to_disc`"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project, entity=entity, name=experiment_id, mode=mode.value.lower(), dir=str(directory)
        )
        if mode is not WandbMode.DISABLED:
            self._run.save(
                str(config_file_path.absolute()), base_path=str(config_file_path.absolute().parent), policy="now"
            )

    def consume_result(self, result: EvaluationResultBatch) -> None:
        figures = _named(result, " ")
        self._run.log(figures, step=result.num_train_steps_done)

    def close(self) -> None:
        self._run.finish()


class TensorBoardResultsSubscriber(ResultsSubscriberIF):
    """Writes TensorBoard event files.

    Args:
        directory: Where they go.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "results_subscriber tensorboard needs the package tensorboard: pip install 'modalities[tensorboard]'"
            ) from None
        self._writer: Any = SummaryWriter(str(directory))

    def consume_result(self, result: EvaluationResultBatch) -> None:
        for name, value in _named(result, "/").items():
            self._writer.add_scalar(name, value, result.num_train_steps_done)

    def close(self) -> None:
        self._writer.close()


def make_wandb_subscriber(
    global_rank: int,
    entity: str | None,
    project: str,
    experiment_id: str,
    mode: WandbMode,
    directory: Path,
    config_file_path: Path,
) -> ResultsSubscriberIF:
    """Builder of ``results_subscriber: wandb``; only rank 0 logs."""
    if global_rank != 0 or mode is WandbMode.DISABLED:
        return DummyResultsSubscriber()
    return WandbResultsSubscriber(project, experiment_id, mode, directory, config_file_path, entity)


def make_tensorboard_subscriber(global_rank: int, directory: Path) -> ResultsSubscriberIF:
    """Builder of ``results_subscriber: tensorboard``; only rank 0 writes."""
    return TensorBoardResultsSubscriber(directory) if global_rank == 0 else DummyResultsSubscriber()


def _named(result: EvaluationResultBatch, separator: str) -> dict[str, float]:
    figures = {**result.losses, **result.metrics, **result.throughput_metrics}
    return {f"{result.dataloader_tag}{separator}{name}": value for name, value in figures.items()}
