from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.envvars import (
    CATALOGUE,
    PINNED,
    SEARCHED_NAMES,
    Kind,
    Variable,
    canonical,
    check_setting,
    check_settings,
    find_conflict,
    format_reference,
    needs_offer,
    parse_assignment,
    search_domain,
)
from nccltune.envvars.domains import read_as_nccl
from nccltune.errors import UsageProblem

FOLK = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}

REFUSED_VALUES = [
    # sizes and counts: NCCL stops reading at the first character that is no digit
    ("NCCL_BUFFSIZE", "4M", "takes 4 bytes; write 4194304"),
    ("NCCL_BUFFSIZE", "16 MiB", "takes 16 bytes; write 16777216"),
    ("NCCL_BUFFSIZE", "64kb", "takes 64 bytes; write 65536"),
    ("NCCL_BUFFSIZE", "4e6", "reads 4;"),
    ("NCCL_BUFFSIZE", "4194304.0", "reads 4194304;"),
    ("NCCL_BUFFSIZE", "0x400000", "reads it as 4194304"),
    ("NCCL_BUFFSIZE", "04194304", "reads 33;"),
    ("NCCL_BUFFSIZE", "020000000", "reads it as 4194304"),
    ("NCCL_BUFFSIZE", "9" * 30, "cannot hold it"),
    ("NCCL_BUFFSIZE", "4294967296", "overflows"),
    ("NCCL_BUFFSIZE", "1000000", "wrong sums"),
    ("NCCL_BUFFSIZE", "1000", "ranks die"),
    ("NCCL_BUFFSIZE", "32768", "ranks die"),
    ("NCCL_BUFFSIZE", "0", "ranks die"),
    ("NCCL_BUFFSIZE", "-4194304", "ranks die"),
    ("NCCL_NTHREADS", "100", "the maximum, 512"),
    ("NCCL_NTHREADS", "513", "the maximum, 512"),
    ("NCCL_NTHREADS", "480", "wrong sums"),
    ("NCCL_NTHREADS", "96", "write 64, 128, 256 or 512"),
    ("NCCL_NTHREADS", "32", "uses 64 instead"),
    ("NCCL_NTHREADS", "1024", "uses 512 instead"),
    ("NCCL_NTHREADS", "0", "default"),
    ("NCCL_NTHREADS", "-1", "default"),
    ("NCCL_NTHREADS", "eight", "reads 0 without a word"),
    ("NCCL_NTHREADS", "+256", "write 256"),
    ("NCCL_NTHREADS", "256K", "reads 256;"),
    ("NCCL_LL128_NTHREADS", "100", "the maximum, 640"),
    ("NCCL_LL128_NTHREADS", "128", "uses 160 instead"),
    ("NCCL_LL128_NTHREADS", "672", "uses 640 instead"),
    ("NCCL_LL128_NTHREADS", "0", "default"),
    ("NCCL_MIN_CTAS", "0", "ignores it"),
    ("NCCL_MAX_CTAS", "100", "takes 64"),
    ("NCCL_MAX_NCHANNELS", "0", "takes 1"),
    ("NCCL_MAX_NCHANNELS", "65", "takes 64"),
    ("NCCL_CGA_CLUSTER_SIZE", "9", "takes 8"),
    ("NCCL_CGA_CLUSTER_SIZE", "-1", "ignores it"),
    ("NCCL_WORK_FIFO_BYTES", "1000", "another size"),
    # switches
    ("NCCL_P2P_DISABLE", "true", "reads 0 without a word; write 0 or 1"),
    ("NCCL_P2P_DISABLE", "2", "no meaning"),
    ("NCCL_SHM_LOCALITY", "3", "takes 2"),
    ("NCCL_NVLS_ENABLE", "1", "--enable-nccl-nvls"),
    ("NCCL_CTA_POLICY", "EFFICIENCY", "reads 0"),
    ("NCCL_LAUNCH_MODE", "group", "PARALLEL or GROUP"),
    ("NCCL_SYM_KERNEL", "AllReduce", "off"),
    # path levels are case-sensitive, and unknown ones are ignored
    ("NCCL_P2P_LEVEL", "NODE", "ignores it without a word"),
    ("NCCL_P2P_LEVEL", "sys", "write SYS"),
    ("NCCL_P2P_LEVEL", "4", "write SYS"),
    ("NCCL_P2P_LEVEL", "1", "write PIX"),
    # lists
    ("NCCL_PROTO", "bogus", "refuses the name 'bogus'"),
    ("NCCL_PROTO", "LL, Simple", "blanks"),
    ("NCCL_PROTO", "^LL", "LL128 too"),
    ("NCCL_PROTO", "allreduce:^Simple", "LL128 too"),
    ("NCCL_PROTO", "LL128", "write allreduce:LL128"),
    ("NCCL_PROTO", "LL,LL128", "write allreduce:LL128"),
    ("NCCL_PROTO", "LL,,Simple", "empty place"),
    ("NCCL_PROTO", "allreduce:", "empty place"),
    ("NCCL_PROTO", "LL;", "prefix for every entry"),
    ("NCCL_PROTO", "allreduce:LL;Simple", "prefix for every entry"),
    ("NCCL_PROTO", "all_reduce:LL", "refuses the prefix 'all_reduce'"),
    ("NCCL_PROTO", ":LL", "refuses the prefix"),
    ("NCCL_PROTO", "allreduce:LL;AllReduce:Simple", "twice"),
    ("NCCL_ALGO", "Tree", "write allreduce:Tree"),
    ("NCCL_ALGO", "NVLS", "write allreduce:Ring"),
    ("NCCL_ALGO", "^Ring", "not named"),
    ("NCCL_ALGO", "allreduce:CollnetDirect", "stops at the first"),
    ("NCCL_ALGO", "allreduce:NVLS", "without NVLink multicast"),
    ("NCCL_ALGO", "allreduce:Ring;broadcast:Tree", "write broadcast:Ring"),
    ("NCCL_ALGO", "allreduce:Rings", "refuses the name 'Rings'"),
    # thresholds
    ("NCCL_THREAD_THRESHOLDS", "8", "only 1 numbers"),
    ("NCCL_THREAD_THRESHOLDS", "-2 -2 -2 4 -2", "only 5 numbers"),
    ("NCCL_THREAD_THRESHOLDS", "-2 -2 -2 4 -2 -2 -2", "after the sixth"),
    ("NCCL_THREAD_THRESHOLDS", "-2,-2,-2,4,-2,-2", "stops reading"),
    ("NCCL_THREAD_THRESHOLDS", "-2 -2 -2 4K -2 -2", "stops reading in '4K'"),
    ("NCCL_THREAD_THRESHOLDS", "-2 -2 -2 100000 -2 -2", "overflows"),
    # what would break the files that hold values
    ("NCCL_PROTO", "", "leave the variable out"),
    ("NCCL_ALGO", '"Ring"', "write Ring"),
    ("NCCL_ALGO", "'Ring'", "write Ring"),
    ("NCCL_PROTO", "LL # small", "comment"),
    ("NCCL_PROTO", "LL ", "write LL"),
    ("NCCL_PROTO", "LL\n", "line break"),
    ("NCCL_PROTO", "LL\nLD_PRELOAD=/x.so", "line break"),
    ("NCCL_PROTO", "LL\x00", "line break"),
    ("NCCL_PROTO", "\uff2c\uff2c", "printable ASCII"),
    ("NCCL_NTHREADS", "\u0666\u0664", "printable ASCII"),
    ("NCCL_PROTO", "LL" * 512, "1024 characters"),
]

