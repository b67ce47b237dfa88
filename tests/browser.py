"""A real browser without a window: what it says on its console, and what it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next(filter(None, map(shutil.which, NAMES)), None)
_CONSOLE = re.compile(r"CONSOLE[:(].*")


def open_page(page: Path, picture: Path, *, dark: bool = False, width: int = 1280) -> list[str]:
    """The lines that the page writes to the console; its picture is a PNG.

    There is no network: no name resolves.
    """
    assert COMMAND is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = subprocess.run(
        [
            COMMAND, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", f"--user-data-dir={picture.parent / 'profile'}", scheme,
            f"--window-size={width},2400", f"--screenshot={picture}", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return _CONSOLE.findall(done.stderr)
