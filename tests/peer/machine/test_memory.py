"""The memory that a container's limit leaves, by both versions of control groups."""

from pathlib import Path

import psutil
import pytest

from peer.machine.memory import free_bytes, most_bytes

GIB = 1 << 30


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, of_files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\n{names[2]} {of_files // 4}\n"
        f"{names[2].replace('inactive', 'active')} {of_files - of_files // 4}\nfile 3\nunevictable 4\n"
    )


SECOND = "memory.max", "memory.current", "inactive_file"
FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


@pytest.mark.parametrize(
    ("line", "below", "names"), [("0::/{}", "", SECOND), ("4:cpu,memory:/{}\n1:name=systemd:/", "memory", FIRST)]
)
def test_the_least_of_all_groups_counts(tmp_path: Path, line: str, below: str, names: tuple[str, str, str]) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text(line.format("user/peer"))
    (root / below / "user").mkdir(parents=True)
    group(root / below / "user" / "peer", names, str(GIB // 2), GIB // 4, GIB // 8)
    assert free_bytes(own, root) == GIB // 2 - GIB // 8, "files are given back, those too that were read more than once"
    group(root / below / "user", names, str(GIB // 4), GIB // 8, 0)
    assert free_bytes(own, root) == GIB // 8, "the group above has less"
    assert most_bytes(own, root) == GIB // 4, "whoever holds it"
    group(root / below / "user", names, "max" if names is SECOND else str((1 << 63) - 4096), GIB // 8, 0)
    assert free_bytes(own, root) == GIB // 2 - GIB // 8
    group(root / below / "user" / "peer", names, str(GIB // 8), GIB // 4, 0)
    assert free_bytes(own, root) == 0, "past its limit"


def test_in_a_container_the_root_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/../docker/cafe\n")
    group(tmp_path / "groups", SECOND, str(GIB // 2), 0, 0)
    assert free_bytes(tmp_path / "own", tmp_path / "groups") == GIB // 2


@pytest.mark.parametrize("said", ["", "0::/gone"])
def test_without_groups_it_is_the_machines(tmp_path: Path, said: str) -> None:
    (tmp_path / "own").write_text(said)
    free = free_bytes(tmp_path / "own", tmp_path / "nothing")
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.2)