ACCEPTED_VALUES = [
    ("NCCL_PROTO", "LL"),
    ("NCCL_PROTO", "ll,simple"),
    ("NCCL_PROTO", "allreduce:LL128"),
    ("NCCL_PROTO", "AllReduce:LL;AllGather:Simple"),
    ("NCCL_PROTO", "LL,Simple;allreduce:LL"),
    ("NCCL_ALGO", "Ring"),
    ("NCCL_ALGO", "ring,tree"),
    ("NCCL_ALGO", "allreduce:Tree"),
    ("NCCL_ALGO", "allreduce:tree,NVLS"),
    ("NCCL_ALGO", "Ring;allreduce:Tree"),
    ("NCCL_THREAD_THRESHOLDS", "-2 -2 -2 4 -2 -2"),
    ("NCCL_THREAD_THRESHOLDS", "0 8 64 99999 -1 -2"),
    ("NCCL_NTHREADS", "64"),
    ("NCCL_LL128_NTHREADS", "160"),
    ("NCCL_BUFFSIZE", "65536"),
    ("NCCL_BUFFSIZE", "1073741824"),
    ("NCCL_MIN_CTAS", "64"),
    ("NCCL_MAX_CTAS", "1"),
    ("NCCL_CGA_CLUSTER_SIZE", "0"),
    ("NCCL_P2P_LEVEL", "SYS"),
    ("NCCL_P2P_LEVEL", "PXN"),
    ("NCCL_P2P_DISABLE", "0"),
    ("NCCL_SHM_LOCALITY", "1"),
    ("NCCL_CUMEM_ENABLE", "0"),
    ("NCCL_CUMEM_HOST_ENABLE", "-1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_SYM_KERNEL", "AllReduce_AGxLL_R"),
    ("NCCL_SYM_CTAS", "0"),
    ("NCCL_WORK_FIFO_BYTES", "1048576"),
]

