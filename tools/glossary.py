"""Write docs/glossary.md: what the facts that `streamkern info` prints mean."""

from __future__ import annotations

from pathlib import Path

from streamkern.cli.glossary import glossary_page

PAGE = Path(__file__).parents[1] / "docs" / "glossary.md"

if __name__ == "__main__":
    PAGE.write_text(glossary_page(), encoding="utf-8")
