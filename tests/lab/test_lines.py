"""Lines: whole ones only, however the bytes arrive."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.lab.lines import ErrorTail, LineSplitter

CHAINED = """\
Traceback (most recent call last):
ValueError: an old one, caught and printed
Traceback (most recent call last):
  File "a.py", line 1
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3
RuntimeError: b"""


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))), st.integers(1, 7))
def test_lines_do_not_depend_on_how_bytes_arrive(lines: list[str], size: int) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    splitter = LineSplitter()
    seen = [line for start in range(0, len(data), size) for line in splitter.feed(data[start : start + size])]
    assert seen + splitter.flush() == lines


def test_progress_bars_and_windows_line_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r20%\r") == ["10%"]
    assert splitter.feed(b"\nrest\r") == ["20%"]
    assert splitter.flush() == ["rest"]


def test_a_line_without_end_is_cut() -> None:
    assert len(LineSplitter().feed(b"x" * ((1 << 22) + 1))) == 1


def test_bytes_that_are_no_text() -> None:
    assert LineSplitter().feed(b"\xff\n") == ["\ufffd"]


def test_traceback_comes_with_its_chain_and_no_older_one() -> None:
    tail = ErrorTail()
    for now, line in enumerate(CHAINED.splitlines()):
        tail.add(line, float(now))
    assert tail.traceback() == "\n".join(CHAINED.splitlines()[2:])
    assert tail.traceback_at == 8.0


def test_without_traceback_the_last_lines() -> None:
    tail = ErrorTail()
    for number in range(30):
        tail.add(f"line {number}", 0.0)
    assert tail.traceback().splitlines() == [f"line {number}" for number in range(10, 30)]
    assert tail.traceback_at is None
