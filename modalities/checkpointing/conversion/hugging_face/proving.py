"""The proof of a conversion: stock transformers computes from one side what our model computes from the other.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

# shape suffixes are capitals
# ruff: noqa: N803, N806

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.checkpointing.conversion.hugging_face.tensors import meta_model
from modalities.checkpointing.reading.sources import MODEL_PREFIX, TensorSource
from modalities.data.tokenizers import TokenizerWrapper
from modalities.exceptions import CheckpointError
from modalities.models.components import GPT2LLMConfig
from modalities.models.gpt2 import GPT2LLM
from modalities.models.rotary import RotaryTransform

MAX_DIFFERENCE = 1e-5
"""Of logits in fp32; of logits beyond 1, relative to the largest."""

_BATCH, _LONGEST, _NEW_TOKENS = 2, 128, 8
_TEXTS = (
    "It is a truth universally acknowledged,",
    " two  spaces, a\ttab and\na new line\n\n",
    "numbers 0 12 345.67, signs #!? (a) [b] {c} <d>",
    "Größe, naïve, Ελλάδα, 東京, 🙂",
)


@dataclass(frozen=True)
class Expected:
    """What our model gives.

    Args:
        ids_BT: Random token ids.
        logits_BTV: For them, in fp32.
    """

    ids_BT: Tensor  # noqa: N815
    logits_BTV: Tensor  # noqa: N815


def require_transformers(command: str) -> None:
    """Check that the package is there.

    Raises:
        CheckpointError: It is not.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f'{command} proves its output with the package transformers: pip install "modalities[hf]"; '
            "with --no-verify it does without the proof"
        )


def loaded_model(settings: GPT2LLMConfig, source: TensorSource, dtype: torch.dtype | None) -> GPT2LLM:
    """Our model on the CPU in fp32, its weights read one by one.

    Args:
        settings: Of the model.
        source: A checkpoint of it.
        dtype: That weights are rounded to before; None for none.
    """
    model = meta_model(settings)
    model.to_empty(device="cpu")
    if settings.use_weight_tying:
        model.transformer["lm_head"].weight = model.transformer["wte"].weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.read(f"{MODEL_PREFIX}{name}")
            parameter.copy_(value if dtype is None else value.to(dtype))
    for module in model.modules():
        if isinstance(module, RotaryTransform):
            module.reset_parameters()
    return model.eval()


def expected_of(model: GPT2LLM) -> Expected:
    """Logits of random sequences, the same ones at each call."""
    length = min(model.sequence_length, _LONGEST)
    ids_BT = torch.randint(model.vocab_size, (_BATCH, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_BTV = model(ids_BT)
    assert isinstance(logits_BTV, Tensor)
    return Expected(ids_BT, logits_BTV)


def prove(folder: Path, model: GPT2LLM, expected: Expected) -> float:
    """Load a folder with stock transformers and compare: logits of whole sequences, and generation token by token.

    Args:
        folder: As transformers reads it.
        model: Ours.
        expected: What it gives.

    Returns:
        The largest absolute difference of logits.

    Raises:
        CheckpointError: transformers does not load it, has weights left over, or computes something else.
    """
    with _quiet() as transformers:
        theirs = _load(transformers, folder)
        with torch.no_grad():
            logits_BTV = theirs(input_ids=expected.ids_BT).logits
        differences = [_difference("logits", logits_BTV, expected.logits_BTV)]
        num_prompt = max(1, min(model.sequence_length, _LONGEST) - _NEW_TOKENS) // 2 or 1
        num_new = min(_NEW_TOKENS, model.sequence_length - num_prompt)
        for use_cache in (True, False) if num_new > 0 else ():
            prompt_BT = expected.ids_BT[:1, :num_prompt]
            what = f"logits of generation {'with' if use_cache else 'without'} a cache"
            differences.append(_difference(what, *_generated(theirs, model, prompt_BT, num_new, use_cache)))
    return max(differences)


def prove_tokenizer(folder: Path, tokenizer: TokenizerWrapper) -> None:
    """Load the tokenizer of a folder with ``AutoTokenizer`` and compare ids and texts.

    Raises:
        CheckpointError: They differ.
    """
    with _quiet() as transformers:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        for text in _TEXTS:
            ids = tokenizer.tokenize(text)
            if theirs(text)["input_ids"] != ids or theirs.decode(ids) != tokenizer.decode(ids):
                raise CheckpointError(
                    f"AutoTokenizer gives other ids or texts than the tokenizer of the run, for {text!r}: "
                    "nothing was written; --no-tokenizer exports the model alone"
                )


def _load(transformers: Any, folder: Path) -> Any:
    try:
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        # whatever its version raises: the folder is not what it takes
        raise CheckpointError(f"transformers does not load {folder.name}: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise CheckpointError(f"transformers finds {what.replace('_', ' ')}: {sorted(map(str, info[what]))[:3]}")
    return theirs.eval()


def _generated(theirs: Any, model: GPT2LLM, prompt_BT: Tensor, num_new: int, use_cache: bool) -> tuple[Tensor, Tensor]:
    """Logits (T, V) of each greedy step of theirs, and ours for the same tokens."""
    with torch.no_grad():
        found = theirs.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=num_new,
            do_sample=False,
            use_cache=use_cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ours_BTV = model(found.sequences)
    num_steps = len(found.logits)
    return torch.cat(list(found.logits)), ours_BTV[0, prompt_BT.size(1) - 1 :][:num_steps]


def _difference(what: str, found: Tensor, expected: Tensor) -> float:
    difference = float((found.float() - expected.float()).abs().max())
    allowed = MAX_DIFFERENCE * max(1.0, float(expected.abs().max()))
    # written so that what is not a number is refused, too
    if not difference <= allowed:
        raise CheckpointError(
            f"{what} of transformers differ by {difference:.2e} from ours, more than {allowed:.0e}: nothing was "
            "written; this is a fault of the conversion, please report it with the model's config"
        )
    return difference


@contextmanager
def _quiet() -> Iterator[Any]:
    """The package, without its progress bars and advice on standard error."""
    logging = importlib.import_module("transformers.utils.logging")
    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield importlib.import_module("transformers")
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
