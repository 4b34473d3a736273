"""``modalities generate``."""

from __future__ import annotations

from pathlib import Path

import click

from modalities.cli.options import import_option, overrides_argument


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="A run folder, or a checkpoint.")
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--max-new-tokens", "--max_new_tokens", type=int, default=200, show_default=True, help="Tokens to draw.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", "--top_k", type=int, default=None, help="Draw among the k likeliest tokens.")
@click.option("--top-p", "--top_p", type=float, default=None, help="Draw among the likeliest tokens of probability p.")
@click.option(
    "--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="The same seed draws the same text."
)
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Default: the config in the run folder.")
@click.option("--tokenizer", type=click.Path(path_type=Path), default=None, help="Folder; default: the config's.")
@import_option
@overrides_argument
def generate(
    checkpoint: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    config: Path | None,
    tokenizer: Path | None,
    imports: tuple[str, ...],
    overrides: tuple[str, ...],
) -> None:
    """Continue a text with a trained model; OVERRIDE changes the config of the model or the tokenizer."""
    from modalities.generate import Sampling
    from modalities.generate import generate as generate_text

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    pieces = generate_text(checkpoint, prompt, sampling, config, tokenizer, imports=imports, overrides=overrides)
    click.echo(prompt, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
