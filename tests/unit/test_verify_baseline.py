from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune.errors import ExitCode
from nccltune.host.fingerprint import Fingerprint
from nccltune.verify.judging.baseline import find_baseline, judge_running
from nccltune.verify.judging.judgement import Cause, Judgement, Verdict
from nccltune.verify.judging.stored import Baseline
from nccltune.verify.model import Arm, Boot, Chunk, RankState, Run, Seen
from nccltune.verify.noise import keep_boot_noise, known_boot_noise
from nccltune.verify.record import VerifyRecord
from tests.support.verify_boots import DEFAULT, FOLK, LAUNCH, a_boot, steady_boots

HERE = Fingerprint(
    gpu_names=("NVIDIA H200",) * 2,
    gpu_uuids=("GPU-a", "GPU-b"),
    driver_version="580.159.04",
    nccl_version="2.28.9",
    link_matrix=(("X", "NV18"), ("NV18", "X")),
    numa_nodes=(0, 1),
    world_size=2,
)
LOAD = {"concurrency": 1, "tokens": 500, "run_count": 5}
RUNNING = replace(FOLK, name="running")


def stored(
    record_id: str = "one",
    *,
    ms: float = 20.0,
    boots: Sequence[Boot] | None = None,
    arms: Sequence[Arm] = (DEFAULT, FOLK),
    **changes: object,
) -> VerifyRecord:
    record = VerifyRecord(
        id=record_id,
        created_at="2026-11-29T12:00:00+00:00",
        launch=LAUNCH,
        arms=tuple(arms),
        load=LOAD,
        boot_total=8,
        boots=tuple(steady_boots((DEFAULT, FOLK), {"default": 22.0, "folk": ms}))
        if boots is None
        else tuple(boots),
        fingerprint=HERE,
        is_finished=True,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def found(
    *records: VerifyRecord,
    argv: Sequence[str] = LAUNCH,
    arm: Arm = FOLK,
    fingerprint: Fingerprint | None = HERE,
    environ: Mapping[str, str] | None = None,
) -> Baseline:
    settings = {} if arm.profile is None else arm.profile.settings
    return find_baseline(
        records,
        argv=argv,
        settings=settings,
        fingerprint=fingerprint,
        load=LOAD,
        environ=settings if environ is None else environ,
    )


def running(ms: float, baseline: Baseline, *, noise: float | None = None) -> Judgement:
    return judge_running(a_boot(RUNNING, 0, ms), RUNNING, baseline, noise=noise)


def test_find_baseline_takes_the_arm_with_the_same_settings() -> None:
    baseline = found(stored())

    assert {boot.arm for boot in baseline.boots} == {"folk"}
    assert len(baseline.boots) == 4
    assert (baseline.verify_ids, baseline.misses) == (("one",), ())
    assert {boot.arm for boot in found(stored(), arm=DEFAULT).boots} == {"default"}


def test_find_baseline_address_and_order_of_flags_do_not_matter() -> None:
    argv = ("python3", "-m", "sglang.launch_server", "--tp=8", "--port", "9", "--host", "0.0.0.0")

    assert found(stored(), argv=(*argv, "--model-path=/models/kimi")).boots


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": replace(HERE, nccl_version="2.30.4")}, "another host (nccl_version)"),
        ({"fingerprint": replace(HERE, gpu_uuids=("GPU-c", "GPU-d"))}, "made on other GPUs"),
        ({"fingerprint": None}, "cannot be read"),
        ({"load": {**LOAD, "concurrency": 8}}, "measured with concurrency 8, and this is 1"),
        ({"arms": (DEFAULT,)}, "no arm with the settings that this server should have"),
        ({"boots": ()}, "no boot of it serves"),
    ],
)
def test_find_baseline_says_why_a_stored_verify_does_not_serve(
    changes: dict[str, object], words: str
) -> None:
    baseline = found(replace(stored(), **changes))  # type: ignore[arg-type]

    assert baseline.boots == ()
    assert len(baseline.misses) == 1
    assert words in baseline.misses[0]
    assert baseline.misses[0].startswith("verify one: ")


def test_find_baseline_names_the_flags_that_differ() -> None:
    argv = (*LAUNCH[:-1], "4", "--speculative-algorithm", "EAGLE3")
    baseline = found(stored(), argv=argv)

    assert "the launch differs in --speculative-algorithm, --tp-size" in baseline.misses[0]


