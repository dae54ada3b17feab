from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.errors import FileError, UsageProblem
from nccltune.profile import Profile
from nccltune.sglang.command import parse_launch
from nccltune.verify.arms import make_arms

if TYPE_CHECKING:
    from nccltune.verify.model import Arm

HEAD = "numactl -N 0 python -m sglang.launch_server --model-path m --tp 8"
SPECULATION = (
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
LAUNCH = f"{HEAD} {SPECULATION} --trust-remote-code --cuda-graph-bs 1 2 4"
TREE = LAUNCH.replace("topk 1", "topk 4").replace("tokens 4", "tokens 16")
PROFILES = {
    "active": Profile("best", {"NCCL_PROTO": "allreduce:LL"}),
    "best": Profile("best", {"NCCL_PROTO": "allreduce:LL"}),
    "folk": Profile("folk", {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}),
    "empty": Profile("empty", {}),
    "x/found.json": Profile("found", {"NCCL_NTHREADS": "256"}),
}


def find(word: str) -> Profile:
    if word not in PROFILES:
        raise UsageProblem(f"no profile named {word}", code="no_such_profile")
    return PROFILES[word]


def arms_of(*arms: str, steps: tuple[int, ...] = (), launch: str = LAUNCH) -> tuple[Arm, ...]:
    return make_arms(launch.split(), arms=arms, num_steps=steps, find=find)


def names(found: tuple[Arm, ...]) -> list[str]:
    return [arm.name for arm in found]


def refused(*arms: str, steps: tuple[int, ...] = (), launch: str = LAUNCH) -> UsageProblem:
    with pytest.raises(UsageProblem) as caught:
        arms_of(*arms, steps=steps, launch=launch)
    assert "\n" not in str(caught.value)
    return caught.value


# --- settings


def test_settings_arms_start_the_launch_as_typed() -> None:
    found = arms_of("default", "active", "folk", "x/found.json")

    assert names(found) == ["default", "active", "folk", "found"]
    assert [arm.argv for arm in found] == [tuple(LAUNCH.split())] * 4
    assert [arm.profile for arm in found] == [
        None,
        PROFILES["active"],
        PROFILES["folk"],
        PROFILES["x/found.json"],
    ]
    assert {arm.num_steps for arm in found} == {3}
    assert all(arm.is_speculative for arm in found)


def test_same_again_is_the_baseline_under_another_name() -> None:
    first, again = arms_of("folk", "again")

    assert again.name == "again"
    assert (again.argv, again.profile) == (first.argv, first.profile)


@pytest.mark.parametrize(
    "arms", [("default", "default"), ("active", "best"), ("default", "empty"), ("folk", "folk")]
)
def test_arms_that_are_the_same_are_refused(arms: tuple[str, str]) -> None:
    problem = refused(*arms)

    assert problem.code == "same_arms"
    assert f"--arms {arms[0]},again" in str(problem)


def test_two_arms_of_one_name_are_refused() -> None:
    PROFILES["y/found.json"] = Profile("found", {"NCCL_NTHREADS": "512"})

    assert "two arms are called found" in str(refused("x/found.json", "y/found.json"))


def test_one_arm_is_nothing_to_compare() -> None:
    assert refused("folk").code == "one_arm"
    assert refused().code == "one_arm"


def test_profile_that_is_not_there_is_refused() -> None:
    assert refused("default", "nosuch").code == "no_such_profile"


@pytest.mark.parametrize(
    "text",
    ["python train.py", "docker run image", f"bash -c '{LAUNCH}'", ""],
)
def test_what_is_no_launch_is_refused(text: str) -> None:
    assert refused("default", "folk", launch=text).code == "not_sglang"


@pytest.mark.parametrize("wrapper", ["/opt/bin/nccltune run --", "python -m nccltune launch --"])
def test_launch_through_our_own_routes_is_refused(wrapper: str) -> None:
    assert refused("default", "folk", launch=f"{wrapper} {LAUNCH}").code == "own_wrapper"


def test_launch_over_several_nodes_is_refused_with_the_way_out() -> None:
    problem = refused("default", "folk", launch=f"{LAUNCH} --nnodes 2 --node-rank 0")

    assert problem.code == "several_nodes"
    assert "--url" in str(problem)


# --- steps


def test_steps_and_draft_tokens_are_rewritten_together() -> None:
    found = arms_of(steps=(2, 5))

    assert names(found) == ["2 steps", "5 steps"]
    for arm, steps in zip(found, (2, 5), strict=True):
        command = parse_launch(arm.argv)
        assert (command.num_steps, command.eagle_topk, command.num_draft_tokens) == (
            steps,
            1,
            steps + 1,
        )
        assert arm.num_steps == steps
        assert arm.argv[:9] == tuple(HEAD.split())[:9]
        assert command.flags["cuda_graph_bs_decode"] == ("1", "2", "4")
        assert command.has("trust_remote_code")
        assert command.draft_model_path == "d"
        assert sum("num-steps" in word for word in arm.argv) == 1


@pytest.mark.parametrize(
    "spelling",
    [
        "--speculative-num-steps=3 --speculative-eagle-topk=1 --speculative-num-draft-tokens=4",
        "--speculative_num_steps 3 --speculative-eagle-topk=1 --speculative-num-draft-tokens 4",
    ],
)
def test_steps_are_rewritten_in_every_spelling(spelling: str) -> None:
    launch = f"{HEAD} --speculative-algo EAGLE3 {spelling}"

    (arm, _) = arms_of(steps=(1, 2), launch=launch)

    assert arm.name == "1 step"
    assert arm.argv == (
        *HEAD.split(),
        "--speculative-algo",
        "EAGLE3",
        *("--speculative-num-steps", "1"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "2"),
    )


def test_one_number_of_steps_is_compared_with_the_launch_itself() -> None:
    as_typed, other = arms_of(steps=(5,))

    assert names((as_typed, other)) == ["3 steps", "5 steps"]
    assert as_typed.argv == tuple(LAUNCH.split())


def test_steps_that_sglang_would_choose_have_no_number() -> None:
    launch = f"{HEAD} --speculative-algorithm EAGLE3 --speculative-draft-model-path d"

    as_typed, other = arms_of(steps=(5,), launch=launch)

    assert names((as_typed, other)) == ["as launched", "5 steps"]
    assert as_typed.num_steps is None
    assert parse_launch(other.argv).num_draft_tokens == 6


def test_steps_equal_to_the_launch_are_the_same_arm() -> None:
    assert refused(steps=(3,)).code == "same_arms"
    assert refused(steps=(2, 2)).code == "same_arms"


def test_tree_keeps_its_draft_tokens_where_so_many_steps_can_make_them() -> None:
    one, four = arms_of(steps=(1, 4), launch=TREE)

    assert parse_launch(one.argv).num_draft_tokens == 5  # the root and 4 leaves
    assert one.note == "1 steps with top-k 4 make at most 5 draft tokens, not 16"
    assert parse_launch(four.argv).num_draft_tokens == 16
    assert parse_launch(four.argv).eagle_topk == 4
    assert four.note == ""


def test_steps_of_a_config_file_are_overruled(tmp_path: Path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text(
        "speculative-algorithm: EAGLE3\nspeculative-num-steps: 3\nspeculative-eagle-topk: 1\n"
        "speculative-num-draft-tokens: 4\n"
    )

    found = arms_of(steps=(2, 5), launch=f"{HEAD} --config {config}")

    assert [parse_launch(arm.argv).num_steps for arm in found] == [2, 5]
    assert [parse_launch(arm.argv).num_draft_tokens for arm in found] == [3, 6]


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        (HEAD, "no_speculation"),
        (f"{HEAD} --speculative-algorithm NGRAM", "no_draft_steps"),
        (f"{LAUNCH} --speculative-adaptive", "conflicting_flags"),
    ],
)
def test_steps_of_a_launch_that_has_none_are_refused(launch: str, code: str) -> None:
    assert refused(steps=(2, 5), launch=launch).code == code


