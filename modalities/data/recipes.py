"""Top level of a packing YAML. Free of torch."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import ExistingFile, Instance
from modalities.registry.interfaces import Tokenizer


class PackingSettings(BaseModel):
    """What is packed, and where to."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    src_path: ExistingFile = Field(description="the JSONL file")
    dst_path: Path | None = Field(None, description="the packed file; default: the source's name with suffix .pbin")
    index_path: Path | None = Field(None, description="index of the source; made if absent")
    jq_pattern: str = Field(".text", description="what of a document is its text")
    eod_token: str = Field(description="ends each document")
    num_cpus: int | None = Field(None, description="for existing files; the tokenizer uses all cores by itself")
    processing_batch_size: int | None = Field(None, description="for existing files; without effect")
    raw_samples_queue_size: int | None = Field(None, description="for existing files; without effect")
    processed_samples_queue_size: int | None = Field(None, description="for existing files; without effect")


class PackingRecipe(BaseModel):
    """The slots of a packing config."""

    model_config = ConfigDict(defer_build=True, extra="forbid", arbitrary_types_allowed=True)

    settings: PackingSettings = Field(description="what is packed, and where to")
    tokenizer: Instance[Tokenizer] = Field(description="text to ids")


class Splitting(BaseModel):
    """Shares of the data in percent."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    train: int = Field(ge=0, le=100, description="share to train on")
    val: int = Field(ge=0, le=100, description="share to evaluate on while training")
    test: int = Field(ge=0, le=100, description="share to evaluate on at the end")


class SplitSettings(BaseModel):
    """How conversations are divided."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    splitting: Splitting = Field(description="shares in percent")
    seed: int = Field(ge=0, description="of the division")


class InstructionTuningSettings(BaseModel):
    """Which conversations are rendered, and where to."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    src_path: Path = Field(description="the JSONL file of conversations")
    dst_path: Path = Field(description="where the rendered files go")
    messages_key: str = Field(description="what of a document holds its turns")
    split_config: SplitSettings = Field(description="how conversations are divided")
    pbin_creation_config_file_path: Path | None = Field(None, description="a packing config for the rendered files")


class RoleMapping(BaseModel):
    """How roles are called in the rendered text."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    role_mapping: dict[str, str] = Field(description="name in the text by name in the data")


class InstructionTuningRecipe(BaseModel):
    """The entries of a config that renders conversations with a chat template."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    settings: InstructionTuningSettings = Field(description="which conversations, and where to")
    instruction_data_transformation: RoleMapping = Field(description="how roles are called")
    jinja2_chat_template: str = Field(description="the template")
    chat_template_data: dict[str, Any] = Field(description="what the template asks for besides the messages")
