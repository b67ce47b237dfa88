"""Host memory for rows on their way to a device, and the wait for the copies from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class NoCopies:
    """The event of copies that have ended, or were never made."""

    def synchronize(self) -> None:
        """Return at once."""


NO_COPIES = NoCopies()


class HostMemory:
    """Ordinary memory. This class is for the CPU, which uses the rows where they are."""

    @property
    def empty(self) -> Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]:
        """Function that returns an uninitialised array, given shape and dtype."""
        return np.empty

    def last_copy(self) -> Any:
        """Return an event whose `synchronize` waits until all copies queued so far have ended.

        An array of this memory may be overwritten after the event of the last copy from it. Any
        thread may wait for the event.
        """
        return NO_COPIES


PAGEABLE = HostMemory()
