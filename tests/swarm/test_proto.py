"""The generated protobuf code is what `make proto` makes of the .proto files now."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PROTOS = sorted(path.name for path in (ROOT / "swarm" / "proto").glob("*.proto"))


@pytest.mark.parametrize("name", PROTOS)
def test_generated_code_is_current(tmp_path: Path, name: str) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is among the development dependencies")
    root, path = ROOT, f"swarm/proto/{name}"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", *outputs, path], cwd=root, check=True)
    made = sorted((tmp_path / "swarm" / "proto").iterdir())
    assert [file.suffix for file in made] == [".py", ".pyi", ".py"]
    for file in made:
        committed = (root / "swarm" / "proto" / file.name).read_text(encoding="utf-8")
        assert committed == file.read_text(encoding="utf-8"), f"{file.name} is not current: run `make proto`"
