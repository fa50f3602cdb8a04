from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.text.stop_strings import StopStrings


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("abc", max_size=3), max_size=12))
def test_no_part_of_a_stop_string_leaks(stops, pieces):
    state = StopStrings(stops)
    out = ""
    for piece in pieces:
        out += state.add(piece)
        if state.matched:
            break
    else:
        out += state.end()
    text = "".join(pieces)
    found = min((text.find(stop) for stop in stops if stop in text), default=-1)
    assert state.matched == (found >= 0)
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    if not state.matched:
        assert out == text


def test_text_that_cannot_begin_a_stop_string_is_sent_at_once():
    state = StopStrings(["</end>"])
    assert state.add("hello <") == "hello "
    assert state.add("/en") == ""
    assert state.add("ough") == "</enough"
    assert state.add("</e") == ""
    assert state.add("nd> more") == ""
    assert state.matched
