"""The errors a user can meet. Each message says what failed, where, and what to do."""

from __future__ import annotations

from typing import ClassVar


class TensorizeAssetsError(Exception):
    """Base of every error raised on purpose.

    `retryable` says whether the same step may succeed when it is run again unchanged
    (network trouble, a server that is down). Everything else fails at once: a retry
    would only delay the message.
    """

    retryable: ClassVar[bool] = False


class CatalogError(TensorizeAssetsError):
    """The catalog is wrong, or does not have what was asked for."""


class HubError(TensorizeAssetsError):
    """The Hub refuses: gated, missing or renamed repo, missing revision, no weights, wrong hash."""


class HubUnavailableError(HubError):
    """The Hub, or the way to it, is in trouble; trying again later may help.

    `retry_after_s` is how many seconds it asks to be left alone; None where it does not say.
    """

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreError(TensorizeAssetsError):
    """The artifact store refuses or is damaged."""


class StoreUnavailableError(StoreError):
    """The object store, or the way to it, is in trouble; trying again later may help."""

    retryable: ClassVar[bool] = True


class ConflictError(StoreError):
    """A conditional write lost: the object exists, or changed since it was read."""


class ManifestError(TensorizeAssetsError):
    """A manifest or an artifact directory is not what it should be."""


class SignatureError(TensorizeAssetsError):
    """A signature is missing, wrong, or made by a key that is not trusted."""


class HistoryError(TensorizeAssetsError):
    """A signed history is older than, or another one than, what was seen of it here."""


class EvidenceError(TensorizeAssetsError):
    """A build has no passing evidence for what is asked of it."""


class BuildMismatchError(TensorizeAssetsError):
    """A record belongs to another build than the run that reads it."""


class PreflightError(TensorizeAssetsError):
    """The worker refuses a build before doing any work on it."""


class WorkerError(TensorizeAssetsError):
    """The worker failed; the message carries its own error."""


class WorkerBusyError(WorkerError):
    """Another worker is building the same thing; what it completes need not be built again."""

    retryable: ClassVar[bool] = True


class ClusterUnavailableError(WorkerError):
    """The cluster of the workers, or the way to it, is in trouble, or it has no room for one."""

    retryable: ClassVar[bool] = True


class WorkerKilledError(WorkerError):
    """The worker was killed from outside, most often for its memory.

    Retryable, because what killed it may have been a neighbour's memory rather than its own.
    """

    retryable: ClassVar[bool] = True
