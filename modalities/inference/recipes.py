"""Top level of a text generation YAML. Free of torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import Instance
from modalities.registry.interfaces import InferenceComponent


class TextGenerationSettings(BaseModel):
    """What text is generated with; further names are free."""

    model_config = ConfigDict(defer_build=True, extra="allow")

    model_path: Path = Field(description="the checkpoint")
    sequence_length: int = Field(gt=0, description="longest sequence, in tokens")
    device: int | str = Field(description="cpu, or the number of the accelerator")
    referencing_keys: dict[str, str] = Field(description="names of the model's input and output")


class TextGenerationRecipe(BaseModel):
    """The slots of a text generation config."""

    model_config = ConfigDict(defer_build=True, extra="forbid", arbitrary_types_allowed=True)

    settings: TextGenerationSettings = Field(description="what text is generated with")
    text_inference_component: Instance[InferenceComponent] = Field(description="the model that answers prompts")
