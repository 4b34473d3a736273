"""Door sign of ``inference/``."""

from pydantic import Field

from modalities.registry.fields import ComponentConfig, Instance
from modalities.registry.interfaces import InferenceComponent, Model, Tokenizer
from modalities.registry.spec import Sign

sign = Sign()


@sign.component("inference_component", "text", builds=None, provides=InferenceComponent)
class TextInferenceConfig(ComponentConfig):
    """A model that continues prompts; `modalities generate` does it from a run folder."""

    model: Instance[Model] = Field(description="the model, with its weights")
    tokenizer: Instance[Tokenizer] = Field(description="text to ids and back")
    prompt_template: str = Field(description="text around the prompt, which stands as {prompt_input}")
    sequence_length: int = Field(ge=1, description="longest sequence, in tokens")
    temperature: float | None = Field(1.0, ge=0, description="0 takes the likeliest token")
    eod_token: str = Field("<eod>", description="ends the answer")
    device: int | str = Field(description="cpu, or the number of the accelerator")