FORBIDDEN_NAMES = [
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_GRAPH_STREAM_ORDERING",
    "NCCL_CHUNK_SIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_IGNORE_DISABLED_P2P",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_FILE",
    "NCCL_CONF_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_TUNER_PLUGIN",
    "NCCL_NET_PLUGIN",
    "NCCL_ENV_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_MIN_NRINGS",
    "NCCL_NCHANNELS_PER_PEER",
]


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED_VALUES)
def test_check_setting_with_a_value_nccl_would_change_says_so_in_one_line(
    name: str, value: str, reason: str
) -> None:
    with pytest.raises(UsageProblem) as refusal:
        check_setting(name, value)

    message = str(refusal.value)
    assert refusal.value.code == "bad_value"
    assert message.startswith(f"{name}=")
    assert reason in message
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize(("name", "value"), ACCEPTED_VALUES)
def test_check_setting_with_a_value_nccl_follows_passes(name: str, value: str) -> None:
    check_setting(name, value)


@pytest.mark.parametrize("name", FORBIDDEN_NAMES)
@pytest.mark.parametrize("is_unsafe", [False, True])
def test_check_setting_of_a_forbidden_variable_is_refused_whatever_the_value(
    name: str, is_unsafe: bool
) -> None:
    with pytest.raises(UsageProblem, match=f"^{name} is never set") as refusal:
        check_setting(name, "1", is_unsafe=is_unsafe)

    assert refusal.value.code == "forbidden_variable"
    assert CATALOGUE[name].reason in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("NCCL_PROTOO", "did you mean NCCL_PROTO?"),
        ("NCCL_NTHREAD", "did you mean NCCL_NTHREADS?"),
        ("nccl_proto", "write NCCL_PROTO"),
        ("NCCL_TELEPORT", "remove it"),
        ("LD_PRELOAD", "not an NCCL variable"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "not an NCCL variable"),
        ("", "not an NCCL variable"),
        ("NCCL_PROTO\nX", "remove it|did you mean"),
    ],
)
@pytest.mark.parametrize("is_unsafe", [False, True])
def test_check_setting_of_an_unknown_variable_is_refused(
    name: str, advice: str, is_unsafe: bool
) -> None:
    with pytest.raises(UsageProblem, match=advice.replace("?", r"\?")) as refusal:
        check_setting(name, "LL", is_unsafe=is_unsafe)

    assert refusal.value.code == "unknown_variable"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_BUFFSIZE", "1000"),
        ("NCCL_PROTO", "bogus"),
        ("NCCL_ALGO", "allreduce:CollnetDirect"),
        ("NCCL_NTHREADS", "513"),
    ],
)
def test_check_setting_unsafe_lets_someone_watch_nccl_fail(name: str, value: str) -> None:
    check_setting(name, value, is_unsafe=True)


@pytest.mark.parametrize("value", ["", '"LL"', "LL\nX=1", "L" * 1024, " LL"])
def test_check_setting_unsafe_still_refuses_what_breaks_files(value: str) -> None:
    with pytest.raises(UsageProblem):
        check_setting("NCCL_PROTO", value, is_unsafe=True)


def test_check_settings_of_the_folk_profile_passes() -> None:
    check_settings(FOLK)


@pytest.mark.parametrize(
    ("settings", "blamed", "reason"),
    [
        ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "8"}, "NCCL_MIN_CTAS", "takes 8 for both"),
        ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_NCHANNELS": "9"}, "NCCL_MIN_CTAS", "takes 9"),
        ({"NCCL_MIN_NCHANNELS": "4", "NCCL_MIN_CTAS": "4"}, "NCCL_MIN_NCHANNELS", "the same as"),
        ({"NCCL_MAX_CTAS": "4", "NCCL_MAX_NCHANNELS": "8"}, "NCCL_MAX_NCHANNELS", "the same as"),
        (
            {"NCCL_ALGO": "allreduce:Ring", "NCCL_PROTO": "LL"},
            "NCCL_PROTO",
            "write allreduce:LL",
        ),
    ],
)
def test_check_settings_that_contradict_each_other_are_refused(
    settings: dict[str, str], blamed: str, reason: str
) -> None:
    with pytest.raises(UsageProblem, match=reason) as refusal:
        check_settings(settings)

    assert refusal.value.code == "conflict"
    assert str(refusal.value).startswith(f"{blamed}=")
    conflict = find_conflict(settings)
    assert conflict is not None
    assert conflict[0] == blamed


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"},
        {"NCCL_ALGO": "allreduce:Tree", "NCCL_PROTO": "allreduce:LL"},
        {"NCCL_ALGO": "Ring", "NCCL_PROTO": "allreduce:LL"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"},
    ],
)
def test_check_settings_that_fit_pass(settings: dict[str, str]) -> None:
    check_settings(settings)


