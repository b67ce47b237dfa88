"""Estimate a run of the block solver on 1, 2, 4, ... ranks of some hardware.

    python -m tools.rank_times run.toml --profile h100-ib --set run.ranks=64

RUN is a run file, as `streamkern plan` takes it. Nothing is trained; the profile "this" measures
this machine for two seconds.
"""

from __future__ import annotations

import argparse
import json
import sys

from streamkern.basics.errors import StreamkernError
from streamkern.cli.run_options import parse_setting
from streamkern.config.run_config import load_run_file
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.setup.planned import expected_times
from tools.rank_times.estimate import expected_over_ranks
from tools.rank_times.hardware import PROFILES, THIS
from tools.rank_times.table import over_ranks_text


def main(words: list[str] | None = None) -> int:
    """Print the estimate; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.rank_times", description=__doc__)
    parser.add_argument("run_file", metavar="RUN")
    parser.add_argument("--profile", choices=PROFILES, default=THIS)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    try:
        config = load_run_file(args.run_file).with_overrides(dict(map(parse_setting, args.set)))
        run = open_run(config)
        try:
            speeds = expected_times(run, None).speeds if args.profile == THIS else None
            found = expected_over_ranks(run, args.profile, speeds)
        finally:
            run.backend.close()
    except StreamkernError as error:
        print(error, file=sys.stderr)
        return 2
    if found is None:
        print("only the solver 'block' is modelled; set solver.name=block", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else over_ranks_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
