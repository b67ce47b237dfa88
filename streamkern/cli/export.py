"""The command `streamkern export`: write a trained model as an ONNX file or a C file."""

from __future__ import annotations

from typing import Annotated

import typer

from streamkern.cli.model import ModelArgument
from streamkern.cli.options import StorageOption, options_for, parse_options
from streamkern.train.export.onnx_model import ExportedOutputs, checked_ending, write_c, write_onnx
from streamkern.train.saved_model import load_result

WRITERS = {".onnx": write_onnx, ".c": write_c}
"""Functions that write a file, by its ending."""


def export_command(
    run_dir: ModelArgument,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The .onnx or .c file; missing folders are made.")
    ],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="auto|float32|float64",
            help="Use this dtype for inputs, computations and outputs; auto means the dtype of "
            "the model.",
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older file.")] = False,
    storage_option: StorageOption = None,
) -> None:
    """Write a trained model to an ONNX file or a C file, for programs without streamkern.

    The file contains the whole model: encoder, scaling, kernel, weights, probabilities. The C file
    needs no library; each call of its function predicts one row.
    """
    write = WRITERS[checked_ending(out, *WRITERS)]
    options = options_for(parse_options(storage_option), run_dir)
    run, result = load_result(run_dir, options)
    with result.model.backend:
        write(
            result.model, result.Z, ExportedOutputs.of_run(result.model, run.facts), out,
            dtype=dtype, overwrite=overwrite,
        )  # fmt: skip
    typer.echo(f"the model is in {out}")
