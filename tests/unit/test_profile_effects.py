from __future__ import annotations

import pytest

from nccltune.errors import UsageProblem
from nccltune.inject.profile_effects import EffectKind, effects_on

LAUNCH = ("python", "-m", "sglang.launch_server", "--model-path", "m", "--tp", "8")


def kinds(settings: dict[str, str], *argv: str) -> list[EffectKind]:
    return [effect.kind for effect in effects_on(settings, argv)]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_NTHREADS", "256", EffectKind.UNTOUCHED),
        ("NCCL_GRAPH_REGISTER", "1", EffectKind.GIVES_WAY),
        ("NCCL_ALGO", "allreduce:Ring", EffectKind.DEPENDS),
        ("NCCL_CUMEM_ENABLE", "1", EffectKind.DEPENDS),
    ],
)
def test_effects_without_a_launch_follow_the_catalogue(
    name: str, value: str, expected: EffectKind
) -> None:
    assert kinds({name: value}) == [expected]


@pytest.mark.parametrize(
    ("name", "value", "flags", "expected"),
    [
        ("NCCL_ALGO", "allreduce:Ring", (), EffectKind.UNTOUCHED),
        (
            "NCCL_ALGO",
            "allreduce:Ring",
            ("--enable-deterministic-inference",),
            EffectKind.OVERWRITTEN,
        ),
        ("NCCL_MAX_CTAS", "4", ("--enable-deterministic-inference",), EffectKind.OVERWRITTEN),
        ("NCCL_CUMEM_ENABLE", "1", (), EffectKind.GIVES_WAY),
        ("NCCL_CUMEM_ENABLE", "0", (), EffectKind.UNTOUCHED),
        ("NCCL_CUMEM_ENABLE", "0", ("--enable-symm-mem",), EffectKind.OVERWRITTEN),
    ],
)
def test_effects_under_a_launch_follow_its_flags(
    name: str, value: str, flags: tuple[str, ...], expected: EffectKind
) -> None:
    assert kinds({name: value}, *LAUNCH, *flags) == [expected]


def test_effects_name_the_flag_behind_them() -> None:
    (effect,) = effects_on({"NCCL_CUMEM_ENABLE": "0"}, (*LAUNCH, "--enable-symm-mem"))

    assert "writes 1 over it (--enable-symm-mem)" in effect.message


def test_effects_of_an_older_sglang_are_its_own() -> None:
    (effect,) = effects_on({"NCCL_GRAPH_REGISTER": "1"}, LAUNCH, version="0.5.15.post1")

    assert effect.kind is EffectKind.UNTOUCHED


def test_effects_under_another_program_are_refused() -> None:
    with pytest.raises(UsageProblem, match="not an SGLang launch"):
        effects_on({}, ("vllm", "serve"))
