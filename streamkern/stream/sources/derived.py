"""Sources made of other sources, and functions of a source and all sources below it."""

from __future__ import annotations

from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import Moments, Transform


class DerivedSource(BaseSource):
    """Rows made from one source, `parts[0]`, whose contents identify them."""

    @property
    def base(self) -> BaseSource:
        """The source that this one is made from."""
        return self.parts[0]

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def statistics(self) -> Moments:
        return self.base.statistics()


def same_rows(source: BaseSource) -> bool:
    """Return whether every epoch is known to have the same rows, apart from transforms."""
    return source.repeats and all(map(same_rows, source.parts))


def host_transforms(source: BaseSource) -> list[Transform]:
    """Return the transforms that run with the read."""
    below = [t for part in source.parts for t in host_transforms(part)]
    return [*below, *source.host_transforms]


def check_unchanged(source: BaseSource) -> None:
    """Raise DataError if a store or a memory-mapped file has changed since it was opened."""
    own = getattr(source, "check_unchanged", None)
    if own is not None:
        own()
    for part in source.parts:
        check_unchanged(part)
