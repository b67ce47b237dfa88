"""No test is skipped unnoticed in CI: a skip because of a missing package fails."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULE = """
import pytest

def test_of_a_package():
    pytest.importorskip("there_is_no_such_package")

@pytest.mark.skipif(True, reason="Numba is not installed")
def test_of_an_extra():
    pass

@pytest.mark.skipif(True, reason="needs prlimit, as Linux has it")
def test_of_the_machine():
    pass

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    assert False
"""

FILE = 'import pytest; pytest.importorskip("there_is_no_such_package")'

TIERS = """
import pytest

@pytest.mark.full
def test_at_night():
    pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(5))
def test_a_grid(a, b, c):
    print("case", a, b, c)

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_a_table(a, b):
    pass

@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("a", range(8))
def test_cases_at_night(a):
    print("some", a)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of tests that need parts which a machine may lack, in all tiers."""
    for name, text in (("file", FILE), ("module", MODULE), ("tiers", TIERS)):
        (tmp_path / f"test_{name}.py").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_ci_fails_on_skips_for_missing_packages(folder: Path) -> None:
    message = assert_ends(folder, "true", 1, "-s", "--continue-on-collection-errors")
    assert "skipped, which CI does not take: Numba is not installed" in message
    cases = [line.split()[-3:] for line in message.splitlines() if "case" in line]
    for (k, first), (m, second) in combinations(enumerate((3, 4, 5)), 2):
        assert {(case[k], case[m]) for case in cases} == {
            (str(a), str(b)) for a, b in product(range(first), range(second))
        }
    assert 20 <= len(cases) < 60  # 20 is the least
    assert [line.split()[-1] for line in message.splitlines() if "some" in line] == ["0", "3", "6"]
    assert (
        f"1 failed, {len(cases) + 12 + 3} passed, 1 skipped, {60 - len(cases) + 1 + 5} deselected, "
        "1 xfailed, 2 errors"
    ) in message


@pytest.mark.slow
def test_local_runs_skip_and_nightly_runs_all(folder: Path) -> None:
    assert "81 passed, 4 skipped, 1 xfailed" in assert_ends(folder, "", 0, "--full")


def assert_ends(folder: Path, ci: str, code: int, *options: str) -> str:
    """Run the tests in a folder with our conftest, and check their outcome."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    options = (*options, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder))
    done = subprocess.run(
        [*command, *options, str(folder)], env=os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
