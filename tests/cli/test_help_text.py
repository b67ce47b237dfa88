"""The help of every command: words for what options take, and examples that can be given."""

from __future__ import annotations

import re
import shlex

import pytest

from streamkern.cli import main
from streamkern.cli.help_text import EXAMPLES


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run_command([name, "-h"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of(name, capsys)
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in said
        program, command, *words = shlex.split(example)
        assert (program, command) == ("streamkern", name)
        main._command(name).make_context(name, words)  # refuses what it does not know


def test_the_help_names_all_that_can_be_replaced_and_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = " ".join(help_of("predict", capsys).split())
    assert "Replace predictions of streamkern, in any format; another or a changed file" in said
    assert "runs/first model.c" in help_of("export", capsys)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_options_say_in_words_what_they_take(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of(name, capsys)
    assert not re.search(r"<\w+|\bINTEGER\b|\bFLOAT\b|\[\[", said)
    for param in main._command(name).params:
        if param.param_type_name == "option" and not param.is_flag:
            assert f"{param.opts[0]} {param.metavar}" in said