def test_find_baseline_newer_driver_patch_serves_and_is_told() -> None:
    here = replace(HERE, driver_version="580.200.01")
    baseline = found(stored(), fingerprint=here)

    assert baseline.differing == ("driver_version",)
    judgement = running(25.0, baseline)
    assert [reason.cause for reason in judgement.reasons] == [Cause.HOST_CHANGED]


def test_find_baseline_goes_back_until_the_spread_is_known() -> None:
    two = steady_boots((DEFAULT, FOLK), {"default": 22.0, "folk": 20.0}, 2)
    records = [stored("new", boots=two), stored("middle", boots=two), stored("old", boots=two)]
    baseline = found(*records)

    assert baseline.verify_ids == ("new", "middle")
    assert len(baseline.boots) == 4


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, ""),
        ({"CUDA_HOME": "/cuda", "NCCL_DEBUG": "INFO"}, ""),
        ({"NCCL_PROTO": "LL"}, "started under another environment (NCCL_PROTO)"),
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, "(NCCL_ALGO, NCCL_PROTO)"),
    ],
)
def test_find_baseline_of_the_defaults_takes_no_server_that_has_settings(
    environ: Mapping[str, str], named: str
) -> None:
    baseline = found(stored(), arm=DEFAULT, environ=environ)

    assert bool(baseline.boots) is not bool(named)
    assert [named in miss for miss in baseline.misses] == [True] * bool(named)


def test_find_baseline_of_a_profile_takes_its_own_settings_and_no_others() -> None:
    shm = {"NCCL_P2P_DISABLE": "1"}

    assert found(stored(), environ={"NCCL_PROTO": "LL"}).boots
    assert found(stored(), environ={}).boots  # lost, which is told
    assert not found(stored(), environ={"NCCL_PROTO": "Simple"}).boots
    assert found(stored(environ=shm), environ={**shm, "NCCL_PROTO": "LL"}).boots


def test_find_baseline_where_a_fact_is_not_known_says_so() -> None:
    unknown = replace(HERE, nccl_version=None)
    baseline = found(stored(fingerprint=unknown), fingerprint=unknown)

    assert "nccl_version not known" in baseline.misses[0]


def test_find_baseline_asks_for_no_record_once_there_are_boots_enough() -> None:
    asked: list[str] = []

    def records() -> Iterator[VerifyRecord]:
        for name in ("new", "old"):
            asked.append(name)
            yield stored(name)

    settings = {"NCCL_PROTO": "LL"}
    baseline = find_baseline(
        records(), argv=LAUNCH, settings=settings, fingerprint=HERE, load=LOAD, environ=settings
    )

    assert (baseline.verify_ids, asked) == (("new",), ["new"])