def test_no_steps_at_all_is_another_arm() -> None:
    problem = refused(steps=(0, 2))

    assert problem.code == "bad_num_steps"
    assert "no-speculation" in str(problem)


# --- no speculation


def test_every_speculative_flag_is_left_out() -> None:
    default, plain = arms_of("default", "no-speculation")

    assert names((default, plain)) == ["3 steps", "no speculation"]
    assert plain.argv == (*HEAD.split(), "--trust-remote-code", "--cuda-graph-bs", "1", "2", "4")
    assert not plain.is_speculative
    assert plain.num_steps is None


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        ("sglang serve m", ("sglang", "serve", "m")),
        ("sglang serve --model-type llm m", ("sglang", "serve", "--model-type", "llm", "m")),
        (
            "env A=1 python -msglang.launch_server --model-path m",
            ("env", "A=1", "python", "-msglang.launch_server", "--model-path", "m"),
        ),
        (
            "python /x/sglang/launch_server.py --model-path m",
            ("python", "/x/sglang/launch_server.py", "--model-path", "m"),
        ),
    ],
)
def test_program_and_model_stay_however_they_are_written(start: str, kept: tuple[str, ...]) -> None:
    _, plain = arms_of("default", "no-speculation", launch=f"{start} {SPECULATION}")

    assert plain.argv == kept


