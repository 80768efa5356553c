"""`python -m peer.adversary KIND@STEP join ADDRESS ...`: `swarm join` by a peer that misbehaves from STEP on."""

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from swarm.attacks import DEVELOPER_VARIABLE, Attack, parse_attack
from swarm.cli import group, main
from swarm.core.errors import SettingsError

if TYPE_CHECKING:
    from peer.program.command import MakePeer


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("attack", metavar="KIND@STEP")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def command(attack: str, arguments: tuple[str, ...]) -> object:
    """`swarm ARGUMENTS`, by a peer that does as KIND says from STEP on. It harms the run and is banned."""
    load = partial(_load_peer, _allowed(attack))
    return group.main(args=list(arguments), prog_name="swarm", standalone_mode=False, obj=load)


def _allowed(attack: str) -> Attack:
    if os.environ.get(DEVELOPER_VARIABLE) != "1":
        raise SettingsError(
            f"{attack}: a peer that misbehaves harms the run and is banned; it is for developers' own "
            f"swarms, with {DEVELOPER_VARIABLE}=1 in the environment"
        )
    return parse_attack(attack)


def _load_peer(attack: Attack) -> "MakePeer":
    from peer.adversary.peer import MisbehavingPeer

    return partial(MisbehavingPeer, attack)


if __name__ == "__main__":
    main(command)
