"""docs/manifest.md is what the fields' declaration says."""

from tests import ROOT
from tests.docs.manifest_page import page


def test_the_page_of_the_manifest_is_of_its_declaration() -> None:
    assert (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8") == page()
