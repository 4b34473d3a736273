"""The tensors of a model under the names and in the shapes of an architecture of transformers, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modalities.checkpointing.conversion.hugging_face.architectures import Architecture, ModuleNames, Role
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor, Tally
from modalities.checkpointing.key_report import KeyComparison, TensorForm, report_of
from modalities.checkpointing.reading.sources import MODEL_PREFIX, Form, TensorSource
from modalities.exceptions import CheckpointError
from modalities.models.components import GPT2LLMConfig
from modalities.models.gpt2 import GPT2LLM
from modalities.models.rotary import RotaryTransform
from modalities.models.settings import AttentionImplementation

EMBEDDING = "transformer.wte.weight"
HEAD = "transformer.lm_head.weight"


@dataclass(frozen=True)
class _Stored:
    """A tensor of theirs.

    Args:
        name: Its name.
        ours: Names of our tensors, concatenated along dimension 0.
        shapes: Of our tensors.
        transposed: Whether it is stored the other way round.
    """

    name: str
    ours: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(shape[0] for shape in self.shapes)
        whole = (rows, *self.shapes[0][1:])
        return tuple(reversed(whole)) if self.transposed else whole


def meta_model(settings: GPT2LLMConfig) -> GPT2LLM:
    """The model without memory; its attention needs no other package."""
    changes = {"use_meta_device": True, "attention_implementation": AttentionImplementation.PYTORCH_FLASH}
    fields = {name: getattr(settings, name) for name in GPT2LLMConfig.model_fields}
    return GPT2LLM(**fields | changes)


def exported_tensors(
    source: TensorSource,
    settings: GPT2LLMConfig,
    architecture: Architecture,
    dtype: torch.dtype | None,
    tally: Tally,
) -> dict[str, LazyTensor]:
    """What ``model.safetensors`` holds, by their names, read when it is written.

    A head that is tied to the embedding is left out, biases that only the architecture has are zeros, and the
    frequencies of rotary embeddings, which follow from the settings, are not stored.

    Args:
        source: A checkpoint of the model.
        settings: Of the model; the architecture expresses it.
        architecture: Of transformers.
        dtype: Of the weights; None for those of the checkpoint.
        tally: Told of what is read.

    Raises:
        CheckpointError: The checkpoint is not of this model.
    """
    model = meta_model(settings)
    own = model.state_dict()
    _require_model(source, own)
    _require_frequencies(source, model)
    if settings.use_weight_tying:
        _require_tie(source)

    tensors = {}
    for stored in _stored_tensors(settings, architecture, own):
        kept = dtype or _dtype_of(source, stored.ours[0] if stored.ours[0] in own else EMBEDDING)
        read = _reader(source, stored, own)
        tensors[stored.name] = LazyTensor(f"{MODEL_PREFIX}{stored.name}", Form.of(stored.shape, kept), read, tally)
    return tensors


def imported_tensors(
    source: TensorSource,
    settings: GPT2LLMConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    tally: Tally,
) -> dict[str, LazyTensor]:
    """The state dict of our model, read when it is written.

    Args:
        source: The safetensors files.
        settings: Of our model.
        architecture: Of transformers.
        dtype: Of the weights.
        tally: Told of what is read.

    Raises:
        CheckpointError: The files lack tensors, have others, or have them in other shapes.
    """
    model = meta_model(settings)
    own = model.state_dict()
    stored_tensors = list(_stored_tensors(settings, architecture, own))
    _require_stored(source, stored_tensors, settings)
    places = {
        name: (stored, index) for stored in stored_tensors for index, name in enumerate(stored.ours) if name in own
    }
    frequencies = _frequencies(model)

    tensors = {}
    for name, tensor in own.items():
        shape = tuple(tensor.shape)
        if name in frequencies:
            tensors[name] = LazyTensor(f"{MODEL_PREFIX}{name}", Form.of(shape, torch.float32), frequencies[name], tally)
            continue
        stored, index = places[EMBEDDING if name == HEAD and settings.use_weight_tying else name]
        tensors[name] = LazyTensor(
            f"{MODEL_PREFIX}{name}", Form.of(shape, dtype), _part_reader(source, stored, index), tally
        )
    return tensors


def biases_of(field: str, settings: GPT2LLMConfig, architecture: Architecture) -> list[str]:
    """Their names of the biases that a field of ours brings about.

    Args:
        field: ``bias``, or that of a norm, such as ``ffn_norm_config.config.bias``.
        settings: With the field true.
        architecture: Of transformers.
    """
    norm = field.removesuffix("_config.config.bias")
    own = meta_model(settings).state_dict()
    return [
        stored.name
        for stored in _stored_tensors(settings, architecture, own)
        if stored.ours[0].endswith(".bias")
        if (stored.ours[0].endswith(f".{norm}.bias") if norm != field else "norm" not in stored.ours[0])
    ]


def digests_of(tensors: Mapping[str, LazyTensor], tally: Tally) -> dict[str, str | None]:
    """What each tensor was as it was written, by its key in the output."""
    return {tensor.key: tally.digests.get(tensor.key) for tensor in tensors.values()}


def read_stored(source: TensorSource, name: str) -> Tensor:
    """A tensor of safetensors files by its name."""
    tensor: Tensor = source.read(f"{MODEL_PREFIX}{name}")
    return tensor


def _stored_tensors(
    settings: GPT2LLMConfig, architecture: Architecture, own: Mapping[str, Tensor]
) -> Iterator[_Stored]:
    """In the order of the model: what comes before the blocks, the blocks one by one, what comes after them."""
    modules = architecture.modules
    blocks = [names for names in modules if "{}" in names.theirs]
    first, last = modules.index(blocks[0]), modules.index(blocks[-1])
    for names in modules[:first]:
        yield from _stored_of(names, settings, architecture, own)
    for layer in range(settings.n_layer):
        for names in blocks:
            ours = tuple(name.format(layer) for name in names.ours)
            numbered = ModuleNames(names.theirs.format(layer), ours, names.role, names.transposed)
            yield from _stored_of(numbered, settings, architecture, own)
    after = [names for names in modules[first : last + 1] if "{}" not in names.theirs] + list(modules[last + 1 :])
    for names in after:
        yield from _stored_of(names, settings, architecture, own)


def _stored_of(
    names: ModuleNames, settings: GPT2LLMConfig, architecture: Architecture, own: Mapping[str, Tensor]
) -> Iterator[_Stored]:
    if names.ours[0] == HEAD.removesuffix(".weight") and settings.use_weight_tying:
        return
    shapes = tuple(tuple(own[f"{name}.weight"].shape) for name in names.ours)
    weights = tuple(f"{name}.weight" for name in names.ours)
    yield _Stored(f"{names.theirs}.weight", weights, shapes, names.transposed)
    has_bias = {
        Role.EMBEDDING: False,
        Role.LINEAR: architecture.always_has_bias or (settings.bias and bool(architecture.bias_keys)),
        Role.NORM: not architecture.has_rms_norm,
    }
    if has_bias[names.role]:
        biases = tuple(f"{name}.bias" for name in names.ours)
        yield _Stored(f"{names.theirs}.bias", biases, tuple((shape[0],) for shape in shapes), False)


def _reader(source: TensorSource, stored: _Stored, own: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if stored.ours[0] not in own:
            return torch.zeros(stored.shape)
        parts = [source.read(f"{MODEL_PREFIX}{name}") for name in stored.ours]
        whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t() if stored.transposed else whole

    return read


def _part_reader(source: TensorSource, stored: _Stored, index: int) -> Callable[[], Tensor]:
    def read() -> Tensor:
        whole = read_stored(source, stored.name)
        if stored.transposed:
            whole = whole.t()
        return torch.split(whole, [shape[0] for shape in stored.shapes])[index]

    return read


def _require_model(source: TensorSource, own: Mapping[str, Tensor]) -> None:
    saved = {
        key.removeprefix(MODEL_PREFIX): TensorForm(form.shape)
        for key, form in source.forms.items()
        if key.startswith(MODEL_PREFIX) and form is not None
    }
    # full files of other tools may lack the alias
    saved |= {
        alias.removeprefix(MODEL_PREFIX): saved[name.removeprefix(MODEL_PREFIX)] for alias, name in source.tied.items()
    }
    forms: dict[str, TensorForm | None] = {name: TensorForm(tuple(tensor.shape)) for name, tensor in own.items()}
    _require_equal(forms, saved, source)


def _require_stored(source: TensorSource, stored_tensors: list[_Stored], settings: GPT2LLMConfig) -> None:
    wanted: dict[str, TensorForm | None] = {stored.name: TensorForm(stored.shape) for stored in stored_tensors}
    found: dict[str, TensorForm | None] = {
        key.removeprefix(MODEL_PREFIX): TensorForm(form.shape)
        for key, form in source.forms.items()
        if form is not None and key not in source.tied
    }
    if settings.use_weight_tying and "lm_head.weight" in found:
        head = read_stored(source, "lm_head.weight")
        embedding = next(stored.name for stored in stored_tensors if stored.ours == (EMBEDDING,))
        if not torch.equal(head, read_stored(source, embedding)):
            raise CheckpointError(
                f"config.json ties the head to the embedding, but lm_head.weight and {embedding} in {source.path} "
                "differ: set tie_word_embeddings to false if they are two"
            )
        del found["lm_head.weight"]
    _require_equal(wanted, found, source)


def _require_equal(
    own: Mapping[str, TensorForm | None], saved: Mapping[str, TensorForm | None], source: TensorSource
) -> None:
    report = report_of(KeyComparison(own, saved), source.path)
    if report is not None:
        # a conversion has no such settings
        lines = [line for line in report.splitlines() if not line.strip().startswith("checkpoint_loading")]
        raise CheckpointError("\n".join(lines))


def _require_tie(source: TensorSource) -> None:
    if not torch.equal(source.read(f"{MODEL_PREFIX}{EMBEDDING}"), source.read(f"{MODEL_PREFIX}{HEAD}")):
        raise CheckpointError(
            f"the config says use_weight_tying: true, but {EMBEDDING} and {HEAD} in {source.path} differ: "
            "set model_raw.use_weight_tying=false if they were trained apart"
        )


def _frequencies(model: GPT2LLM) -> dict[str, Callable[[], Tensor]]:
    """The buffers of rotary embeddings, as a fresh model has them."""

    def computed(transform: RotaryTransform) -> Callable[[], Tensor]:
        return lambda: transform.frequencies(torch.device("cpu"))

    return {
        f"{name}.inv_freq": computed(module)
        for name, module in model.named_modules()
        if isinstance(module, RotaryTransform)
    }


def _require_frequencies(source: TensorSource, model: GPT2LLM) -> None:
    for name, computed in _frequencies(model).items():
        stored = source.read(f"{MODEL_PREFIX}{name}")
        # of another type the model computes them anew
        if stored.dtype == torch.float32 and not torch.allclose(stored, computed(), rtol=1e-6, atol=0):
            raise CheckpointError(
                f"{name} in {source.path} is not what the config's base_freq gives: the checkpoint was trained with "
                "another base_freq; name the right config with --config"
            )


def _dtype_of(source: TensorSource, name: str) -> torch.dtype:
    form = source.forms[f"{MODEL_PREFIX}{name}"]
    assert form is not None
    return form.torch_dtype