def test_check_settings_unsafe_keeps_refusing_two_names_for_one_number() -> None:
    check_settings({"NCCL_MIN_CTAS": "no", "NCCL_MAX_CTAS": "8"}, is_unsafe=True)

    with pytest.raises(UsageProblem, match="the same as"):
        check_settings({"NCCL_MAX_CTAS": "4", "NCCL_MAX_NCHANNELS": "4"}, is_unsafe=True)


def test_check_settings_stops_at_the_first_bad_one() -> None:
    with pytest.raises(UsageProblem, match="NCCL_NTHREADS=100"):
        check_settings({"NCCL_PROTO": "LL", "NCCL_NTHREADS": "100"})


def test_canonical_of_the_folk_profile_uses_newer_names_and_prefixes() -> None:
    assert canonical(FOLK) == {
        "NCCL_ALGO": "allreduce:Ring",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_MAX_CTAS": "16",
        "NCCL_NTHREADS": "512",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_PROTO": "allreduce:LL",
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"NCCL_PROTO": "ll"}, {"NCCL_PROTO": "allreduce:LL"}),
        ({"NCCL_PROTO": "Simple,LL"}, {"NCCL_PROTO": "AllReduce:ll,simple,LL"}),
        ({"NCCL_ALGO": "Ring;allreduce:Tree"}, {"NCCL_ALGO": "allreduce:tree"}),
        ({"NCCL_MIN_NCHANNELS": "8"}, {"NCCL_MIN_CTAS": "8"}),
        ({"NCCL_MAX_CTAS": "8", "NCCL_MAX_NCHANNELS": "16"}, {"NCCL_MAX_CTAS": "8"}),
        ({"NCCL_MIN_CTAS": "8", "NCCL_MIN_NCHANNELS": "16"}, {"NCCL_MIN_CTAS": "16"}),
        ({"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 -2 -2 -2"}, {}),
        (
            {"NCCL_THREAD_THRESHOLDS": "-1  -2 -7 4 -2 -2"},
            {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"},
        ),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "1"}),
    ],
)
def test_canonical_of_settings_with_the_same_effect_is_the_same(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}),
        ({"NCCL_PROTO": "allreduce:LL"}, {"NCCL_PROTO": "allreduce:LL;broadcast:LL"}),
        ({"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 0 -2 -2"}, {}),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "0"}),
    ],
)
def test_canonical_of_settings_with_another_effect_differs(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    "settings",
    [{}, FOLK, {"NCCL_PROTO": "bogus"}, {"NCCL_MAX_NCHANNELS": "many"}, {"OTHER": ""}],
)
def test_canonical_twice_changes_nothing_and_never_the_argument(
    settings: dict[str, str],
) -> None:
    before = dict(settings)

    once = canonical(settings)

    assert canonical(once) == once
    assert list(once) == sorted(once)
    assert settings == before


def test_canonical_of_proposals_stays_acceptable_and_distinct() -> None:
    for name in SEARCHED_NAMES:
        forms = [canonical({name: choice}) for choice in search_domain(name)]
        for form in forms:
            check_settings(form)
        assert len({str(form) for form in forms}) == len(forms)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NCCL_PROTO=LL", ("NCCL_PROTO", "LL")),
        ("NCCL_PROTO=", ("NCCL_PROTO", "")),
        ("NCCL_DEBUG_FILE=/a=b", ("NCCL_DEBUG_FILE", "/a=b")),
        ("NCCL_THREAD_THRESHOLDS=-2 -2", ("NCCL_THREAD_THRESHOLDS", "-2 -2")),
    ],
)
def test_parse_assignment_splits_at_the_first_equals(text: str, expected: tuple[str, str]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("NCCL_PROTO", "write NAME=VALUE"),
        ("", "write NAME=VALUE"),
        ("=LL", "write NAME=VALUE"),
        ("export NCCL_PROTO=LL", "write NCCL_PROTO=VALUE without export"),
        (" NCCL_PROTO=LL", "write NCCL_PROTO=VALUE"),
        ("NCCL_PROTO =LL", "write NCCL_PROTO=VALUE"),
        ("NCCL\nPROTO=LL", "is no variable name"),
    ],
)
def test_parse_assignment_of_anything_else_says_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(UsageProblem, match=advice) as refusal:
        parse_assignment(text)

    assert refusal.value.code == "bad_assignment"
    assert "\n" not in str(refusal.value)


