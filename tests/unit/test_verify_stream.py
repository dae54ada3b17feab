"""Streams of SGLang: however the bytes come, and whatever is wrong with them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from nccltune.errors import ServerError
from nccltune.verify.load.prompts import count_words, long_prompt, short_prompt
from nccltune.verify.load.stream import EventSplitter, read_events, stream_of
from nccltune.verify.model import Chunk, Stream

DONE = b"data: [DONE]\n\n"


def event(tokens: int, *, text: str | None = None, **meta: Any) -> bytes:
    """Return one event as SGLang writes it, with its text so far."""
    content = {
        "text": "word " * tokens if text is None else text,
        "output_ids": [100] * tokens,
        "meta_info": {
            "id": "a",
            "finish_reason": None,
            "prompt_tokens": 7,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            **meta,
        },
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def ending(tokens: int, **meta: Any) -> bytes:
    return event(tokens, **{"finish_reason": {"type": "length", "length": tokens}, **meta}) + DONE


def split(*reads: bytes | tuple[float, bytes]) -> EventSplitter:
    """Feed reads, the first at 1 s and each a second later where no moment is given."""
    splitter = EventSplitter()
    for idx, read in enumerate(reads):
        at_s, data = read if isinstance(read, tuple) else (1.0 + idx, read)
        splitter.feed(data, at_s)
    return splitter


def stream(*reads: bytes, tokens: int = 4) -> Stream:
    return stream_of(split(*reads), tokens=tokens)


def code_of(*reads: bytes, tokens: int = 4) -> str:
    with pytest.raises(ServerError) as raised:
        stream(*reads, tokens=tokens)
    return raised.value.code


def test_stream_is_what_the_server_counts() -> None:
    found = stream(event(1), event(3), ending(4, prompt_tokens=9, cached_tokens=2))

    assert found == Stream(
        prompt_tokens=9,
        tokens=4,
        duration_s=3.0,
        chunks=(Chunk(1.0, 1), Chunk(2.0, 3), Chunk(3.0, 4)),
        cached_tokens=2,
    )


def test_events_without_new_tokens_are_no_chunks() -> None:
    found = stream(event(0), event(1), event(1), event(4), ending(4))

    assert found.chunks == (Chunk(2.0, 1), Chunk(4.0, 4))
    assert found.duration_s == 5.0


def test_events_of_one_read_share_its_moment() -> None:
    found = stream(event(1) + event(2) + event(3), ending(4))

    assert [chunk.at_s for chunk in found.chunks] == [1.0, 1.0, 1.0, 2.0]


def test_event_in_pieces_has_the_moment_of_its_last() -> None:
    data = event(1)

    splitter = split((1.0, data[:3]), (2.0, data[3:40]), (3.0, data[40:-2]), (4.0, data[-2:]))

    assert [each.at_s for each in splitter.events] == [4.0]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_between_reads_change_nothing_but_moments(seed: int) -> None:
    random_ = random.Random(seed)
    data = event(1) + b": ping\r\n\r\n" + event(2).replace(b"\n", b"\r\n") + ending(4)
    cuts = sorted(random_.sample(range(1, len(data)), 12))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    splitter = split(*parts)

    assert splitter.done_at_s is not None
    assert [each.content for each in splitter.events] == [
        each.content for each in split(data).events
    ]
    assert stream_of(splitter, tokens=4).chunks[-1].tokens == 4


def test_text_is_not_kept_and_cannot_pass_for_the_counts() -> None:
    text = '"meta_info": {"completion_tokens": 99}, data: [DONE]\n\ndata: x \\" \u2028' * 50

    splitter = split(event(2, text=text))

    assert splitter.done_at_s is None
    (kept,) = splitter.events
    assert len(kept.content) < 200
    assert read_events(splitter.events).tokens == 2


def test_counts_before_the_text_are_found_too() -> None:
    content = json.dumps({"meta_info": {"completion_tokens": 2}, "text": "a"}).encode()

    assert read_events(split(b"data: " + content + b"\n").events).tokens == 2


def test_bytes_after_the_end_mark_are_not_looked_at() -> None:
    assert stream(ending(4) + b"rubbish\n", b"more\n").tokens == 4


@pytest.mark.parametrize(
    "names",
    [
        {"spec_accept_length": 2.0, "spec_correct_drafts_histogram": [1, 0, 1]},
        {"spec_accept_length": 2.0, "spec_accept_histogram": [1, 0, 1]},
        {"spec_accept_histogram": [1, 0, 1]},
    ],
    ids=["new names", "old names", "no length"],
)
def test_speculation_is_read_as_the_server_says(names: dict[str, Any]) -> None:
    found = stream(event(2), ending(4, spec_verify_ct=2, spec_accept_rate=0.5, **names))

    assert (found.verify_count, found.accept_length, found.accept_rate) == (2, 2.0, 0.5)
    assert found.accept_by_position == (1, 0, 1)
    assert found.ms_per_verify == pytest.approx(1000.0)


def test_no_verify_step_is_no_speculation() -> None:
    assert stream(ending(4, spec_verify_ct=0)).verify_count is None


def speculative(steps: Sequence[int], *, first: int, wanted: int, step_s: float) -> Stream:
    """Return the stream of a server whose verify steps bring so many tokens each.

    Args:
        steps: tokens of each verify step; the last may propose more than is wanted.
        first: verify steps whose tokens came together with the prefill's token.
        step_s: seconds of each step.
    """
    counts = [1]
    for taken in steps:
        counts.append(min(wanted, counts[-1] + taken))
    said = {"spec_verify_ct": len(steps), "spec_accept_length": wanted / len(steps)}
    reads = [(1.0 + step_s * k, event(counts[k])) for k in range(first, len(steps))]
    last = (1.0 + step_s * len(steps), ending(wanted, **said))
    return stream_of(split(*reads, last), tokens=wanted)


@pytest.mark.parametrize("wanted", [8, 20, 40, 500])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("first", [0, 1])
def test_time_of_a_step_is_exact_for_short_answers_and_long_ones(
    wanted: int, length: int, first: int
) -> None:
    count = -(-(wanted - 1) // length)
    if count - first < 1:
        pytest.skip("no step is left to be timed")

    found = speculative([length] * count, first=first, wanted=wanted, step_s=0.010)

    assert found.verify_count == count
    assert found.decode_steps == count - first
    assert found.ms_per_verify == pytest.approx(10.0)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("first", [0, 1])
def test_time_of_a_step_is_exact_whatever_is_accepted(seed: int, first: int) -> None:
    steps: list[int] = []
    source = random.Random(seed)
    while sum(steps) < 59:
        steps.append(source.choice((1, 2, 2, 3, 4)))

    found = speculative(steps, first=first, wanted=60, step_s=0.010)

    assert found.decode_steps == len(steps) - first
    assert found.ms_per_verify == pytest.approx(10.0)


def test_steps_that_one_read_brought_with_the_first_token_are_not_timed() -> None:
    later = [(1.0 + 0.010 * k, event(1 + 2 * k)) for k in range(3, 10)]
    last = (1.10, ending(20, spec_verify_ct=10))

    found = stream_of(split((1.02, event(1) + event(3) + event(5)), *later, last), tokens=20)

    assert found.decode_steps == 8
    assert found.ms_per_verify == pytest.approx(10.0)


def test_time_of_a_token_is_exact_without_speculation() -> None:
    reads = [(1.0 + 0.010 * k, event(1 + k)) for k in range(5)]

    found = stream_of(split(*reads, (1.05, ending(6))), tokens=6)

    assert found.ms_per_verify == pytest.approx(10.0)


def test_all_steps_in_the_first_chunk_leave_no_time_of_a_step() -> None:
    assert stream(event(3), ending(4, spec_verify_ct=1)).ms_per_verify is None


LIES: dict[str, dict[str, Any]] = {
    "length too high": {"spec_verify_ct": 10, "spec_accept_length": 4.0},
    "length too low": {"spec_verify_ct": 10, "spec_accept_length": 1.0},
    "length below nothing": {"spec_verify_ct": 10, "spec_accept_length": -2.0},
    "one step": {"spec_verify_ct": 1},
    "few steps": {"spec_verify_ct": 5, "spec_accept_length": 4.0},
    "more steps than tokens": {"spec_verify_ct": 100_000},
}


@pytest.mark.parametrize("said", LIES.values(), ids=LIES)
def test_counts_that_contradict_each_other_are_no_number(said: dict[str, Any]) -> None:
    pieces = [event(1 + 2 * k) for k in range(10)]

    with pytest.raises(ServerError, match="contradict each other") as raised:
        stream(*pieces, ending(20, **said), tokens=20)

    assert raised.value.code == "bad_speculation"


@pytest.mark.parametrize("said", [2.0, 2, "2", None, True], ids=repr)
def test_accept_length_is_tokens_over_verify_steps(said: object) -> None:
    pieces = [event(1 + 2 * k) for k in range(10)]

    found = stream(
        *pieces,
        ending(20, spec_verify_ct=10, spec_accept_length=said, spec_accept_rate=55.0),
        tokens=20,
    )

    assert (found.accept_length, found.accept_rate) == (2.0, None)


def test_count_beyond_reason_is_none() -> None:
    assert code_of(ending(4, completion_tokens=10**400)) == "no_usage"
    assert stream(ending(4, spec_verify_ct=10**400)).verify_count is None


def test_count_is_told_at_a_glance_while_the_stream_runs() -> None:
    assert EventSplitter().last_count() == 0
    assert split(event(1), event(3, text='"completion_tokens": 99')).last_count() == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "2", True, None])
def test_figures_that_are_none_are_left_out(value: object) -> None:
    found = stream(ending(4, spec_accept_rate=value, spec_accept_histogram=[value]))

    assert found.accept_rate is None
    assert found.accept_by_position == ()


@pytest.mark.parametrize(
    ("meta", "tokens", "code"),
    [
        ({"finish_reason": {"type": "stop", "matched": 2}}, 2, "fewer_tokens"),
        ({"finish_reason": {"type": "length", "length": 2}}, 2, "fewer_tokens"),
        ({"finish_reason": {"type": "stop", "matched": 2}}, 0, "zero_tokens"),
        ({"finish_reason": {"type": "length", "length": 5}}, 5, "more_tokens"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, 4, "nan_stop"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, 2, "nan_stop"),
        ({"finish_reason": {"type": "stop", "matched": 2}}, 4, "stopped"),
        ({"finish_reason": {"type": "abort", "message": "no memory"}}, 2, "stopped"),
        ({"finish_reason": None}, 4, "stopped"),
        ({"prompt_tokens": None}, 4, "no_usage"),
        ({"completion_tokens": None}, 4, "no_usage"),
        ({"completion_tokens": True}, 4, "no_usage"),
        ({"completion_tokens": -4}, 4, "no_usage"),
        ({"completion_tokens": "4"}, 4, "no_usage"),
    ],
)
def test_answer_that_is_not_as_asked_is_an_error(
    meta: dict[str, Any], tokens: int, code: str
) -> None:
    assert code_of(ending(tokens, **meta)) == code


def test_reason_of_an_end_is_told() -> None:
    with pytest.raises(ServerError, match=r"'abort' \(message no memory\)"):
        stream(ending(2, finish_reason={"type": "abort", "message": "no memory"}))


def test_end_mark_without_events_is_no_answer() -> None:
    assert code_of(DONE) == "zero_tokens"


def test_tokens_that_become_fewer_are_no_count() -> None:
    assert code_of(event(3), event(2), ending(4)) == "bad_stream"


@pytest.mark.parametrize(
    "error", [{"message": "too long", "code": 400}, "too long", ["too long"]], ids=repr
)
def test_error_within_a_stream_is_told(error: object) -> None:
    line = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"

    with pytest.raises(ServerError, match="too long") as raised:
        stream(event(1), line, DONE)

    assert raised.value.code == "error_in_stream"


@pytest.mark.parametrize(
    "line",
    [
        b"<html>not found</html>\n",
        b'{"text": "no stream"}\n',
        b"data: {\n",
        b"data: []\n",
        b"data: 7\n",
        b"data: {}\n",
        b'data: {"meta_info": 3}\n',
        b"data: " + b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
    ids=lambda line: repr(line[:30]),
)
def test_what_is_no_event_of_sglang_is_refused(line: bytes) -> None:
    with pytest.raises(ServerError) as raised:
        stream(line, DONE)

    assert raised.value.code == "bad_stream"
    assert len(str(raised.value)) < 1000


def test_line_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccltune.verify.load.stream._MAX_LINE_BYTES", 1000)

    with pytest.raises(ServerError) as raised:
        split(*[b"data: {" + b"x" * 99] * 11)

    assert raised.value.code == "bad_stream"


def test_read_events_says_what_came_of_an_unfinished_answer() -> None:
    answer = read_events(split(event(1), event(3)).events)

    assert (answer.tokens, answer.chunks) == (3, (Chunk(1.0, 1), Chunk(2.0, 3)))
    assert read_events(()).tokens == 0


def prefixes(prompts: Sequence[str], word_count: int) -> set[str]:
    return {" ".join(prompt.split()[:word_count]) for prompt in prompts}


def test_prompts_differ_within_their_first_words() -> None:
    short = [short_prompt(series, k) for series in ("Chapter", "Draft") for k in range(100)]
    long = [long_prompt("Book", k, 3000) for k in range(100)]

    assert len(prefixes([*short, *long], 2)) == 300
    assert len({prompt.split(" ", 2)[2] for prompt in long}) > 30


def test_short_prompts_are_short() -> None:
    counts = [count_words(short_prompt("Chapter", k)) for k in range(100)]

    assert min(counts) > 10
    assert max(counts) < 35


@pytest.mark.parametrize("word_count", [1, 9, 3000, 10_000])
def test_long_prompt_has_the_words_asked_for(word_count: int) -> None:
    prompt = long_prompt("Book", 3, word_count)

    assert count_words(prompt) == max(word_count, 6)
    assert prompt.endswith("Tell what happens next.")
    assert len(set(prompt.split())) > min(word_count, 8000) / 8
