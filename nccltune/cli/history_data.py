"""What ``nccltune history`` knows: verifies and searches in one order, and figures over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.cli.trend import Point, Series
from nccltune.cli.words import format_gain, format_gain_interval, format_interval, format_ratio
from nccltune.errors import FileError, NccltuneError
from nccltune.sglang.command import parse_launch
from nccltune.sglang.defaults import SGLANG_BASE_ENVIRONMENT
from nccltune.store.searches import count_searches, read_searches
from nccltune.verify.boot_data import DAMAGE
from nccltune.verify.judging.comparison import settings_of
from nccltune.verify.judging.evidence import gather_evidence
from nccltune.verify.judging.numbers import summarize
from nccltune.verify.judging.stored import FREE_FLAGS, SAME_LOAD, without_settings
from nccltune.verify.record import load, record_paths
from nccltune.verify.record_data import moment_of

if TYPE_CHECKING:
    from nccltune.verify.model import Arm
    from nccltune.verify.record import VerifyRecord
    from nccltune.verify.sameness import Flags

_NO_IDENTITY = FREE_FLAGS | {"config"}
"""Flags that tell nothing about how fast a server is; what a config file sets stands beside it."""


class Kind(StrEnum):
    """What was done."""

    VERIFY = "verify"
    SEARCH = "search"


@dataclass(frozen=True, slots=True)
class Figure:
    """One value that later ones of the same key may be compared with; smaller is faster.

    Attributes:
        detail: what tells it from others of the same name.
    """

    key: object
    name: str
    unit: str
    value: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One verify or search.

    Attributes:
        id: begins with the time; of a verify, it names its file.
        subject: what was compared or searched for, in a word or two.
        result: the effect, in words.
        is_baseline: a running server may be held against it.
    """

    kind: Kind
    at: datetime
    id: str
    subject: str
    verdict: str
    result: str
    sentence: str
    details: Mapping[str, object]
    figures: tuple[Figure, ...] = ()
    is_baseline: bool = False

    def to_json(self) -> dict[str, object]:
        """Lay the entry out for scripts."""
        return {
            "kind": str(self.kind),
            "at": self.at.isoformat(timespec="seconds"),
            "id": self.id,
            "subject": self.subject,
            "verdict": self.verdict,
            "sentence": self.sentence,
            **self.details,
        }


class History(NamedTuple):
    """What is kept, as far as it was asked for.

    Attributes:
        entries: the newest, oldest of them first.
        total: verifies and searches that are kept, those included that nobody read.
        problems: a line about each file that was read and cannot be used.
    """

    entries: tuple[Entry, ...]
    total: int
    problems: tuple[str, ...]


def read_history(last: int) -> History:
    """Read the newest verifies and searches, and no more files than that takes.

    Raises:
        FileError: the state folder is none, or cannot be read.
    """
    paths = record_paths()
    total = len(paths) + count_searches()
    entries: list[Entry] = []
    unusable: list[str] = []
    for path in paths:
        if len(entries) == last:
            break
        try:
            entries.append(_from_verify(load(path)))
        except FileError as error:
            unusable.append(str(error))
        except DAMAGE as error:
            unusable.append(f"{path}: is damaged ({type(error).__name__}: {error}); move it away")
    searches, problems = read_searches(last)
    unusable += problems
    for kept in searches:
        try:
            entries.append(_from_search(kept))
        except DAMAGE as error:
            unusable.append(f"search {kept.get('name')}: damaged ({type(error).__name__}: {error})")
    entries.reverse()  # the newest came first, which ties in time keep
    entries.sort(key=lambda entry: entry.at)
    return History(tuple(entries[-last:]), total - len(unusable), tuple(unusable))


def series_of(entries: Sequence[Entry]) -> list[Series]:
    """Gather the figures that belong together, in the order in which they came up."""
    points: dict[object, list[Point]] = {}
    shown: dict[object, Figure] = {}
    for entry in entries:
        for figure in entry.figures:
            at = entry.at.isoformat(timespec="seconds")
            points.setdefault(figure.key, []).append(Point(at, figure.value, entry.id))
            shown[figure.key] = figure
    names = Counter(each.name for each in shown.values())
    return [
        Series(
            f"{each.name}, {each.detail}" if names[each.name] > 1 and each.detail else each.name,
            each.unit,
            tuple(points[key]),
        )
        for key, each in shown.items()
    ]


