"""Connection errors: how they are told from those of an algorithm, and the part of their text that says something."""


def is_connection_error(error: BaseException | None) -> bool:
    """Whether the transport, not an algorithm, raised this."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        mark in text for mark in ("gloo", "onnection", "NCCL", "ncclRemote", "ocket", "Timed out", "timed out")
    )


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text, without the general advice that Gloo adds."""
    return str(error).strip().split("\n")[0].split(". This is typically")[0][:200]
