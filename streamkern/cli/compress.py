"""The command `streamkern compress`: write a trained model with fewer centers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import redact, text_table
from streamkern.cli.console import json_text
from streamkern.cli.model import ModelArgument, RowInputsArgument, reading_options, rows_and_model
from streamkern.cli.options import (
    DeviceOption,
    JsonOption,
    StorageOption,
    add_options,
    options_for,
    parse_options,
)
from streamkern.cli.run_options import MemoryOption
from streamkern.filesystem.path_kinds import check_output
from streamkern.ingest.path_patterns import refuse_among
from streamkern.rundir.run_directory import RunDirectory

# Imported on demand: they import scikit-learn, which is slow to load.
_LOAD_MODULE, _COMPRESS_MODULE = "streamkern.estimator.load", "streamkern.estimator.compress"


@add_options(reading_options, "reading")
def compress_command(
    reading: dict[str, Any],
    run_dir: ModelArgument,
    inputs: RowInputsArgument,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The new folder of the smaller model; evaluate and predict take it as a run.",
        ),
    ],
    n_centers: Annotated[
        int | None, typer.Option("--n-centers", metavar="N", help="Keep this number of centers.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            help="Keep the fewest centers with which the outputs change by at most this fraction "
            "of their standard deviation.  [default: 0.05]",
        ),
    ] = None,
    memory: MemoryOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Write a model with fewer centers and nearly the same predictions.

    INPUT must contain rows that the model was not trained on, at least two for each center that is
    kept; their targets are not used. The table shows how much the outputs change with other
    numbers of centers.
    """
    options = parse_options(storage_option)
    refuse_among(inputs, out)
    _check_output_is_new(out, options_for(options, out))
    model = on_demand(_LOAD_MODULE).load(run_dir, storage_options=options_for(options, run_dir))
    if memory is not None:
        model.set_params(memory=memory)
    inputs_and_model = rows_and_model(run_dir, inputs, device, options, reading, targets=False)
    with inputs_and_model as (rows, kernel_model):
        compress = on_demand(_COMPRESS_MODULE)
        compressed_model = compress.compress_model(model, kernel_model, rows, n_centers, tolerance)
    compressed_model.save(out, storage_options=options_for(options, out))
    report = compressed_model.report_["compressed"]
    if as_json:
        typer.echo(json_text({"kept": compressed_model.n_centers_, **report}))
        return
    curve = [{"centers": n, "difference": difference} for n, difference in report["curve"]]
    typer.echo(text_table(curve, ["centers", "difference"]))
    typer.echo(
        f"{compressed_model.n_centers_:,} of {report['n_centers']:,} centers are in {redact(out)}"
    )


def _check_output_is_new(out: str, options: Mapping[str, Any] | None) -> None:
    """Raise an error unless a model can be saved to `out`, before it is computed."""
    directory = RunDirectory(out, writable=False, storage_options=options)
    # An interrupted save has no step yet and is completed.
    if directory.steps():
        raise ConfigError(
            f"{redact(out)} holds another model or run already", "give a new or empty directory"
        )
    check_output(out, "models")
