"""`python tools/mutants.py`: tests that check every line kill all mutants, others leave some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import main

MODULE = '''"""A toy."""

def f(a, b):
    """Return a number, whose 2 here is not a mutant."""
    if not a > b:
        return a + 2
    b *= 3
    return b
'''
CHANGES = {
    "5: if not a > b: -> if a > b:", "5: a > b -> a >= b", "6: return a + 2 -> return",
    "6: a + 2 -> a - 2", "6: 2 -> 3", "7: b *= 3 -> b /= 3", "7: b *= 3 -> pass", "7: 3 -> 4",
    "8: return b -> return",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout of a package with one module."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    for name in ("streamkern", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "streamkern/toy.py").write_text(MODULE)
    return tmp_path


def living(root: Path, capsys: pytest.CaptureFixture[str], check: str, *arguments: str) -> set[str]:
    """Return the changes that the test of `check` does not see."""
    test = f"from streamkern.toy import f\n\ndef test_f():\n    {check}\n"
    (root / "tests/test_toy.py").write_text(test)
    main(["streamkern/toy.py", "--root", str(root), *arguments])
    *alive, last = capsys.readouterr().out.splitlines()
    n = 4 if "--count" in arguments else len(CHANGES)
    assert last == f"{n - len(alive)} of {n} mutants died"
    assert (root / "streamkern/toy.py").read_text() == MODULE
    return {line.removeprefix("alive: line ") for line in alive}


@pytest.mark.slow
def test_mutants_are_killed_by_tests_that_check(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert living(root, capsys, "f(1, 2)") == CHANGES
    assert living(root, capsys, "assert f(1, 2) == 3", "--tests", "tests/test_toy.py") == {
        change for change in CHANGES if change[0] in "78" or change.endswith(">= b")
    }
    good = "assert f(1, 2) == 3 and f(2, 2) == 4 and f(3, 2) == 6"
    assert living(root, capsys, good, "--count", "4") == set()


def test_failing_tests_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"tests/test_toy\.py fail"):
        living(root, capsys, "assert not f(1, 2)")
