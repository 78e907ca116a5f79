"""Expect: what pytest offers, for scenarios, without the time that importing pytest takes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[None]:
    """What ``pytest.raises`` does."""
    try:
        yield
    except kind as error:
        if not re.search(match, str(error)):
            raise
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
