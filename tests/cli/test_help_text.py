"""Check the help of every command: descriptions of options, and examples that can be parsed."""

from __future__ import annotations

import re
import shlex

import pytest

from streamkern.cli import main
from streamkern.cli.help_text import EXAMPLES
from tests.runs import Run


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_examples_and_option_metavars(name: str, run: Run) -> None:
    code, help_text, _ = run(name, "-h")
    assert code == 0
    assert help_text.startswith(f"Usage: streamkern {name} ")
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in help_text
        program, command, *words = shlex.split(example)
        assert (program, command) == ("streamkern", name)
        main._load_named_command(name).make_context(
            name, words
        )  # raises an error for unknown words
    assert not re.search(r"<\w+|\bINTEGER\b|\bFLOAT\b|\[\[", help_text)
    for param in main._load_named_command(name).params:
        if param.param_type_name == "option" and not param.is_flag:
            assert f"{param.opts[0]} {param.metavar}" in help_text
