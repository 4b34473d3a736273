"""Words and nested schemas of the data components; free of torch."""

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import EnumField


class DataTypeEnum(Enum):
    """Type of generated numbers."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int64 = "int64"


class ShuffleMethod(Enum):
    """How a random order of samples is made."""

    RANDPERM = "randperm"
    FEISTEL = "feistel"


class DummySampleDataType(Enum):
    """Type of a random sample's numbers."""

    FLOAT = "float"
    INT = "int"


class DummySampleConfig(BaseModel):
    """One part of a random sample."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    sample_key: str = Field(description="its name")
    sample_shape: tuple[int, ...] = Field(description="its sizes")
    sample_type: EnumField[DummySampleDataType] = Field(description="float or int")


class LossMaskingTokenConfig(BaseModel):
    """The marks between which targets count."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    b_include_to_loss_token: str = Field(description="before what counts")
    e_include_to_loss_token: str = Field(description="behind what counts")
