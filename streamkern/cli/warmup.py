"""The command `streamkern warmup`: compile the kernels of a GPU before the first run."""

from __future__ import annotations

from typing import Annotated

import typer

from streamkern.basics.optional import on_demand
from streamkern.cli.console import json_text
from streamkern.cli.options import JsonOption

_COMPILE_MODULE = "streamkern.estimator.compile_kernels"  # imports scikit-learn, which is slow


def warmup_command(
    device: Annotated[
        str, typer.Option("--device", help="Compile for this GPU: gpu or gpu:N.")
    ] = "gpu",
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Compile in this many processes at once.")
    ] = 4,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels of a GPU, so that the first run does not wait for them.

    The command trains small models of synthetic data with several solvers and losses. CuPy caches
    the kernels that it compiles in ~/.cupy/kernel_cache, or in the folder CUPY_CACHE_DIR. Machines
    with the same kind of GPU and the same versions of CuPy and CUDA can share this folder.
    """
    result = on_demand(_COMPILE_MODULE).compile_kernels(device, jobs)
    if as_json:
        fields = result._asdict() | {"cache": str(result.cache)}
        return typer.echo(json_text(fields))
    typer.echo(f"{result.kernels} new kernels in {result.cache}, {result.seconds:.0f} s")
