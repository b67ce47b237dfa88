"""Snapshots of moving branches: a resumed run reads the snapshot that it was started with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from streamkern.config.run_config import RunConfig
from streamkern.filesystem.icechunk_repository import at_snapshot, is_branch, snapshot_url
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.run_identity import recorded_run
from streamkern.train.training_data import storage_options_for


def at_snapshots(config: RunConfig, directory: RunDirectory | None) -> RunConfig:
    """Return the settings with the icechunk branches of data.train replaced by snapshots.

    They are the snapshots that the run in `directory` was started with or, for a new run, the
    current ones. Raises as `icechunk_store`.
    """
    urls = config.data.train_urls
    if not any(map(is_branch, urls)):
        return config
    recorded = recorded_run(directory)
    known = [] if recorded is None else list(_fingerprints(recorded["identity"]["data"]))
    if len(known) != len(urls):  # other stores, which are reported later
        known = [""] * len(urls)
    pinned = []
    for url, fingerprint in zip(urls, known, strict=True):
        kind, _, rest = fingerprint.partition(":")
        if is_branch(url):
            options = storage_options_for(config, url)
            began = kind == "icechunk"
            url = at_snapshot(url, rest.partition(":")[0]) if began else snapshot_url(url, options)
        pinned.append(url)
    one = isinstance(config.data.train, str)
    return config.with_overrides({"data.train": pinned[0] if one else pinned})


def _fingerprints(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fingerprints of the stores of a described source, in their order."""
    parts = described.get("sources", [described["base"]] if "base" in described else [])
    if not parts:
        yield str(described.get("fingerprint"))
    for part in parts:
        yield from _fingerprints(part)
