"""`swarm generate`: lets a model folder write."""

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 takes the likeliest token."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal text.")
@click.option("--chat", is_flag=True, help="Answer PROMPT, put into the folder's chat template, instead.")
def command(folder: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int, chat: bool) -> None:
    """Continue PROMPT with the Hugging Face model in FOLDER, piece by piece."""
    from swarm.checkpoint.huggingface import generate
    from swarm.log_format import harmless

    pieces = generate(folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat)
    pieces = map(harmless, pieces)  # strangers have trained it
    first = next(pieces, "")  # a folder that is no model shows before the prompt is echoed
    click.echo(first if chat else prompt + first, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