def test_find_baseline_goes_by_the_flags_that_the_arms_were_started_with(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tp-size: 4\n", encoding="utf-8")  # edited since: it said 8
    launch = (*LAUNCH[:-2], "--config", str(path))
    flags = {"model_path": ("/models/kimi",), "config": (str(path),), "tp_size": ("8",)}
    arms = [replace(arm, argv=launch) for arm in (DEFAULT, FOLK)]
    older = stored(arms=arms)
    record = replace(older, flags={"default": flags, "folk": flags})
    four = (*LAUNCH[:-1], "4")

    assert found(record).boots
    assert "the launch differs in --tp-size" in found(record, argv=four).misses[0]
    assert found(older, argv=four).boots
    path.unlink()
    assert found(record).boots
    assert "a command that cannot be read" in found(older).misses[0]


def test_find_baseline_key_that_is_hidden_is_no_difference() -> None:
    flags = {"model_path": ("/models/kimi",), "tp_size": ("8",), "hf_token": ("***",)}
    record = stored(flags={"default": flags, "folk": flags})

    assert found(record, argv=(*LAUNCH, "--hf-token", "***")).boots
    assert not found(record).boots


def test_find_baseline_leaves_out_running_servers_and_boots_that_lost_a_key() -> None:
    lost = Seen(ranks={"TP1": {"NCCL_PROTO": RankState.LOST}})
    boots = [replace(b, seen=lost) if b.arm == "folk" else b for b in stored().boots]

    assert found(stored(url="http://127.0.0.1:30000")).boots == ()
    assert found(stored(boots=boots)).boots == ()


def test_judge_running_slower_than_it_was_is_drift() -> None:
    judgement = running(27.0, found(stored()))

    assert (judgement.verdict, judgement.exit_code) == (Verdict.DRIFT, ExitCode.UNKNOWN)
    (compared,) = judgement.comparisons
    assert compared.effect_pct == pytest.approx(-35.0, abs=0.2)
    assert compared.effect_ci_pct is not None
    assert compared.effect_ci_pct[1] < -30.0
    assert "it is slower than 4 stored boots of one" in judgement.sentence


def test_judge_running_faster_than_it_was_is_drift_too() -> None:
    judgement = running(17.0, found(stored()))

    assert judgement.verdict is Verdict.DRIFT
    assert "it is faster than 4 stored boots" in judgement.sentence


def test_judge_running_as_it_was_makes_no_difference() -> None:
    judgement = running(20.05, found(stored()))

    assert (judgement.verdict, judgement.exit_code) == (Verdict.NO_DIFFERENCE, ExitCode.NO)
    assert judgement.sentence.startswith("the server is as it was")


def test_judge_running_within_recorded_noise_is_not_told_from_it() -> None:
    baseline = found(stored())

    assert running(20.6, baseline).verdict is Verdict.DRIFT
    assert running(20.6, baseline, noise=0.03).verdict is Verdict.INCONCLUSIVE


def test_judge_running_two_stored_boots_never_decide() -> None:
    boots = steady_boots((DEFAULT, FOLK), {"default": 22.0, "folk": 20.0}, 2)
    judgement = running(40.0, found(stored(boots=boots)))

    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.comparisons[0].effect_ci_pct is None
    assert judgement.sentence.endswith("it takes 3 to know their spread")


def test_judge_running_without_baseline_says_what_makes_one() -> None:
    judgement = running(20.0, found(stored(fingerprint=replace(HERE, nccl_version="2.30.4"))))

    assert (judgement.verdict, judgement.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.UNKNOWN)
    assert judgement.comparisons == ()
    assert "'nccltune verify -- CMD' makes one" in judgement.sentence
    assert [reason.cause for reason in judgement.reasons] == [Cause.NO_BASELINE]


@pytest.mark.parametrize("baseline", [Baseline(), found(stored())], ids=["none", "stored"])
def test_judge_running_lost_key_is_an_answer_by_itself(baseline: Baseline) -> None:
    ranks = {"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}, "TP1": {"NCCL_PROTO": RankState.LOST}}
    boot = a_boot(RUNNING, 0, 20.0, seen=Seen(ranks=ranks, is_nccl_on_path=True))
    judgement = judge_running(boot, RUNNING, baseline)

    assert (judgement.verdict, judgement.exit_code) == (Verdict.DRIFT, ExitCode.NO)
    assert "in rank TP1: NCCL_PROTO lost" in judgement.sentence


def test_judge_running_answer_in_one_piece_is_unusable() -> None:
    boot = a_boot(RUNNING, 0)
    stream = replace(boot.runs[0].streams[0], chunks=(Chunk(5.0, 500),))
    judgement = judge_running(replace(boot, runs=(Run((stream,), 5.0),)), RUNNING, found(stored()))

    assert (judgement.verdict, judgement.exit_code) == (Verdict.UNUSABLE, ExitCode.SERVER)
    assert judgement.comparisons == ()


def test_judge_running_unchanged_server_is_called_drifted_at_most_as_often_as_stated() -> None:
    source = random.Random(2)

    def draw() -> float:
        return 20.0 * math.exp(0.02 * source.gauss(0.0, 1.0))

    trials, false = 600, 0
    for _ in range(trials):
        baseline = Baseline(tuple(a_boot(FOLK, idx, draw()) for idx in range(4)), ("one",))
        false += running(draw(), baseline).verdict is Verdict.DRIFT

    assert false <= trials * 0.05 + 4.0 * math.sqrt(trials * 0.05 * 0.95)


def test_noise_that_started_servers_showed_is_known_of_one_that_runs_with_its_profile() -> None:
    environ = {"NCCL_P2P_DISABLE": "1"}
    keep_boot_noise(stored(environ=environ))
    of_server = stored(arms=(RUNNING,), boots=(), url="http://127.0.0.1:30000")
    tuned = {**environ, "NCCL_PROTO": "LL"}

    assert known_boot_noise(replace(of_server, environ=tuned)) is not None
    assert known_boot_noise(replace(of_server, environ={"NCCL_PROTO": "LL"})) is None


def test_judge_running_server_is_told_that_the_recorded_noise_hides_a_change() -> None:
    baseline = found(stored())

    assert running(21.0, baseline).verdict is Verdict.DRIFT
    hidden = running(21.0, baseline, noise=0.1)
    assert hidden.verdict is Verdict.INCONCLUSIVE
    assert Cause.RECORDED_NOISE in {reason.cause for reason in hidden.reasons}
