"""The commands that use a trained model: evaluate | predict."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from streamkern.basics.progress import ProgressLine
from streamkern.basics.stop import handle_stop
from streamkern.basics.text import redact, some, text_table
from streamkern.basics.warning import warn
from streamkern.cli.console import json_text
from streamkern.cli.options import (
    DeviceOption,
    DropMissingTargetsOption,
    ExternalOption,
    ForeignOption,
    JsonOption,
    MissingOption,
    StorageOption,
    add_options,
    column_list,
    file_form_options,
    number_or_text,
    options_for,
    parse_options,
    target_columns,
)
from streamkern.ingest.formats import FileForm
from streamkern.ingest.path_patterns import refuse_among
from streamkern.ingest.tables.columns import TargetMeans
from streamkern.predict.input_rows import open_rows
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.stores import stores_in
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.permutation import permutation_importances
from streamkern.train.saved_model import load_model

ModelArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Use the model of this run.")]
RowInputsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT", help="Read these stores, files, folders, or patterns of files."
    ),
]
RowFeaturesOption = Annotated[
    str | None,
    typer.Option("--x", help="Use these columns as features (a,b,c), or this array of rows."),
]
RowTargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--y", help="Use this column, array or file as targets; predict ignores it. Repeatable."
    ),
]
NormalisedOption = Annotated[
    bool,
    typer.Option(
        "--normalised", help="Make intervals wider where the errors of the model are larger."
    ),
]
StdOption = Annotated[
    bool,
    typer.Option(
        "--std",
        help="Also write standard deviations of the values; the model needs solver.posterior.",
    ),
]
ScoresOption = Annotated[
    bool,
    typer.Option("--values", help="Write the scores of all classes instead of labels (.npy only)."),
]
ProbaOption = Annotated[
    bool, typer.Option("--proba", help="Write the probabilities of all classes.")
]
IntervalOption = Annotated[
    float | None,
    typer.Option(
        metavar="LEVEL",
        help="Also write the ends of prediction intervals with this coverage, such as 0.9.",
    ),
]
WithInputOption = Annotated[
    bool,
    typer.Option(
        "--with-input",
        help="Write all columns of the input before the predictions (CSV and Parquet).",
    ),
]
EscapeFormulasOption = Annotated[
    bool,
    typer.Option(
        "--escape-formulas",
        help="Put ' before text in a CSV that a spreadsheet would compute (=, +, -, @).",
    ),
]
OverwritePredictionsOption = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace predictions of streamkern, in any format; another or a changed file must be "
        "deleted first.",
    ),
]
RowOrderOption = Annotated[
    str,
    typer.Option(
        help="Write rows in the order of the files that a store was made from (source; copy after "
        "copy, if it was augmented; a store given to ingest counts as a file), or in the order in "
        "which they are stored (store)."
    ),
]
RowWeightsOption = Annotated[
    str | None, typer.Option("--sample-weight", help="Weight rows by this column, array or file.")
]


@add_options(file_form_options, "form")
def reading_options(
    x: RowFeaturesOption = None,
    y: RowTargetsOption = None,
    sample_weight: RowWeightsOption = None,
    missing: MissingOption = "error",
    external: ExternalOption = False,
    foreign: ForeignOption = False,
    *,
    form: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `open_rows` that select the arrays and columns to read."""
    return {
        "x": None if x is None else column_list(x),
        "y": target_columns(y),
        "sample_weight": None if sample_weight is None else number_or_text(sample_weight),
        "missing": missing,
        "external": external,
        "foreign": foreign,
        "form": FileForm(*form.values()).normalise(),
    }


