from __future__ import annotations

import errno
import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from optuna.trial import TrialState

from nccltune.errors import BusyError, FileError
from nccltune.search.journal import DAMAGE, _Backend, _Lock, search_lock
from tests.support.model_bench import ModelBench
from tests.support.studies import PLAN, open_plain_study, open_trials, study_of

CANDIDATES = tuple(
    {"NCCL_NTHREADS": threads, "NCCL_PROTO": f"allreduce:{protocol}"}
    for protocol in ("LL", "Simple")
    for threads in ("64", "128", "256", "512")
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "studies" / "kimi.journal"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal of the baseline and five candidates."""
    path = tmp_path_factory.mktemp("made") / "kimi.journal"
    trials = open_trials(path, ModelBench())
    trials.measure_baseline()
    for settings in CANDIDATES[:5]:
        trials.measure(settings)
    return path.read_bytes()


@pytest.fixture
def content(path: Path, made: bytes) -> bytes:
    """The same, where this test expects it."""
    path.parent.mkdir()
    path.write_bytes(made)
    return made


def finished_in(content: bytes) -> int:
    """Count the trials whose COMPLETE line is whole."""
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    operations = map(json.loads, lines)
    return sum(op["op_code"] == 6 and op["state"] == TrialState.COMPLETE for op in operations)


def test_search_lock_keeps_a_second_search_out_and_names_the_first(tmp_path: Path) -> None:
    lock = tmp_path / "studies" / "search.lock"
    with (
        search_lock(lock),
        pytest.raises(BusyError, match=rf"another search \(process {os.getpid()}\)") as caught,
        search_lock(lock),
    ):
        pass

    assert caught.value.code == "search_running"
    with search_lock(lock):
        assert lock.read_text() == str(os.getpid())


def test_search_lock_in_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("a file")

    with (
        pytest.raises(FileError, match=r"search\.lock: cannot be written"),
        search_lock(tmp_path / "studies" / "search.lock"),
    ):
        pass


def test_search_lock_where_locking_does_not_work_is_not_taken_for_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)

    with (
        pytest.raises(FileError, match=r"cannot be locked: No locks available"),
        search_lock(tmp_path / "search.lock"),
    ):
        pass


def test_open_study_new_one_can_be_read_by_optuna_alone(path: Path, content: bytes) -> None:
    del content
    study = study_of(path)

    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 6
    assert study.user_attrs["nccltune.plan"] == PLAN
    assert study.trials[1].params["NCCL_NTHREADS"] == "64"


def test_open_study_says_nothing_on_the_terminal(
    path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    del content
    open_trials(path, ModelBench(), is_resume=True).measure_baseline()
    open_trials(path, ModelBench()).measure_baseline()

    assert capfd.readouterr() == ("", "")


def test_open_study_without_resume_sets_the_old_one_aside(path: Path, content: bytes) -> None:
    assert open_trials(path, ModelBench()).finished == []

    assert path.with_name("kimi.journal.old").read_bytes() == content


def test_open_study_with_nothing_to_resume_says_so(path: Path) -> None:
    with pytest.raises(FileError, match=r"kimi\.journal: there is no search to resume") as caught:
        open_plain_study(path, is_resume=True)

    assert caught.value.code == "no_study"


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ({**PLAN, "workload": "other"}, "payloads"),
        ({**PLAN, "source": "recording:x"}, "source"),
        ({"workload": "w"}, "source"),
        ({**PLAN, "fingerprint": {"driver": "1"}}, "GPUs, driver or NCCL"),
        ({**PLAN, "base": {"NCCL_PROTO": "LL"}}, "NCCL variables in the environment"),
        ({"workload": "x", "source": "y"}, "source, payloads"),
    ],
    ids=["workload", "source", "missing", "more", "environment", "both"],
)
def test_open_study_of_another_search_is_refused_and_left_alone(
    path: Path, content: bytes, plan: dict[str, object], named: str
) -> None:
    with pytest.raises(FileError, match=rf"\({named} differ\); run without --resume") as caught:
        open_plain_study(path, is_resume=True, plan=plan)

    assert caught.value.code == "other_study"
    assert path.read_bytes().startswith(content)
    assert len(open_trials(path, ModelBench(), is_resume=True).finished) == 6


def test_open_study_compares_plans_as_json_has_them(path: Path) -> None:
    path.parent.mkdir()
    plan: dict[str, object] = {"gpus": ("a", "b"), "counts": {1: 2}}
    open_plain_study(path, plan=plan)

    open_plain_study(path, is_resume=True, plan=plan)


@pytest.mark.parametrize("seed", range(12))
def test_open_study_cut_anywhere_keeps_every_finished_trial_and_goes_on(
    path: Path, content: bytes, seed: int
) -> None:
    rng = random.Random(seed)
    cut = rng.randrange(len(content)) if seed else 0
    path.write_bytes(content[:cut])
    kept = finished_in(content[:cut])

    trials = open_trials(path, ModelBench(), is_resume=True)
    assert len(trials.finished) == kept
    trials.measure_baseline()
    left = [settings for settings in CANDIDATES if not trials.has_tried(settings)][:2]
    for settings in left:
        trials.measure(settings)

    again = open_trials(path, ModelBench(), is_resume=True)
    assert [one.launch for one in again.finished] == [one.launch for one in trials.finished]
    states = Counter(trial.state for trial in study_of(path).trials)
    assert states[TrialState.COMPLETE] == len(again.finished)
    assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}


def test_open_study_cut_after_every_line_gives_each_trial_its_own_parameters(
    path: Path, content: bytes
) -> None:
    lines = content.splitlines(keepends=True)
    for count in range(0, len(lines), 4):
        path.write_bytes(b"".join(lines[:count]))
        trials = open_trials(path, ModelBench(), is_resume=True)
        trials.measure_baseline()
        trials.measure({"NCCL_ALGO": "allreduce:Tree"})

        told = study_of(path).get_trials(states=(TrialState.COMPLETE,))
        for trial in told:
            chosen = {name: value for name, value in trial.params.items() if value is not None}
            assert chosen == trial.user_attrs["launch"]["settings"]


@pytest.mark.parametrize("is_resume", [True, False])
def test_open_study_with_the_lock_of_a_killed_process_does_not_wait_for_it(
    path: Path, content: bytes, *, is_resume: bool
) -> None:
    del content
    lock = path.with_name("kimi.journal.lock")
    lock.touch()
    path.with_name("kimi.journal.lock0123.rename").touch()
    began = time.monotonic()

    open_trials(path, ModelBench(), is_resume=is_resume).measure_baseline()

    assert time.monotonic() - began < 5.0
    assert not list(path.parent.glob("*.lock*"))


@pytest.mark.parametrize(
    "damage",
    [b"\x00" * 40, b"", b"[1, 2]", b'{"no": 1}', b"5", b'{"op_code": 8, "trial', b"\xff\xfe"],
    ids=repr,
)
@pytest.mark.parametrize("number", [1, 7, 20])
def test_open_study_with_a_damaged_line_names_it_and_changes_nothing(
    path: Path, content: bytes, number: int, damage: bytes
) -> None:
    lines = content.splitlines()
    lines[number - 1] = damage
    broken = b"\n".join(lines) + b"\n"
    path.write_bytes(broken)

    with pytest.raises(FileError, match="move it away and search anew") as caught:
        open_plain_study(path, is_resume=True)

    assert caught.value.line == number
    assert str(caught.value).startswith(f"{path}:{number}: is damaged")
    assert "\n" not in str(caught.value)
    assert caught.value.code == "damaged_study"
    assert path.read_bytes() == broken


@pytest.mark.parametrize("seed", range(20))
def test_open_study_of_whole_lines_that_do_not_fit_opens_or_says_damaged(
    path: Path, content: bytes, seed: int
) -> None:
    rng = random.Random(seed)
    lines = content.splitlines(keepends=True)
    for _ in range(rng.randint(1, 3)):
        idx, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                del lines[idx]
            case 1:
                lines.insert(other, lines[idx])
            case 2:
                lines[idx], lines[other] = lines[other], lines[idx]
            case _:
                operation = json.loads(lines[idx])
                operation.pop(rng.choice(sorted(operation)))
                lines[idx] = json.dumps(operation).encode() + b"\n"
    path.write_bytes(b"".join(lines))

    # What was cut out may be missing; nothing but a word of damage may come of it.
    with suppress(*DAMAGE, FileError):
        open_trials(path, ModelBench(), is_resume=True)


def test_full_disk_is_said_in_one_line_and_nothing_told_before_is_lost(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = open_trials(path, ModelBench(), is_resume=True)
    before = path.read_bytes()
    assert before.startswith(content)

    def refuse(_fd: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        with pytest.raises(FileError, match=r"kimi\.journal: cannot be written: No space left"):
            trials.measure(CANDIDATES[6])
    again = open_trials(path, ModelBench(), is_resume=True)

    assert len(again.finished) == 6
    assert again.measure(CANDIDATES[6]) is not None
    assert len(open_trials(path, ModelBench(), is_resume=True).finished) == 7


def test_full_disk_from_the_start_names_the_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()

    def refuse(_fd: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", refuse)

    with pytest.raises(FileError, match=r"kimi\.journal: cannot be written: No space left"):
        open_plain_study(path)


def test_open_study_in_a_folder_that_is_not_there_names_the_journal(path: Path) -> None:
    with pytest.raises(FileError, match=r"kimi\.journal: cannot be used: No such file"):
        open_plain_study(path)


def test_interrupt_while_the_journal_is_locked_stays_an_interrupt(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = open_trials(path, ModelBench(), is_resume=True)
    assert path.read_bytes().startswith(content)

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.open", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trials.measure(CANDIDATES[6])
    assert len(open_trials(path, ModelBench(), is_resume=True).finished) == 6


def test_interrupt_while_a_line_is_written_stays_an_interrupt(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_unlink = os.unlink

    def interrupted(name: str) -> None:
        real_unlink(name)
        if "journal.lock" in name:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", interrupted)

    with pytest.raises(KeyboardInterrupt):
        _Backend(str(path), lock_obj=_Lock(str(path))).append_logs([{"op_code": 9}])

    assert path.read_bytes().startswith(content)
    assert not list(path.parent.glob("*.lock*"))


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "put that right"), (errno.EPERM, "put that right")],
)
def test_journal_that_cannot_be_written_says_what_to_do_about_the_cause(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def fail(_descriptor: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(FileError, match=f"{cure}, then go on with --resume"):
        _Backend(str(path), lock_obj=_Lock(str(path))).append_logs([{"op_code": 9}])
    assert path.read_bytes().startswith(content)
