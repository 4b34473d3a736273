"""Door sign of what existing configs use of ``parallel/`` and this version does not have yet: fields are checked."""

from typing import Annotated

from pydantic import AliasChoices, Field

from modalities.parallel.settings import PipelineSelectionTypes
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, Instance
from modalities.registry.interfaces import Anything, DeviceMesh, Loss, Model, Pipeline, PipelineStage, StagesGenerator
from modalities.registry.spec import Sign

sign = Sign()


@sign.component("pipeline", "staged", builds=None, provides=Pipeline)
class StagedPipelineConfig(ComponentConfig):
    """A model cut into stages."""

    whole_model: Instance[Model] = Field(description="the model, uncut")
    stages_generator: Instance[StagesGenerator] = Field(description="says which layers make a stage")
    device_mesh: Annotated[Instance[DeviceMesh], places.DEVICE_MESH] = Field(description="the mesh")
    local_rank: Annotated[int, DefaultFrom("settings.cuda_env.local_rank", "${cuda_env:LOCAL_RANK}")] = Field(
        strict=True, ge=0, description="rank on this machine"
    )
    pp_schedule_name: str = Field(description="name of torch's schedule")
    num_layers_per_stage: int = Field(strict=True, ge=1, description="layers of each stage")


@sign.component("pipeline", "scheduled", builds=None, provides=Pipeline)
class ScheduledPipelineConfig(ComponentConfig):
    """Stages with the schedule of their steps."""

    loss_fn: Annotated[Instance[Loss], DefaultFrom("loss_fn")] = Field(description="what is minimised")
    pp_schedule_name: str = Field(description="name of torch's schedule")
    batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = Field(strict=True, ge=1, description="samples per step")
    microbatch_size: int = Field(strict=True, ge=1, description="samples that go through the stages at once")
    pp_degree: int = Field(strict=True, ge=2, description="number of stages' ranks")
    pipeline: Instance[Pipeline] = Field(description="the stages")


@sign.component("pipeline", "selector", builds=None, provides=Anything)
class PipelineSelectorConfig(ComponentConfig):
    """A part of a pipeline."""

    pipeline: Instance[Pipeline] = Field(description="the pipeline")
    selection_type: EnumField[PipelineSelectionTypes] = Field(description="which part")


@sign.component("pipeline", "builder", builds=None, provides=Pipeline)
class PipelineBuilderConfig(ComponentConfig):
    """A pipeline put together from stages and the models in them."""

    pp_stages: Instance[PipelineStage] | list[Instance[PipelineStage]] = Field(
        validation_alias=AliasChoices("pp_stage", "pp_stages"), description="the stages of this rank"
    )
    model_parts: Instance[Model] | list[Instance[Model]] = Field(
        validation_alias=AliasChoices("model_part", "model_parts"), description="the models in them"
    )
    pp_schedule: Instance[Pipeline] | None = Field(None, description="the schedule")


@sign.component("stages_generator", "gpt2_stages_generator", builds=None, provides=StagesGenerator)
class GPT2StagesGeneratorConfig(ComponentConfig):
    """Stages of a GPT."""

    num_model_layers: Annotated[int, DefaultFrom("model_raw.n_layer")] = Field(
        strict=True, ge=1, description="number of blocks"
    )
    input_layer_equivalence: int = Field(1, strict=True, ge=1, description="blocks that the embedding costs")
    output_layer_equivalence: int = Field(1, strict=True, ge=1, description="blocks that the head costs")
