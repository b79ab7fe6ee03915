"""Every exception a user can meet, one root, each with the facts as attributes and the remedy in its last sentence.

Each class also derives from the built-in that a caller would expect.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigurationError(CheckpointError, ValueError):
    """The caller's arguments, model or environment cannot work together; raised before training starts."""


class UnknownLayout(ConfigurationError):
    """Parameters could not be placed into operators; the message names them."""


class WrongCounts(ConfigurationError):
    """Tokens per expert are not counted as experts process them; the message names the layers and says why."""


class UnsupportedOptimizer(ConfigurationError):
    """The optimizer's state cannot be captured exactly slice by slice; the message says why."""


class StorageError(CheckpointError, OSError):
    """A storage operation failed after its retries."""


class StorageRefused(StorageError, PermissionError):
    """The medium refuses and will go on to: no space, no permission, no such bucket. It is not tried again at once."""


class KeyExists(StorageError, FileExistsError):
    """A create-exclusive met an existing key: somebody else, or an earlier attempt of ours, wrote it."""


class KeyMissing(StorageError, FileNotFoundError):
    """The key does not exist."""


class Corrupt(CheckpointError, ValueError):
    """Bytes were read but are not what was written: digest, size, identity or grammar differ."""


class Fenced(CheckpointError, RuntimeError):
    """A later incarnation of the run has begun; this process must not write any more."""


class NoUsableGeneration(CheckpointError, RuntimeError):
    """Committed generations exist but none could be restored; the message lists each with its reason."""


class IdentityMismatch(ConfigurationError):
    """The model, optimizer or world differs from the one that wrote the checkpoint."""


class OtherData(CheckpointError, RuntimeError):
    """A resumed run got another batch than the original run. Raised before the run trains on that batch; nothing stored has changed."""


class SilentFault(CheckpointError, RuntimeError):
    """An audit has found a rank that computes, or holds, other bits than it should. Raised on all ranks, before the optimizer takes the step."""


class CodecError(ConfigurationError, TypeError):
    """A value cannot be stored in the journal exactly; the message gives its place and type."""


class RingFull(CheckpointError, RuntimeError):
    """No free segment slot: the ring is smaller than the plan in use needs."""
