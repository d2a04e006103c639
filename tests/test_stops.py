"""Stop strings, wherever the borders of the tokens fall."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshpipe.pipeline.stops import StopStrings

letters = st.text("ab", max_size=24)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(text=letters, wanted=stops, cuts=st.lists(st.integers(0, 24), max_size=8))
def test_pieces_give_what_the_whole_text_gives(text: str, wanted: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(wanted)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = ""
    for low, high in pairwise(borders):
        out += matcher.feed(text[low:high])
        assert not any(stop in out for stop in wanted), "nothing of a stop string is ever let through"
        assert text.startswith(out)
    # The first stop string to be complete ends the text, as if it had come letter by letter.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in wanted if stop in text]
    letterwise = StopStrings(wanted)
    expected = "".join(map(letterwise.feed, text)) + ("" if letterwise.stopped else letterwise.finish())
    assert matcher.stopped == bool(ends) == letterwise.stopped
    out += "" if matcher.stopped else matcher.finish()
    if not ends:
        assert out == text == expected
    elif len({start for _, start in ends}) == 1:
        assert out == expected


@given(text=letters, wanted=stops)
def test_what_is_held_back_could_become_a_stop_string(text: str, wanted: list[str]) -> None:
    matcher = StopStrings(wanted)
    out = "".join(map(matcher.feed, text))
    if not matcher.stopped:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in wanted)
        assert matcher.finish() == held
