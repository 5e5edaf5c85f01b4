"""StopMatcher against str.find under every way of cutting the text, and the two bugs it exists to avoid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop import MAX_STOP_CHARACTERS, StopMatcher


def first_occurrence(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the occurrence that is complete first, the longest of those that end together."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (min(found)[1], min(found)[0]) if found else None


def longest_suffix_that_begins_a_stop(text: str, stops: list[str]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def stream(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    out = ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out += emitted
        if matched is not None:
            return out, matched
    return out + matcher.flush(), None


# Two letters make overlaps and failed beginnings common; the others are code points of 2, 3 and 4 bytes and a joiner.
SMALL = st.text("ab", max_size=40)
UNICODE = st.text("aé漢👩\u200d\ud800", max_size=30)
CUTS = st.lists(st.integers(0, 1000), max_size=20)


@pytest.mark.parametrize("alphabet", [SMALL, UNICODE], ids=["two letters", "unicode"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_any_chunking_gives_the_text_before_the_first_occurrence(alphabet, include_stop):
    @given(alphabet, st.lists(alphabet.map(lambda s: s[:6]).filter(bool), max_size=5), CUTS)
    def check(text, stops, cuts):
        out, matched = stream(StopMatcher(stops, include_stop=include_stop), pieces_of(text, cuts))
        where = first_occurrence(text, stops)
        if where is None:
            assert (out, matched) == (text, None)
        else:
            start, end = where
            assert matched == text[start:end]
            assert out == text[: end if include_stop else start]

    check()


@given(SMALL, st.lists(SMALL.map(lambda s: s[:6]).filter(bool), max_size=4), CUTS)
def test_holds_back_exactly_the_longest_beginning_of_a_stop(text, stops, cuts):
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces_of(text, cuts):
        emitted, matched = matcher.push(piece)
        if matched is not None:
            return
        seen, out = seen + piece, out + emitted
        held = longest_suffix_that_begins_a_stop(seen, stops)
        assert out == seen[: len(seen) - held]


def test_stop_over_several_tokens_is_seen():
    """llama.cpp#11538: stop "O P Q" in the alphabet, one letter a token."""
    pieces = [f"{c} " for c in "ABCDEFGHIJKLMNOPQRS"]
    assert stream(StopMatcher(["O P Q"]), pieces) == ("A B C D E F G H I J K L M N ", "O P Q")


def test_beginning_of_a_stop_never_leaks():
    """vLLM#3574: stop DEFGHIJ, tokens ABC, DEF, G, HI, J."""
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("ABC", "DEF", "G", "HI")] == [("ABC", None)] + [("", None)] * 3
    assert matcher.push("JKL") == ("", "DEFGHIJ")


def test_text_that_begins_no_stop_is_not_delayed():
    """vLLM#45636: a long stop must not delay other text by its length."""
    matcher = StopMatcher(["<|im_start|>user\n" * 3])
    assert matcher.push("</think>") == ("</think>", None)
    assert matcher.push("a < b <") == ("a < b ", None)
    assert matcher.push("= c") == ("<= c", None)


def test_earliest_end_wins_then_the_longest():
    assert stream(StopMatcher(["abcd", "c"]), ["abcd"]) == ("ab", "c")
    assert stream(StopMatcher(["c", "bc", "abc"]), ["xabc"]) == ("x", "abc")


def test_flush_releases_what_was_held_back_and_starts_afresh():
    matcher = StopMatcher(["\n\nHuman"])
    assert matcher.push("end\n\nHum") == ("end", None)
    assert matcher.flush() == "\n\nHum"
    assert matcher.flush() == ""
    assert matcher.push("an") == ("an", None)


def test_after_a_match_nothing_more_comes_out():
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == ("a ", "stop")
    assert matcher.matched == "stop"
    assert matcher.push("c st") == ("", "stop")
    assert matcher.skip("d") == ""
    assert matcher.flush() == ""


def test_skip_passes_stops_through_and_none_begins_in_it():
    matcher = StopMatcher(["END"])
    assert matcher.push("xE") == ("x", None)
    assert matcher.skip("ND END E") == "END END E"
    assert matcher.push("ND") == ("ND", None)
    assert matcher.push("END") == ("", "END")


def test_no_stops_pass_everything():
    assert stream(StopMatcher([]), ["a", "", "b"]) == ("ab", None)


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_size_of_the_automaton_is_bounded():
    longest = "a" * (MAX_STOP_CHARACTERS - 1)
    assert StopMatcher([longest, "b"]).push(longest) == ("", longest)
    with pytest.raises(ValueError, match="must not be longer"):
        StopMatcher([longest, "bb"])


def test_work_is_linear_for_a_text_that_almost_matches():
    """Counts automaton steps, not seconds: per character at most two (Aho-Corasick's bound), however long the stop."""
    steps = 0

    class Counting(dict):
        def get(self, key, default=None):
            nonlocal steps
            steps += 1
            return super().get(key, default)

    matcher = StopMatcher(["a" * 2000 + "b", "a" * 1000 + "c"])
    matcher._children = [Counting(children) for children in matcher._children]
    text = ("a" * 1999 + "x") * 10
    out = "".join(matcher.push(character)[0] for character in text)
    assert out == text
    assert steps <= 2 * len(text)
