"""homeswarm: volunteers train one large model together over the Internet.

from swarm import Manifest, Run

manifest = Manifest.write("run.toml", data={"text": ["book.txt"]}, optimizer={"total_steps": 100})
with Run(manifest, peers=(1, 2)) as run:
    for event in run.events():
        print(event)
"""

from typing import TYPE_CHECKING, Any

from swarm.release import PROTOCOL, __version__

if TYPE_CHECKING:
    from swarm.local.run import Run
    from swarm.manifest.file import Manifest

__all__ = ["PROTOCOL", "Manifest", "Run", "__version__"]


def __getattr__(name: str) -> Any:
    """`Run` and `Manifest` are imported when they are asked for: the command must not wait for what they bring."""
    if name == "Run":
        from swarm.local.run import Run

        return Run
    if name == "Manifest":
        from swarm.manifest.file import Manifest

        return Manifest
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
