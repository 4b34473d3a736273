"""Door sign of what existing configs use of ``models/`` and this version does not have yet: fields are checked."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from modalities.models.settings import (
    ActivationCheckpointingVariants,
    FullACParams,
    HuggingFaceModelTypes,
    SelectiveLayerACParams,
    SelectiveOpACParams,
    TextDecoderConfig,
    VisionTransformerConfig,
)
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, EnumField, Instance
from modalities.registry.interfaces import DebuggingHook, DebuggingSettings, DeviceMesh, FSDP1Model, Model
from modalities.registry.spec import SameAs, Sign

sign = Sign()


@sign.component("model", "gpt2_tp", builds=None, provides=SameAs("model"))
class GPT2TensorParallelConfig(ComponentConfig):
    """A GPT whose layers are shared out along the tensor axis of the mesh."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, or its parts")
    device_mesh: Annotated[Instance[DeviceMesh], places.DEVICE_MESH] = Field(description="the mesh")


@sign.component("model", "huggingface_pretrained_model", builds=None, provides=Model)
class HuggingFaceModelConfig(ComponentConfig):
    """A pretrained model of the Hugging Face hub."""

    model_type: EnumField[HuggingFaceModelTypes] = Field(description="class of transformers that loads it")
    model_name: Path = Field(description="its name on the hub, or a folder")
    prediction_key: Annotated[str, places.PREDICTION_KEY] = Field(description="key of the logits in the output")
    huggingface_prediction_subscription_key: str = Field(description="key of the logits in the hub model's output")
    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="key of the token ids in a batch")
    model_args: Any | None = Field(None, description="further arguments of the loader, in order")
    kwargs: Any | None = Field(None, description="further arguments of the loader, by name")


@sign.component("model", "activation_checkpointed_fsdp1", builds=None, provides=SameAs("model"))
class FSDP1ActivationCheckpointedConfig(ComponentConfig):
    """An FSDP1 model that recomputes activations in the backward pass."""

    model: Instance[FSDP1Model] = Field(description="the model wrapped with FSDP1")
    activation_checkpointing_modules: list[str] | None = Field([], description="class names of what is recomputed")


@sign.component("model", "activation_checkpointed", builds=None, provides=SameAs("model"))
class ActivationCheckpointedConfig(ComponentConfig):
    """A model that recomputes activations in the backward pass."""

    ac_variant: EnumField[ActivationCheckpointingVariants] = Field(description="what is recomputed")
    layers_fqn: str = Field(description="dotted name of the list of layers")
    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, or its parts")
    ac_fun_params: FullACParams | SelectiveLayerACParams | SelectiveOpACParams = Field(
        description="settings of the variant"
    )


@sign.component("model", "coca", builds=None, provides=Model)
class CoCaConfig(ComponentConfig):
    """A model of images and captions (https://arxiv.org/abs/2205.01917)."""

    prediction_key: str = Field("logits", description="key of the logits in the output")
    vision_embd_prediction_key: str = Field(description="key of the image's embeddings")
    text_embd_prediction_key: str = Field(description="key of the text's embeddings")
    vision_cls_prediction_key: str = Field(description="key of the image's summary")
    text_cls_prediction_key: str = Field(description="key of the text's summary")
    vision_encoder_config: VisionTransformerConfig = Field(description="the image encoder")
    text_decoder_config: TextDecoderConfig = Field(description="the text decoder")
    n_pool_head: int = Field(ge=1, description="heads of the attention pooling")
    n_vision_queries: int = Field(ge=1, description="queries of the attention pooling")
    bias_attn_pool: bool = Field(description="biases in the attention pooling")
    epsilon_attn_pool: float = Field(ge=0, description="added to the variance in its norms")


@sign.component("model", "debugging_enriched", builds=None, provides=SameAs("model"))
class DebuggingEnrichedConfig(ComponentConfig):
    """A model that writes down statistics of its tensors."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, or its parts")
    logging_dir_path: Path = Field(description="folder for the statistics")
    tracked_ranks: set[int] | None = Field(None, description="ranks that write; by default all")
    log_interval_steps: int | None = Field(1, description="steps between two records")


@sign.component("debugging", "settings", builds=None, provides=DebuggingSettings)
class DebuggingConfig(ComponentConfig):
    """Hooks and determinism of a run under examination."""

    forward_hooks: list[Instance[DebuggingHook]] = Field([], description="hooks that are kept alive")
    enable_determinism: bool = Field(False, description="deterministic algorithms only")


@sign.component("model_debugging_hook", "nan_hook", builds=None, provides=DebuggingHook)
class NaNHookConfig(ComponentConfig):
    """Reports outputs that are not a number."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, or its parts")
    raise_exception: bool = Field(False, description="stop the run instead")


@sign.component("model_debugging_hook", "print_forward_hook", builds=None, provides=DebuggingHook)
class PrintForwardHookConfig(ComponentConfig):
    """Prints what goes in and out of each module."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, or its parts")
    print_shape_only: bool = Field(False, description="shapes instead of values")
