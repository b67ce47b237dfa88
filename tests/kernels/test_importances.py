"""Compare the summary of a metric with its explicit matrix."""

from __future__ import annotations

import json

import numpy as np
import pytest

from streamkern.kernels.importances import MAX_SUMMARY_ENTRIES, describe_metric, importances

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("r", [1, 3, 30])
def test_importances_equal_explicit_matrix(r: int) -> None:
    A = RNG.normal(size=(30, r))
    M = A @ A.T
    lam, U = np.linalg.eigh(M)
    np.testing.assert_allclose(importances(A), M.diagonal() / np.trace(M))
    names = [f"c{j}" for j in range(30)]
    summary = describe_metric(A, names)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["kind"], summary["features"], summary["directions"]) == ("matrix", 30, r)
    order = np.argsort(-M.diagonal())[:MAX_SUMMARY_ENTRIES]
    assert [name for name, _ in summary["importances"]] == [f"c{j}" for j in order]
    shares = (lam[::-1] / lam.sum())[: min(r, MAX_SUMMARY_ENTRIES)]
    np.testing.assert_allclose(summary["spectrum"], shares, atol=1e-12)
    assert len(summary["first"]) == min(r, 3)
    for k, terms in enumerate(summary["first"]):
        u = U[:, -1 - k]
        places = [int(name[1:]) for name, _ in terms]
        np.testing.assert_array_equal(places, np.argsort(-np.abs(u))[: len(places)])
        entries = u[places] * np.sign(u[places[0]])
        np.testing.assert_allclose([x for _, x in terms], entries, atol=1e-9)


def test_importances_of_diagonal_metric() -> None:
    summary = describe_metric(np.array([0.0, 2.0, 1.0]), "abc")
    assert summary["importances"] == [["b", 0.8], ["c", 0.2], ["a", 0.0]]
    assert (summary["kind"], summary["directions"], summary["first"]) == ("scales", 2, [])
    np.testing.assert_allclose(summary["spectrum"], [0.8, 0.2, 0.0])


def test_importances_of_zero_metric_are_zero() -> None:
    np.testing.assert_array_equal(importances(np.zeros((3, 2))), np.zeros(3))