def _from_verify(record: VerifyRecord) -> Entry:
    judged = record.judgement
    verdict = judged.get("verdict") if record.is_finished or record.problems else None
    effect, interval = judged.get("effect_pct"), judged.get("effect_ci_pct")
    result = ""
    if isinstance(effect, int | float):
        result = format_gain(effect)
        if isinstance(interval, list) and None not in interval:
            interval_words = format_gain_interval((interval[0], interval[1]))
            result += f" ({interval_words.removesuffix(' %')})"
    return Entry(
        kind=Kind.VERIFY,
        at=moment_of(record.created_at),
        id=record.id,
        subject=record.url or ", ".join(arm.name for arm in record.arms),
        verdict=str(verdict or "not finished"),
        result=result,
        sentence=str(judged.get("sentence", "")),
        details={
            "effect_pct": effect,
            "effect_ci_pct": interval or [None, None],
            "arms": [arm.name for arm in record.arms],
            "boots": len(record.boots),
            "launch": list(record.launch),
            "url": record.url,
        },
        figures=tuple(_speeds(record)),
        is_baseline=bool(record.boots) and not record.url,
    )


def _speeds(record: VerifyRecord) -> Iterator[Figure]:
    """Yield the time of a decode step of each arm; the same settings under another name are one."""
    seen: set[object] = set()
    for arm in record.arms:
        own = [boot for boot in record.boots if boot.arm == arm.name]
        if gather_evidence((arm,), own).is_lost:
            continue  # what was measured is not what the profile does
        value = summarize(arm.name, own).ms_per_verify
        known = _identity(record, arm)
        if value is None or known is None:
            continue
        identity, words = known
        gpus = None if record.fingerprint is None else record.fingerprint.gpu_uuids
        environ = sorted(without_settings(record.environ, settings_of(arm)).items())
        load = [(name, record.load.get(name)) for name in SAME_LOAD]
        key = (Kind.VERIFY, gpus, tuple(load), tuple(environ), identity)
        if key not in seen:
            seen.add(key)
            detail = [f"{name} {held}" for name, held in load]
            detail += [f"{name}={held}" for name, held in environ]
            yield Figure(key, words, "ms a step", value, ", ".join(detail))


def _identity(record: VerifyRecord, arm: Arm) -> tuple[object, str] | None:
    """Return what makes two starts comparable, and how people call it; None if not understood."""
    flags = record.flags.get(arm.name)
    if flags is None:
        try:
            flags = parse_launch(arm.argv).flags
        except NccltuneError:
            return None
    telling = {name: values for name, values in flags.items() if name not in _NO_IDENTITY}
    settings = {} if arm.profile is None else arm.profile.settings
    steps = f"{arm.num_steps} steps" if arm.num_steps else "as launched"
    parts = [
        arm.profile.name if arm.profile is not None and settings else "defaults",
        steps if arm.is_speculative else "no speculation",
        f"{Path(_first(flags, 'model_path', '?')).name}, tp {_first(flags, 'tp_size', '1')}",
    ]
    return (tuple(sorted(telling.items())), tuple(sorted(settings.items()))), ", ".join(parts)


def _first(flags: Flags, name: str, otherwise: str) -> str:
    return next(iter(flags.get(name, ())), otherwise)


def _from_search(kept: Mapping[str, object]) -> Entry:
    answer = kept["answer"]
    if not isinstance(answer, dict):
        raise TypeError("the answer is no object")
    at = moment_of(str(kept["ended_at"]))
    low, high = answer["score_ci"]
    ratio = answer["score_ratio"]
    result = f"score {format_ratio(ratio)}"
    if low is not None and high is not None:
        result += f" ({format_interval(low, high)})"
    return Entry(
        kind=Kind.SEARCH,
        at=at,
        id=f"{at:%Y%m%d-%H%M%S}",
        subject=str(kept["name"]),
        verdict=str(answer["verdict"]),
        result=result,
        sentence=str(answer["sentence"]),
        details={
            "score_ratio": ratio,
            "score_ci": [low, high],
            "workload": answer["workload"],
            "profile": answer["profile"]["name"],
            "settings": answer["profile"]["settings"],
            "trial_count": answer["trial_count"],
            "source": answer["source"],
        },
        figures=tuple(_all_reduces(answer)),
    )


def _all_reduces(answer: Mapping[str, object]) -> Iterator[Figure]:
    """Yield the time of the all-reduce that weighs most, under SGLang's own settings."""
    rows = answer["payloads"]
    host = answer.get("fingerprint")
    gpus = tuple(host["gpu_uuids"]) if isinstance(host, dict) else None
    if answer["source"] != "gpus" or not isinstance(rows, list) or not rows:
        return
    row = max(rows, key=lambda each: float(each["weight"]))
    value = row["baseline_us"]
    if value is not None:
        size, base = row["bytes"], answer.get("base_environment")
        # Answers of earlier versions do not say under what they were measured.
        known = tuple(sorted(base.items())) if isinstance(base, dict) else None
        usual = SGLANG_BASE_ENVIRONMENT.items()
        own = [f"{name}={held}" for name, held in known or () if (name, held) not in usual]
        name = f"defaults, all-reduce of {size} B"
        key = (Kind.SEARCH, gpus, size, known)
        yield Figure(key, name, "us", float(value), " ".join(own))
