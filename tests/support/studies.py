"""Studies without an engine: trials on a journal of their own, with the default workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.payloads.derive import default_workload
from nccltune.search.journal import open_study
from nccltune.search.objective import Objective
from nccltune.search.space import HostFacts, Space
from nccltune.search.trials import Trials

if TYPE_CHECKING:
    import optuna

    from nccltune.measurement import Bench, Settings

FACTS = HostFacts(is_ll128_offered=True, has_clusters=True, has_full_nvlink=True, uses_shm=False)
PLAN: dict[str, object] = {"workload": "w", "source": "gpus"}
OBJECTIVE = Objective(default_workload())


def open_plain_study(
    path: Path,
    *,
    is_resume: bool = False,
    plan: dict[str, object] | None = None,
) -> optuna.Study:
    """Open a journal as a search does."""
    plan = PLAN if plan is None else plan
    return open_study(path, plan, is_resume=is_resume)


def open_trials(
    path: Path,
    bench: Bench,
    *,
    is_resume: bool = False,
    seed: int = 0,
    sampler: str = "random",
    pinned: Settings | None = None,
) -> Trials:
    """Open a journal with its trials."""
    return Trials(
        open_plain_study(path, is_resume=is_resume),
        bench,
        OBJECTIVE,
        Space(FACTS, pinned or {}),
        seed=seed,
        is_random=sampler == "random",
    )


def study_of(path: Path) -> optuna.Study:
    """Read a journal with Optuna alone, as its dashboard would."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.load_study(study_name="nccltune", storage=storage)
