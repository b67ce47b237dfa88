"""Draw the pictures of a page of docs/ by running its Python blocks.

    python tools/draw_page.py docs/tutorial-table.md

Every PNG that the blocks write is copied to the folder with the name of the page.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def draw(page: Path) -> list[Path]:
    """Run the blocks in a temporary folder, and return the pictures of the page."""
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": page.stem}
    folder = page.resolve().with_suffix("")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for text in BLOCK.findall(page.read_text(encoding="utf-8")):
            exec(compile(text, str(page), "exec"), names)
        return [Path(shutil.copy(file, folder)) for file in sorted(Path().glob("*.png"))]


if __name__ == "__main__":
    for picture in draw(Path(sys.argv[1]).resolve()):
        print(picture, f"{picture.stat().st_size / 1000:.0f} kB")
