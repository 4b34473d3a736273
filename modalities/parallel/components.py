"""Door sign of ``parallel/``: the device mesh and the sharding wrappers."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from modalities.parallel.rules import mesh_fits_world
from modalities.parallel.settings import MixedPrecisionSettings, PyTorchDtypes, ShardingStrategy
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, EnumField, Instance, NamesOf
from modalities.registry.interfaces import DeviceMesh, FSDP1Model, Model
from modalities.registry.rules import Rule
from modalities.registry.spec import Sign

sign = Sign()


@sign.component("device_mesh", "default", builds="modalities.parallel.mesh:make_device_mesh", provides=DeviceMesh)
class DeviceMeshConfig(ComponentConfig):
    """The ranks of the job, laid out along the axes of parallelism."""

    device_type: Literal["cpu", "cuda", "xpu", "hpu", "npu", "mps"] | None = Field(
        None, description="by default, and where the one named is absent, the machine's"
    )
    data_parallel_replicate_degree: int = Field(1, description="copies of the sharded model; -1 fills up the world")
    data_parallel_shard_degree: int = Field(description="ranks that share one copy; -1 fills up the world")
    tensor_parallel_degree: int = Field(1, ge=1, description="ranks that share one layer")
    pipeline_parallel_degree: int = Field(1, ge=1, description="stages of the model")
    context_parallel_degree: int = Field(1, ge=1, description="ranks that share one sequence")
    enable_loss_parallel: bool | None = Field(False, description="shard the loss along the tensor axis")
    world_size: Annotated[int, places.WORLD_SIZE] = Field(ge=1, description="number of ranks")

    rules = (
        Rule(
            (
                "world_size",
                "data_parallel_shard_degree",
                "data_parallel_replicate_degree?",
                "tensor_parallel_degree?",
                "pipeline_parallel_degree?",
                "context_parallel_degree?",
            ),
            mesh_fits_world,
        ),
    )


class FSDP2MixedPrecisionConfig(BaseModel):
    """Precision of computation and of gradient reduction; parameters are kept as the model made them."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    param_dtype: EnumField[PyTorchDtypes] = Field(description="type that a layer computes in")
    reduce_dtype: EnumField[PyTorchDtypes] = Field(description="type that gradients are reduced in")


@sign.component(
    "model", "fsdp1_wrapped", builds="modalities.parallel.fsdp1:shard_model", provides=FSDP1Model, wraps=("model",)
)
class FSDP1WrappedModelConfig(ComponentConfig):
    """A model sharded by FullyShardedDataParallel (FSDP1)."""

    model: Instance[Model] = Field(description="the model, with its weights")
    sync_module_states: bool = Field(description="give every rank the weights of rank 0")
    mixed_precision_settings: EnumField[MixedPrecisionSettings] = Field(description="precision under FSDP")
    sharding_strategy: EnumField[ShardingStrategy] = Field(description="what is sharded, and over which ranks")
    block_names: Annotated[list[str], NamesOf("modules", of="model")] = Field(
        min_length=1, description="class names of the layers that are sharded on their own"
    )


@sign.component(
    "model", "fsdp2_wrapped", builds="modalities.parallel.fsdp2:shard_model", provides=Model, wraps=("model",)
)
class FSDP2WrappedModelConfig(ComponentConfig):
    """A model sharded by fully_shard (FSDP2)."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, on any device, meta included")
    block_names: Annotated[list[str], NamesOf("modules", of="model")] = Field(
        min_length=1, description="class names of the layers that are sharded on their own"
    )
    mixed_precision_settings: FSDP2MixedPrecisionConfig = Field(description="precision under FSDP")
    reshard_after_forward: bool = Field(True, description="free a layer's full weights between forward and backward")
    device_mesh: Annotated[Instance[DeviceMesh], places.DEVICE_MESH] = Field(
        description="the mesh whose data-parallel axes are used"
    )
    layers_per_fsdp_unit: int = Field(1, ge=1, description="consecutive layers that are gathered together")
