"""Door sign of what existing configs use of ``data/`` and this version does not have yet: fields are checked."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from modalities.data.settings import DataTypeEnum, DummySampleConfig, LossMaskingTokenConfig
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, Instance
from modalities.registry.interfaces import CollateFn, Dataset, DatasetBatchGenerator, Tokenizer
from modalities.registry.spec import Sign

sign = Sign()


@sign.component("dataset", "packed_mem_map_dataset_megatron", builds=None, provides=Dataset)
class MegatronDatasetConfig(ComponentConfig):
    """Blocks of whole documents of a packed file."""

    raw_data_path: Path = Field(description="the packed file")
    block_size: int = Field(strict=True, gt=1, description="tokens per sample")
    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="name of the token ids in a sample")


@sign.component("dataset", "dummy_dataset", builds=None, provides=Dataset)
class DummyDatasetConfig(ComponentConfig):
    """Random samples of given shapes."""

    num_samples: int = Field(description="number of samples")
    sample_definition: list[DummySampleConfig] = Field(description="what a sample consists of")


@sign.component("dataset", "combined", builds=None, provides=Dataset)
class CombinedDatasetConfig(ComponentConfig):
    """Several datasets, one after another."""

    datasets: list[Instance[Dataset]] = Field(description="the datasets, in this order")


@sign.component("collate_fn", "coca_collator", builds=None, provides=CollateFn)
class CoCaCollatorConfig(ComponentConfig):
    """Batches of images and captions."""

    sample_keys: list[str] = Field(description="names of the inputs")
    target_keys: list[str] = Field(description="names of the targets")
    text_sample_key: str = Field(description="name of the text's token ids")
    text_target_key: str = Field(description="name of the text's targets")


@sign.component(
    "collate_fn", "mask_loss_collator_wrapper", builds=None, provides=CollateFn, wraps=("wrapped_collate_fn",)
)
class MaskLossCollatorConfig(ComponentConfig):
    """Batches whose targets count only between two marks, as for the answers of a conversation."""

    wrapped_collate_fn: Instance[CollateFn] = Field(description="makes the batch")
    target_keys_to_mask: list[str] = Field(description="names of the targets")
    loss_ignore_index: int = Field(description="target id that the loss leaves out")
    mask_tokens: LossMaskingTokenConfig = Field(description="the two marks")
    tokenizer: Annotated[Instance[Tokenizer], DefaultFrom("tokenizer")] = Field(description="knows the marks' ids")


@sign.component("dataset_batch_generator", "random", builds=None, provides=DatasetBatchGenerator)
class RandomBatchGeneratorConfig(ComponentConfig):
    """Random batches of a given shape, to be profiled."""

    dims: dict[str, int] = Field(description="size by name of the dimension")
    data_type: EnumField[DataTypeEnum] = Field(description="type of the numbers")
    min_val: int = Field(description="lowest number")
    max_val: int = Field(description="highest number")
