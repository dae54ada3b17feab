"""A whole search as a program of its own, to be killed: real rank processes, made-up times.

    python -m tests.support.search_program STUDY OPTIONS

OPTIONS is a JSON object: ``faults``, ``candidates``, ``trials``, ``is_resume``, ``deadline_s``,
``file_limit_bytes`` (no file may grow beyond). It writes one JSON line at its start, one for every
launch, and one at its end.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccltune.errors import NccltuneError
from nccltune.payloads.derive import default_workload
from nccltune.search.engine import SearchPlan, run_search
from tests.support.hosts import standin_bench
from tests.support.studies import FACTS

if TYPE_CHECKING:
    from nccltune.search.result import Progress


def say(**words: Any) -> None:
    """Write one line, at once."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class Loud:
    """Says how far the search is."""

    def update(self, progress: Progress) -> None:
        """Say the stage, and whether a launch begins or has ended."""
        say(stage=progress.stage, is_done=progress.launch is not None)


def search_plan(options: dict[str, Any]) -> SearchPlan:
    """Return the plan that the options ask for."""
    return SearchPlan(
        workload=default_workload(),
        facts=FACTS,
        extra_candidates=tuple(options.get("candidates", ())),
        trial_count=options.get("trials", 20),
        seed=options.get("seed", 0),
    )


def main() -> None:
    """Search, and say how it ended."""
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    limit = options.get("file_limit_bytes")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    faults, deadline_s = options.get("faults", ""), options.get("deadline_s", 20.0)
    with standin_bench(2, faults=faults, deadline_s=deadline_s) as bench:
        say(server=bench._server._process.pid)
        is_resume = options.get("is_resume", False)
        try:
            result = run_search(
                search_plan(options), bench, path, is_resume=is_resume, observer=Loud()
            )
        except NccltuneError as error:
            say(error=error.code, message=str(error))
            return
    say(
        verdict=result.verdict,
        trial_count=result.trial_count,
        is_interrupted=result.is_interrupted,
        sentence=result.sentence,
    )


if __name__ == "__main__":
    main()
