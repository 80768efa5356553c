"""The container's recipe keeps up with the project: no image is built here, but what it is built from is all there."""

import re
import tomllib

from tests import ROOT


def test_container_is_built_from_every_package_and_runs_as_nobody_special() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {word for line in re.findall(r"^COPY (.+)$", recipe, re.MULTILINE) for word in line.split()[:-1]}
    assert copied == {*packages, "pyproject.toml", project["project"]["readme"]}
    least = project["project"]["requires-python"].removeprefix(">=")
    assert f"FROM python:{least}-slim" in recipe
    assert re.search(r"^USER (?!root)", recipe, re.MULTILINE)
    assert 'ENTRYPOINT ["swarm"]' in recipe
    assert "swarm" in project["project"]["scripts"]
