"""Kernels in run files and in results of `Kernel.describe`: a name, or a table with parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import KERNELS

KernelTable = str | Mapping[str, Any]
"""A name, or a table with a name and parameters, in a form that `builtin.get_kernel` accepts."""


def kernel_text(kernel: KernelTable) -> str:
    """Format a kernel as text: `0.7 laplace(bandwidth 8) + 0.3 gaussian * polynomial(degree 2)`."""
    if isinstance(kernel, str):
        return kernel
    if trees := kernel.get("trees"):
        table = {key: value for key, value in kernel.items() if key != "trees"}
        return f"{kernel_text(table)} with {trees['n']} trees"
    if categorical := kernel.get("categorical"):
        table = {key: value for key, value in kernel.items() if key != "categorical"}
        return f"{kernel_text(table)} with categorical {categorical_text(categorical)}"
    name, parts = _name(kernel), kernel.get("parts", ())
    if name == "sum":
        weights = kernel.get("weights") or [1.0] * len(parts)
        terms = zip(weights, parts, strict=True)
        return " + ".join(
            kernel_text(part) if weight == 1 else f"{weight:g} {_part_text(part)}"
            for weight, part in terms
        )
    if name == "product":
        return " * ".join(map(_part_text, parts))
    parameters = ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in kernel.items()
        if key not in ("kind", "kernel", "values")
    )
    return f"{name}({parameters})" if parameters else name


def categorical_text(categorical: Sequence[tuple[int | str, float]]) -> str:
    """Format categorical features and their weights: `3 (weight 1.5), 7 (weight 0.2)`."""
    return ", ".join(f"{feature} (weight {weight:.4g})" for feature, weight in categorical)


def without_values(kernel: KernelTable) -> KernelTable:
    """Return the kernel without its `values`, which distinguish classes of the same name."""
    if isinstance(kernel, str):
        return kernel
    table = {key: value for key, value in kernel.items() if key != "values"}
    if "parts" in table:
        table["parts"] = [without_values(part) for part in table["parts"]]
    return table


def bandwidths(kernel: KernelTable) -> list[Any]:
    """Return the bandwidths of the parts that have one, in order; "auto" for those not set."""
    if not isinstance(kernel, str) and "parts" in kernel:
        return [width for part in kernel["parts"] for width in bandwidths(part)]
    if isinstance(kernel, str):
        kernel = {"kind": kernel}
    if "bandwidth" in kernel or _has_bandwidth(_name(kernel)):
        return [kernel.get("bandwidth", "auto")]
    return []


def with_bandwidths(kernel: KernelTable, widths: Sequence[float]) -> KernelTable:
    """Return the kernel with its `bandwidths` replaced by `widths`."""
    return _with_next_widths(kernel, iter(widths))


def in_settings(kernel: KernelTable, bandwidth: float | None) -> dict[str, Any]:
    """Return the settings `kernel` and `bandwidth` of [model] for a kernel with a bandwidth.

    bandwidth : for a sum or product whose parts set bandwidths, the largest of these; the others
        change by the same factor. None keeps the bandwidths that the kernel has.

    Raises
    ------
    ConfigError
        Some parts set their bandwidth and others do not, so that their ratio is unknown.
    """
    widths = bandwidths(kernel)
    if bandwidth is None or not widths:
        return {"kernel": kernel, "bandwidth": "auto"}
    if set(widths) == {"auto"}:
        return {"kernel": kernel, "bandwidth": bandwidth}
    if "auto" in widths:
        raise ConfigError(
            f"kernel {kernel_text(kernel)} cannot be given a bandwidth, because some of its "
            "parts have one and others have none",
            'set the bandwidth in all parts or in none, or leave bandwidth at "auto"',
        )
    largest = max(widths)
    scaled = [bandwidth if w == largest else w * (bandwidth / largest) for w in widths]
    return {"kernel": with_bandwidths(kernel, scaled), "bandwidth": "auto"}


def _with_next_widths(kernel: KernelTable, widths: Iterator[float]) -> KernelTable:
    """Return the kernel with its bandwidths replaced by the next values of `widths`."""
    table = {"kind": kernel} if isinstance(kernel, str) else dict(kernel)
    if "parts" in table:
        return table | {"parts": [_with_next_widths(part, widths) for part in table["parts"]]}
    return table | {"bandwidth": next(widths)} if bandwidths(kernel) else kernel


def _part_text(part: KernelTable) -> str:
    """Format a part, in parentheses if it is a sum of several kernels."""
    text = kernel_text(part)
    is_sum = not isinstance(part, str) and _name(part) == "sum" and len(part["parts"]) > 1
    return f"({text})" if is_sum else text


def _name(table: Mapping[str, Any]) -> str:
    return str(table.get("kind", table.get("kernel")))


def _has_bandwidth(name: str) -> bool:
    return name in KERNELS and "bandwidth" in inspect.signature(KERNELS[name]).parameters