def test_arms_stand_in_the_order_of_the_words_and_share_the_settings() -> None:
    found = arms_of("no-speculation", "folk", steps=(5, 2))

    assert names(found) == ["no speculation", "5 steps", "2 steps"]
    assert [arm.profile for arm in found] == [PROFILES["folk"]] * 3
    assert names(arms_of("no-speculation", steps=(5,))) == ["no speculation", "5 steps"]
    assert names(arms_of("folk", "no-speculation", "again")) == [
        "3 steps",
        "no speculation",
        "again",
    ]


def test_arms_that_differ_in_two_things_are_refused() -> None:
    assert refused("default", "folk", steps=(2, 5)).code == "two_differences"
    assert refused("default", "folk", "no-speculation").code == "two_differences"


def test_nothing_to_leave_out_is_refused() -> None:
    assert refused("default", "no-speculation", launch=HEAD).code == "no_speculation"


def test_speculation_of_a_config_file_cannot_be_left_out(tmp_path: Path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text("speculative-algorithm: EAGLE3\n")

    problem = refused("default", "no-speculation", launch=f"{HEAD} --config {config}")

    assert problem.code == "config_speculates"
    assert f"{config} sets speculative_algorithm" in str(problem)


def test_config_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        arms_of("default", "folk", launch=f"{HEAD} --config {tmp_path}/no.yaml")


# --- flags that contradict each other


@pytest.mark.parametrize(
    "flags",
    [
        SPECULATION.replace("tokens 4", "tokens 8"),
        SPECULATION.replace("topk 1", "topk 4").replace("tokens 4", "tokens 64"),
        f"{SPECULATION} --speculative-num-steps 5",
        f"{SPECULATION} --speculative-algorithm=NEXTN",
        "--speculative-num-steps 3",
    ],
)
def test_conflicting_flags_are_refused(flags: str) -> None:
    assert refused("default", "folk", launch=f"{HEAD} {flags}").code == "conflicting_flags"


def test_flag_given_twice_with_one_value_is_no_conflict() -> None:
    launch = f"{LAUNCH} --speculative-num-steps=3"

    assert names(arms_of("default", "folk", launch=launch)) == ["default", "folk"]


def test_incomplete_flags_are_refused_as_sglang_does() -> None:
    launch = f"{HEAD} --speculative-algorithm EAGLE3 --speculative-num-steps 3"

    assert refused("default", "folk", launch=launch).code == "bad_launch"
