"""Map class ids to those of other data: of a model, or of its training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.text import some
from streamkern.store.class_labels import KnownClasses
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.column_order import Ordered


def in_classes(
    source: BaseSource, classes: Sequence[str] | None, label_dtype: str | None, where: str
) -> BaseSource:
    """Return `source` with class ids into `classes`; unchanged if it has these, or for values.

    Its own classes may be a subset, in any order, and of labels of another type. Raises DataError
    if rows may have a class outside `classes`, or if two classes of `source` map to one.
    """
    found = source.classes
    if classes is None or found is None or found == tuple(classes):
        return source
    known = KnownClasses(classes, label_dtype)
    places = known.places(found, source.label_dtype)
    new = [
        name
        for name, place, total in zip(found, places, _totals(source), strict=True)
        if place is None and total != 0
    ]
    if new:
        raise DataError(
            f"{where} has rows of the class{'es' if len(new) > 1 else ''} {some(new)}, and only "
            f"{some(tuple(classes))} are known; leave such rows out, or train on rows of all "
            "classes"
        )
    for place, count in Counter(places).items():
        if place is not None and count > 1:
            alike = [name for name, at in zip(found, places, strict=True) if at == place]
            raise DataError(
                f"{where} has rows of the classes {some(alike)}, which all stand for the class "
                f"'{classes[place]}' that is known; write them alike"
            )
    ids = np.array([-1 if place is None else place for place in places], np.int64)
    return _Relabelled(source, tuple(classes), label_dtype, ids)


def _totals(source: BaseSource) -> Sequence[float]:
    """Return the weight of the rows of each class; 1 if it is not known."""
    if source.totals is None or source.weighted:  # rows of weight 0 have a class, too
        return [1.0] * source.n_outputs
    return [float(total) for total in source.totals]


class _Relabelled(Ordered):
    """The rows of `base` with other class ids.

    ids : (c,) new id of each old one
    """

    kind = "classes"

    def __init__(
        self, base: BaseSource, classes: tuple[str, ...], label_dtype: str | None, ids: np.ndarray
    ) -> None:
        super().__init__(base, base.columns, base.target_columns)
        self.classes, self.n_outputs, self.label_dtype = classes, len(classes), label_dtype
        self._ids = ids
        if base.totals is not None:
            self.totals = np.zeros(len(classes))
            np.add.at(self.totals, ids[ids >= 0], base.totals[ids >= 0])

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        ids: np.ndarray = self._ids[y]
        return ids
