"""Top level of a packing YAML. Free of torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import ExistingFile, Instance
from modalities.registry.interfaces import Tokenizer


class PackingSettings(BaseModel):
    """What is packed, and where to."""

    model_config = ConfigDict(extra="forbid")

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

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    settings: PackingSettings
    tokenizer: Instance[Tokenizer]
