from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from modalities.exceptions import UserError
from modalities.inference.text_generation import generate_tokens, sample
from modalities.models.gpt2 import GPT2LLM


def greedy_without_cache(model: GPT2LLM, prompt: list[int], num_tokens: int) -> list[int]:
    """What generation must give as long as everything fits the model."""
    model.eval()
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("poe_type", ["NOPE", "ABSOLUTE"])
def test_greedy_generation_equals_full_forwards(make_model, poe_type) -> None:
    model = make_model(poe_type=poe_type)
    expected = greedy_without_cache(model, [1, 2, 3], 6)
    assert list(generate_tokens(model, [1, 2, 3], 6, temperature=0)) == expected


def test_generation_goes_on_when_the_sequence_is_full(make_model) -> None:
    model = make_model()
    found = list(generate_tokens(model, [1, 2, 3], 20, temperature=0))
    assert len(found) == 20
    # tokens 3..8 fill the model up; then it starts again from the last four
    seen = [1, 2, 3, *found]
    assert found[6:11] == greedy_without_cache(model, seen[5:9], 5)
    assert found[11:16] == greedy_without_cache(model, seen[10:14], 5)


def test_a_long_prompt_is_cut_from_the_left(make_model) -> None:
    model = make_model()
    prompt = list(range(20))
    assert list(generate_tokens(model, prompt, 1, temperature=0)) == greedy_without_cache(model, prompt[-8:], 1)


def test_the_shortest_model(make_model) -> None:
    assert len(list(generate_tokens(make_model(sequence_length=1), [1, 2], 3))) == 3


def test_draws_depend_on_the_seed_alone(make_model) -> None:
    model = make_model()
    torch.manual_seed(0)
    first = list(generate_tokens(model, [1], 30, temperature=2.0, seed=5))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert list(generate_tokens(model, [1], 30, temperature=2.0, seed=5)) == first
    assert list(generate_tokens(model, [1], 30, temperature=2.0, seed=6)) != first
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_end_of_document_starts_and_ends(make_model) -> None:
    model = make_model()
    tokens = list(generate_tokens(model, [], 25, temperature=3.0, end_of_document_id=30))
    assert tokens
    stop = tokens[2]
    until = list(generate_tokens(model, [30], 25, temperature=3.0, end_of_document_id=stop))
    assert until == tokens[: tokens.index(stop)]


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_restored_even_after_an_early_stop(make_model, training) -> None:
    model = make_model().train(training)
    tokens = generate_tokens(model, [1], 10)
    assert len(list(islice(tokens, 3))) == 3
    tokens.close()
    assert model.training is training
    assert model.transformer.drop.training is training


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**limits: Any) -> set[int]:
        arguments = {"temperature": 1.0, "top_k": None, "top_p": None} | limits
        return {sample(logits, **arguments, generator=generator) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_k=10) == {0, 1, 2, 3}
    assert drawn(top_p=0.4) == {1}
    assert drawn(top_p=0.7) == {1, 2}
    assert drawn(top_p=1e-9) == {1}
    assert drawn(temperature=0) == {1}
    assert drawn(temperature=1e-3) == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [31]}, "token id 31 is outside the model's vocabulary of 31"),
        ({"prompt_ids": [-1]}, "token id -1"),
        ({"end_of_document_id": 99}, "token id 99"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"model": torch.nn.Linear(1, 1)}, "no make_cache"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(make_model, arguments, message) -> None:
    given = {"model": make_model(), "prompt_ids": [1], "max_new_tokens": 5} | arguments
    with pytest.raises(UserError, match=message):
        generate_tokens(**given)
