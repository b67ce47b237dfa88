"""Open pages in a headless browser, and return its console output and its layout."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next(filter(None, map(shutil.which, NAMES)), None)
_CONSOLE = re.compile(r"CONSOLE[:(].*")


def open_page(
    page: Path, picture: Path, *, dark: bool = False, width: int = 1280, flags: Sequence[str] = ()
) -> list[str]:
    """Return the lines that the page writes to the console. picture : path of a PNG of the page.

    There is no network: no name resolves.
    """
    assert COMMAND is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = subprocess.run(
        [
            COMMAND, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", f"--user-data-dir={picture.parent / 'profile'}", scheme,
            f"--window-size={width},2400", f"--screenshot={picture}", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return _CONSOLE.findall(done.stderr)


def ask_pages(folder: Path, pages: Sequence[tuple[Path, int]], script: str) -> list[Any]:
    """Return the results of `script`, a JavaScript function of a window, in each page of a given
    width.

    The pages are frames of one page, so that a single browser opens them. Lines that they write to
    the console are a failure.
    """
    frames = "".join(
        f'<iframe src="{page.as_uri()}" style="width: {width}px; height: 900px"></iframe>'
        for page, width in pages
    )
    asking = (
        "<!DOCTYPE html><meta charset='utf-8'><title>t</title>" + frames + "<script>"
        f"const ask = {script}; addEventListener('load', () => console.log('ANSWERS' + "
        "btoa(JSON.stringify(Array.from(frames, ask)))))</script>"
    )
    (folder / "asking.html").write_text(asking)
    flags = ("--allow-file-access-from-files",)
    lines = open_page(folder / "asking.html", folder / "asking.png", flags=flags)
    (answers,) = [line for line in lines if "ANSWERS" in line]
    assert lines == [answers]
    (text,) = re.findall(r"ANSWERS([\w+/=]+)", answers)
    found: list[Any] = json.loads(base64.b64decode(text))
    return found


def needed_widths(folder: Path, pages: Sequence[tuple[Path, int]]) -> list[int]:
    """Return the width that each page needs in a window of a given width; it is larger if the page
    overflows."""
    script = "(page) => [page.innerWidth, page.document.documentElement.scrollWidth]"
    found = ask_pages(folder, pages, script)
    assert [inside for inside, _ in found] == [width for _, width in pages]
    return [needed for _, needed in found]