def test_search_domain_of_thresholds_changes_one_place_at_a_time() -> None:
    choices = search_domain("NCCL_THREAD_THRESHOLDS")

    assert "-2 -2 -2 4 -2 -2" in choices
    assert "32 -2 -2 -2 -2 -2" in choices
    assert all(choice.split().count("-2") == 5 for choice in choices)


@pytest.mark.parametrize("name", ["NCCL_PROTO", "NCCL_ALGO"])
def test_search_domain_of_lists_always_has_the_prefix(name: str) -> None:
    assert all(choice.startswith("allreduce:") for choice in search_domain(name))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("NCCL_NVLS_ENABLE", "not_searched"),
        ("NCCL_MAX_NCHANNELS", "not_searched"),
        ("NCCL_GRAPH_MIXING_SUPPORT", "forbidden_variable"),
        ("NCCL_NOTHING", "unknown_variable"),
    ],
)
def test_search_domain_of_other_variables_is_refused(name: str, code: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        search_domain(name)

    assert refusal.value.code == code


def test_search_domain_never_holds_a_pinned_variable() -> None:
    assert not set(SEARCHED_NAMES) & set(PINNED)
    for name in ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_GRAPH_REGISTER", "NCCL_WIN_ENABLE"):
        assert PINNED[name]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"NCCL_PROTO": "allreduce:LL128"}, ("NCCL_PROTO",)),
        ({"NCCL_PROTO": "allreduce:LL,ll128"}, ("NCCL_PROTO",)),
        ({"NCCL_PROTO": "allreduce:LL"}, ()),
        ({"NCCL_PROTO": "bogus"}, ()),
        ({}, ()),
    ],
)
def test_needs_offer_names_ll128_only(settings: dict[str, str], expected: tuple[str, ...]) -> None:
    assert needs_offer(settings) == expected


@pytest.mark.parametrize("variable", CATALOGUE.values(), ids=lambda variable: variable.name)
def test_catalogue_entry_is_complete_for_its_kind(variable: Variable) -> None:
    assert CATALOGUE[variable.name] is variable
    assert variable.name.startswith("NCCL_")
    assert variable.summary.endswith(".")
    assert variable.reason
    assert (variable.check is None) == (variable.kind is Kind.FORBIDDEN)
    assert (variable.choices is not None) == (variable.kind is Kind.SEARCHED)
    if variable.kind is not Kind.FORBIDDEN:
        assert variable.domain
        assert variable.default
    for text in (variable.summary, variable.reason, variable.domain, variable.sglang):
        assert "|" not in text
        assert "\n" not in text
    for choice in variable.choices or ():
        check_setting(variable.name, choice)


@pytest.mark.parametrize(
    ("name", "version", "exists"),
    [
        ("NCCL_SYM_NOWIN_ENABLE", "2.28.9", False),
        ("NCCL_SYM_NOWIN_ENABLE", "2.29.2", True),
        ("NCCL_SYM_NOWIN_ENABLE", "2.29.2-1", True),
        ("NCCL_SHM_USE_CUDA_MEMCPY", "2.28.9", True),
        ("NCCL_SHM_USE_CUDA_MEMCPY", "2.30.7", False),
        ("NCCL_RINGS", "2.4.8", True),
        ("NCCL_RINGS", "2.28.9", False),
        ("NCCL_NTHREADS", "2.31.2", True),
    ],
)
def test_exists_in_knows_first_and_last_versions(name: str, version: str, exists: bool) -> None:
    assert CATALOGUE[name].exists_in(version) is exists


@pytest.mark.parametrize(
    ("text", "number"),
    [("4M", 4), ("0x10", 16), ("010", 8), ("eight", 0), ("-5x", -5), ("", 0), ("08", 0)],
)
def test_read_as_nccl_reads_as_strtoll_does(text: str, number: int) -> None:
    assert read_as_nccl(text) == number


def test_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "variables.md"

    assert page.read_text(encoding="utf-8") == format_reference(), (
        "write it again: python -c 'import pathlib; from nccltune.envvars import format_reference;"
        ' pathlib.Path("docs/variables.md").write_text(format_reference())\''
    )
