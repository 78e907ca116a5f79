"""Send window: the messages of one lane over Gloo, posted in the order in which they were asked for, a few at a time.

What everyone sends to everyone concurrently arrives from all sides together: streams crowd each other out in turns, and the
slowest decides. So such operations go in rounds, in each of which every rank sends to one and receives from another one.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gossamer.errors import CommunicationError

Post = Callable[[], Sequence[Any]]
"""Hand something to the transport; returns what to wait for."""

TOGETHER = 2**18
"""Bytes of messages in rounds that may be under way at a time; and two messages, however long they are. Four hosts, 8 to
64 MB at 1 Gbit/s: everything together reaches 0.82 to 0.92 of plain TCP, two messages of 1 MiB 0.91 to 1.00, four of them
0.83 to 0.95; 0.5 MB at 200 Mbit/s 0.72 together, 0.85 so."""


class Message:
    """One part of an operation: what Gloo is told together."""

    __slots__ = ("_post", "_window", "_works", "done", "nbytes")

    def __init__(self, window: "SendWindow", post: Post, nbytes: int) -> None:
        """``nbytes``: what this rank sends with it."""
        self._window, self.nbytes = window, nbytes
        self._post: Post | None = post
        self._works: deque[Any] = deque()
        self.done = False

    @property
    def posted(self) -> bool:
        """Whether the transport has it."""
        return self._post is None

    def post(self) -> None:
        """Hand it to the transport. For its window."""
        assert self._post is not None
        self._works += self._post()
        self._post = None  # not before: a waiter on another thread would find nothing to wait for

    def wait(self) -> None:
        """Block until it is done, and so is, if need be, what has to be posted before it."""
        if self.done:
            return
        try:
            self._window.reach(self)
            self.finish()
        except BaseException as error:
            self._window.clear(error)
            raise
        self._window.go_on()

    def finish(self) -> None:
        """Block until it is done; it is posted."""
        while self._works:
            self._works[0].wait()
            self._works.popleft()  # one that is done must not be waited for again, if another one fails
        self.done = True

    def is_completed(self) -> bool:
        """Whether it is known to have ended, well or not."""
        return self.posted and all(work.is_completed() for work in self._works)


class SendWindow:
    """Of one lane. Operations are started on one thread at a time, and waited for on one, which may be another one."""

    def __init__(self) -> None:
        self._waiting: deque[Message] = deque()
        self._under_way: deque[Message] = deque()
        self._lock = threading.Lock()
        """While messages are posted: Gloo tells those between two ranks apart by their order. And while somebody looks at what
        is posted: a message is on its way from one queue to the other meanwhile."""
        self._error: BaseException | None = None

    def put(self, posts: Iterable[tuple[Post, int]]) -> list[Message]:
        """Messages of an operation in rounds, each with its number of bytes: posted in turn, as those before them are done."""
        messages = [Message(self, *each) for each in posts]
        with self._lock:
            self._waiting += messages
        self.go_on()
        return messages

    def put_together(self, post: Post) -> Sequence[Any]:
        """What an operation without rounds waits for: it is posted now, unless something before it is not."""
        with self._lock:
            if not self._waiting:
                return post()
        return self.put([(post, 0)])

    def empty(self) -> None:
        """Post everything: what comes now does not go through here, and does not wait for what others have not posted."""
        with self._lock:
            while self._waiting:
                self._post_next()

    def reach(self, message: Message) -> None:
        """Wait for what is under way until ``message`` is posted. If it never will be, raises the error of the one that failed
        before it; CommunicationError if that was no error of the transport's."""
        while (before := self._before(message)) is not None:
            before.finish()
            self.go_on()

    def _before(self, message: Message) -> Message | None:
        """What has to be waited for until ``message`` is posted, if it is not."""
        with self._lock:
            if message.posted:
                return None
            if self._under_way:
                return self._under_way[0]
        if isinstance(self._error, Exception):  # and not Ctrl-C on another thread
            raise self._error
        raise CommunicationError("a message before this one has failed")

    def clear(self, error: BaseException) -> None:
        """Something has failed: nothing more is posted, and nothing kept of it but the first error."""
        with self._lock:
            self._error = self._error or error
            self._waiting.clear()
            self._under_way.clear()

    def go_on(self) -> None:
        """Post as much as there is room for."""
        with self._lock:
            self._under_way = deque(message for message in self._under_way if not message.done)
            while self._waiting and self._has_room():
                self._post_next()

    def _has_room(self) -> bool:
        nbytes = sum(message.nbytes for message in self._under_way) + self._waiting[0].nbytes
        return len(self._under_way) < 2 or nbytes <= TOGETHER

    def _post_next(self) -> None:
        message = self._waiting.popleft()
        message.post()
        self._under_way.append(message)