@add_options(reading_options, "reading")
def evaluate_command(
    reading: dict[str, Any],
    run_dir: ModelArgument,
    inputs: RowInputsArgument,
    drop_missing_targets: DropMissingTargetsOption = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Evaluate a trained model on stores, or on files that ingest can read."""
    options = parse_options(storage_option)
    reading["drop_missing_targets"] = drop_missing_targets
    with rows_and_model(run_dir, inputs, device, options, reading, targets=True) as (source, model):
        metrics = model.evaluate(source)
        n_left_out = getattr(source, "n_left_out", 0)
    data = redact(", ".join(inputs))
    row: dict[str, Any] = {"data": data, "rows": source.n_rows, **metrics}
    if n_left_out:
        row["left_out"] = n_left_out
    if as_json:
        typer.echo(json_text(row | skipped_entry(model.damaged_checkpoints)))
    else:
        typer.echo(text_table([row], list(row)))


@add_options(reading_options, "reading")
def predict_command(
    context: typer.Context,
    reading: dict[str, Any],
    run_dir: ModelArgument,
    inputs: RowInputsArgument,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The .zarr, .npy, .csv or .parquet of predictions; missing folders are made.",
        ),
    ],
    order: RowOrderOption = "source",
    values: ScoresOption = False,
    proba: ProbaOption = False,
    interval: IntervalOption = None,
    normalised: NormalisedOption = False,
    std: StdOption = False,
    with_input: WithInputOption = False,
    escape_formulas: EscapeFormulasOption = False,
    device: DeviceOption = "auto",
    overwrite: OverwritePredictionsOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Write the predictions of a model for every row of stores, or of files that ingest can read.

    Columns of targets are not needed. They are ignored if they have the names of training, or if
    --y names them. After an interruption, the same command continues.
    """
    options = parse_options(storage_option)
    refuse_among(inputs, out)
    reading["with_input"] = with_input
    with (
        handle_stop(context.obj, saves_work=True),
        rows_and_model(run_dir, inputs, device, options, reading, targets=False) as (source, model),
        ProgressLine() as line,
    ):
        n_rows = model.predict_to(
            source, out, order=order, values=values or proba, proba=proba, interval=interval,
            normalised=normalised, std=std, escape_formulas=escape_formulas, overwrite=overwrite,
            storage_options=options_for(options, out), progress=line.show,
        )  # fmt: skip
    typer.echo(f"{n_rows:,} rows predicted into {redact(out)}")


def measured_importances(run_dir: str, data: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the permutation importances of the columns of `data` for the model of a run."""
    with rows_and_model(run_dir, [data], "auto", options, {}) as (source, model):
        return permutation_importances(model, source).describe() | {"data": redact(data)}


def skipped_entry(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON entry on skipped damaged checkpoints; without JSON there are warnings."""
    return {"skipped": list(texts)} if texts else {}


@contextlib.contextmanager
def rows_and_model(
    run_dir: str,
    inputs: Sequence[str],
    device: str,
    options: Mapping[str, Any],
    reading: Mapping[str, Any],
    *,
    targets: bool = True,
) -> Iterator[tuple[Any, KernelModel]]:
    """Yield the opened rows and the model; both are closed at the end of the block.

    run_dir : path or URL of the run
    inputs : stores, files, folders or patterns of files
    device : device of the model
    options : storage options
    reading : arguments of `open_rows` from the options, see `reading_options`
    targets : whether the rows must have targets
    """
    run_options = options_for(options, run_dir)
    model = load_model(run_dir, device=device, storage_options=run_options)
    with model.backend, contextlib.ExitStack() as files:
        rows = open_rows(
            inputs,
            files,
            model,
            targets=targets,
            input_options=options_for(options, *inputs),
            **reading,
        )
        _warn_of_training_store(run_dir, rows, model, run_options)
        yield rows, model


def _warn_of_training_store(
    run_dir: str, rows: Any, model: KernelModel, options: Mapping[str, Any] | None
) -> None:
    """Warn if the rows are a training store whose words are encoded by target means.

    In such a store, a word is encoded by the means of other folds; in new rows, by the mean of all
    training rows.
    """
    columns = (model.encoder or {}).get("columns", ())
    mean_columns = [column["name"] for column in columns if column["kind"] == TargetMeans.kind]
    if not mean_columns or not isinstance(rows, BaseSource):
        return
    record = RunDirectory(run_dir, writable=False, storage_options=options).read_record() or {}
    training_data = json.dumps(record.get("identity", {}).get("data", {}))  # with fingerprints
    for store in stores_in(rows):
        if store.spec.fingerprint in training_data:
            warn(
                f"{redact(store.url)} was trained on: the words in {some(mean_columns)} are "
                "encoded by the mean targets of other rows, as in training, so the predictions "
                "differ slightly from those for new rows; for these, give the file from which the "
                "store was made"
            )
