"""Door sign of ``data/``: tokenizers, packing, datasets, samplers, loaders."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from modalities.data.rules import packed_file_has_a_sample, packed_file_is_there
from modalities.data.settings import ShuffleMethod
from modalities.parallel.settings import ParallelismDegrees
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, ExistingFile, Instance
from modalities.registry.interfaces import (
    BatchSampler,
    CollateFn,
    DataLoader,
    Dataset,
    DeviceMesh,
    Packing,
    Sampler,
    Tokenizer,
)
from modalities.registry.rules import Rule
from modalities.registry.spec import Sign

sign = Sign()


@sign.component(
    "tokenizer",
    "pretrained_hf_tokenizer",
    builds="modalities.data.tokenizers:PreTrainedHFTokenizer",
    provides=Tokenizer,
)
class PreTrainedHFTokenizerConfig(ComponentConfig):
    """A tokenizer of the Hugging Face format, from a local folder."""

    pretrained_model_name_or_path: str = Field(description="folder with a tokenizer.json")
    max_length: int | None = Field(None, strict=True, ge=0, description="length that texts are cut or filled up to")
    truncation: bool = Field(False, description="cut texts to max_length")
    padding: bool | str = Field(False, description="fill up short texts: true, or max_length")
    special_tokens: dict[str, str | list[str] | tuple[str, ...]] | None = Field(
        None, description="further special tokens by role"
    )


@sign.component(
    "tokenizer",
    "pretrained_sp_tokenizer",
    builds="modalities.data.tokenizers:PreTrainedSPTokenizer",
    provides=Tokenizer,
    removed=dict.fromkeys(("padding", "truncation"), "SentencePiece texts are neither filled up nor cut"),
)
class PreTrainedSPTokenizerConfig(ComponentConfig):
    """A SentencePiece tokenizer, from a local file."""

    tokenizer_model_file: str = Field(description="the .model file")


@sign.component("packing", "jsonl", builds="modalities.data.packing:Packing", provides=Packing)
class PackingConfig(ComponentConfig):
    """How a packed file is made of JSONL text."""

    src_path: ExistingFile = Field(description="one JSON document per line")
    tokenizer: Annotated[Instance[Tokenizer], DefaultFrom("tokenizer")] = Field(description="text to ids")
    eod_token: str = Field(description="ends each document")
    jq_pattern: str = Field(".text", description="what of a document is its text")
    index_path: Path | None = Field(None, description="index of the text; by default beside the packed file")


@sign.component(
    "dataset",
    "packed_mem_map_dataset_continuous",
    builds="modalities.data.packed_dataset:PackedMemMapDatasetContinuous",
    provides=Dataset,
)
class PackedMemMapDatasetContinuousConfig(ComponentConfig):
    """Blocks of consecutive tokens of a packed file."""

    raw_data_path: Path = Field(description="the packed file; must be there unless pack_from makes it")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = Field(
        strict=True, gt=1, description="tokens that the model sees per sample"
    )
    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="name of the token ids in a sample")
    reuse_last_target: bool = Field(True, description="whether a block's last target is the next one's first input")
    pack_from: Instance[Packing] | None = Field(None, description="makes the packed file if it is not there")

    rules = (
        Rule(("raw_data_path", "pack_from:given"), packed_file_is_there),
        Rule(("sequence_length", "raw_data_path", "reuse_last_target?"), packed_file_has_a_sample),
    )


@sign.component("dataset", "mem_map_dataset", builds="modalities.data.raw_dataset:MemMapDataset", provides=Dataset)
class MemMapDatasetConfig(ComponentConfig):
    """One sample per document of a JSONL file, tokenized when it is asked for."""

    raw_data_path: ExistingFile = Field(description="one JSON document per line")
    tokenizer: Annotated[Instance[Tokenizer], DefaultFrom("tokenizer")] = Field(description="text to ids")
    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="name of the token ids in a sample")
    index_path: ExistingFile | None = Field(None, description="index of the file; by default beside it")
    jq_pattern: str = Field(description="what of a document is its text")


@sign.component("sampler", "sequential_sampler", builds="modalities.data.samplers:SequentialSampler", provides=Sampler)
class SequentialSamplerConfig(ComponentConfig):
    """All samples in file order, on every rank."""

    data_source: Instance[Dataset] = Field(description="what is sampled")


class _DistributedSamplerConfig(ComponentConfig):
    dataset: Instance[Dataset] = Field(description="what is sampled")
    seed: int | None = Field(0, ge=0, lt=2**62, description="of the order")
    drop_last: Literal[True] = Field(True, description="a pass leaves out what cannot be dealt out evenly")


@sign.component(
    "sampler", "distributed_sampler", builds="modalities.data.samplers:make_distributed_sampler", provides=Sampler
)
class DistributedSamplerConfig(_DistributedSamplerConfig):
    """One pass, dealt out to the ranks; for evaluation."""

    rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="this rank")
    num_replicas: Annotated[int, places.WORLD_SIZE] = Field(
        strict=True, ge=1, description="ranks that see different samples"
    )
    shuffle: bool = Field(description="whether the order is random")


class _ResumableSamplerConfig(_DistributedSamplerConfig):
    epoch: int = Field(0, strict=True, ge=0, description="epoch that the order starts with")
    shuffle: bool | None = Field(False, description="whether the order is random")
    skip_num_global_samples: int = Field(0, strict=True, ge=0, description="samples seen before, over all ranks")
    shuffle_method: EnumField[ShuffleMethod] = Field(
        ShuffleMethod.RANDPERM,
        description="randperm: drawn as a whole, as in existing runs; feistel: computed one by one, for a billion",
    )


@sign.component(
    "sampler",
    "resumable_distributed_sampler",
    builds="modalities.data.samplers:ResumableDistributedSampler",
    provides=Sampler,
)
class ResumableDistributedSamplerConfig(_ResumableSamplerConfig):
    """An endless order of epochs, dealt out to the ranks; for training."""

    rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="this rank")
    num_replicas: Annotated[int, places.WORLD_SIZE] = Field(
        strict=True, ge=1, description="ranks that see different samples"
    )


@sign.component(
    "sampler",
    "resumable_distributed_multi_dim_sampler",
    builds="modalities.data.samplers:make_multi_dim_sampler",
    provides=Sampler,
)
class ResumableMultiDimSamplerConfig(_ResumableSamplerConfig):
    """An endless order of epochs, dealt out along a data-parallel axis of the mesh; for training."""

    device_mesh: Annotated[Instance[DeviceMesh], places.DEVICE_MESH] = Field(description="tells rank and replicas")
    data_parallel_key: EnumField[ParallelismDegrees] = Field(description="axis whose ranks see different samples")


@sign.component(
    "batch_sampler", "default", builds="modalities.data.dataloader:make_batch_sampler", provides=BatchSampler
)
class BatchSamplerConfig(ComponentConfig):
    """Groups of samples."""

    sampler: Instance[Sampler] = Field(description="the order of samples")
    batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = Field(
        strict=True, gt=0, description="samples per batch on this rank"
    )
    drop_last: Literal[True] = Field(True, description="a pass leaves out a batch that is not full")


@sign.component(
    "collate_fn", "gpt_2_llm_collator", builds="modalities.data.collators:GPT2LLMCollateFn", provides=CollateFn
)
class GPT2LLMCollateFnConfig(ComponentConfig):
    """Inputs are all tokens but the last, targets all but the first."""

    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="name of the token ids")
    target_key: Annotated[str, places.TARGET_KEY] = Field(description="name of the targets")


@sign.component("data_loader", "default", builds="modalities.data.dataloader:make_dataloader", provides=DataLoader)
class DataLoaderConfig(ComponentConfig):
    """Batches of a dataset."""

    dataloader_tag: str = Field(description="name of the data in logs")
    dataset: Instance[Dataset] = Field(description="where samples come from")
    batch_sampler: Instance[BatchSampler] = Field(description="which samples make a batch")
    collate_fn: Annotated[Instance[CollateFn] | None, DefaultFrom("collate_fn")] = Field(
        None, description="makes a batch of samples"
    )
    num_workers: int = Field(strict=True, ge=0, description="worker processes; 0 makes batches in the trainer's")
    pin_memory: bool = Field(description="page-locked memory, where there is an accelerator")
