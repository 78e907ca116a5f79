"""Error: everything that gossamer raises, each with what was wrong, where, and what to do."""


class GossamerError(Exception):
    """Base class of every error that gossamer raises on its own account."""


class ConfigurationError(GossamerError, ValueError):
    """A field, model, optimizer or group that cannot be used as it was given."""


class DisagreementError(ConfigurationError):
    """Ranks differ in something that all of them must share (algorithm, model, plan, operation)."""


class UsageError(GossamerError, RuntimeError):
    """The training loop did something that communication cannot follow (a step without a backward, say)."""


class CheckpointError(GossamerError, RuntimeError):
    """A checkpoint could not be written, or there is none that can be read as a whole."""


class CommunicationError(GossamerError, RuntimeError):
    """An exchange failed: a connection was lost, or another rank reported an error."""


class PeerLeftError(CommunicationError):
    """A rank ended its training while others still wait for it."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """An exchange took longer than the timeout; the message names what was waited for, and who was late."""
