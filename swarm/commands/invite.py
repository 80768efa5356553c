"""`swarm invite show`: says what is inside an invite, without a network."""

import json

import click


@click.group()
def command() -> None:
    """Look at an invite."""


@command.command()
@click.argument("line")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show(line: str, as_json: bool) -> None:
    """Print what LINE says; nothing is asked of anybody."""
    from swarm.invite import parse_invite

    invite = parse_invite(line)
    said = {
        "run": invite.name,
        "run id": invite.run_id,
        "run key": invite.run_key,
        "protocol": invite.protocol,
        "service": invite.target,
        "certificate": invite.certificate.hex(),
        "seed": invite.host_key,
        "addresses": list(invite.addresses),
        "voucher": "yes, a secret: whoever has this line is admitted" if invite.voucher else "none",
    }
    if as_json:
        click.echo(json.dumps(said, indent=2))
        return
    for name, value in said.items():
        for text in value if isinstance(value, list) else [value]:
            click.echo(f"{name:12} {text}")
            name = ""
