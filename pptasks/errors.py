"""Every error that pptasks raises on purpose, as one tree.

    PPError                     anything a user or an operator can act on; the command line prints it in one line
    ├── UsageError              wrong use: exit code 2
    │   ├── ConfigError         a setting or an environment variable that does not hold
    │   └── NoSuchCluster       no cluster of that name, or several where one was meant
    ├── PlanError               spans that do not tile the blocks, too many stages
    ├── ModelError              a model that cannot be read
    │   ├── ModelNotFound       no such alias, file or folder
    │   ├── ModelFileError      truncated, or not what its name says
    │   ├── Unsupported         an architecture, tensor type or tokenizer that we do not know, by name
    │   └── DownloadError       a server, a network or a disk that does not give or take the bytes
    │       └── NeedsToken      a repository that is gated or private: a licence to accept, a token to give
    ├── RequestError            a request that no pipeline could serve: empty, an id outside the vocabulary
    │   └── PromptTooLong       a prompt that has more tokens than the context holds
    ├── WireError               a frame that is refused
    │   ├── VersionMismatch     a version that we do not speak
    │   ├── MalformedFrame      wrong length, wrong magic, a size over the limit
    │   ├── BadTag              the authentication tag does not match
    │   └── WrongPlan           another plan's digest
    ├── RoutingError            a frame with no next hop
    ├── CacheMiss               a position beyond what the KV cache of this stage holds
    ├── BrokerError             the broker cannot be started, reached, or refuses us
    ├── ProviderError           who rents out machines refuses us, or says what we do not understand
    │   ├── BadKey              the key is refused: no retry
    │   ├── NoCredit            the account has no money left: no retry
    │   ├── OfferGone           somebody else was faster: take the next offer
    │   ├── CreatedAnyway       a create that was refused and yet made a machine that bills
    │   ├── NoAnswer            whether it did what was asked is not known
    │   └── StillBilling        machines whose end is not confirmed; carries their ids
    ├── BudgetReached           the money that a run may cost is spent
    ├── DeadlineReached         the time that a run may take is over
    ├── StorageError            a folder or a file that cannot be written
    ├── LinkError               the iroh link cannot be made, or was refused
    ├── StageTaken              another worker serves this stage already
    ├── StageFailed             a worker died or reported an error; carries its last log lines
    ├── NotReady                a stage was not ready in time
    ├── ProbeFailed             a device that gets a known product wrong, or a kernel that nothing can replace
    ├── VerifyFailed         an answer that came out otherwise when it was computed again
    ├── AuditFailed             a live product that was computed again and came out otherwise
    └── RequestFailed           the pipeline gave up on a request
        └── Busy                as many requests wait already as the head takes: send it again later

A message names the thing and says what to do. None of them ever holds a secret.
"""


class PPError(Exception):
    """Root of the tree. `str(error)` is one line, written for the person who reads it."""

    exit_code = 1


class UsageError(PPError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class NoSuchCluster(UsageError):
    pass


class PlanError(PPError):
    pass


class ModelError(PPError):
    pass


class ModelNotFound(ModelError):
    pass


class ModelFileError(ModelError):
    pass


class Unsupported(ModelError):
    pass


class DownloadError(ModelError):
    pass


class NeedsToken(DownloadError):
    pass


class RequestError(PPError):
    pass


class PromptTooLong(RequestError):
    pass


class WireError(PPError):
    pass


class VersionMismatch(WireError):
    pass


class MalformedFrame(WireError):
    pass


class BadTag(WireError):
    pass


class WrongPlan(WireError):
    pass


class RoutingError(PPError):
    pass


class CacheMiss(PPError):
    pass


class BrokerError(PPError):
    pass


class ProviderError(PPError):
    pass


class BadKey(ProviderError):
    pass


class NoCredit(ProviderError):
    pass


class OfferGone(ProviderError):
    pass


class CreatedAnyway(ProviderError):
    """`instance_id`: the machine, to be destroyed."""

    def __init__(self, message: str, instance_id: str):
        super().__init__(message)
        self.instance_id = instance_id


class NoAnswer(ProviderError):
    pass


class StillBilling(ProviderError):
    """`instance_ids`: what may cost money until somebody ends it."""

    def __init__(self, message: str, instance_ids: tuple[str, ...]):
        super().__init__(message)
        self.instance_ids = instance_ids


class BudgetReached(PPError):
    pass


class DeadlineReached(PPError):
    pass


class StorageError(PPError):
    pass


class LinkError(PPError):
    pass


class StageTaken(PPError):
    pass


class StageFailed(PPError):
    """`log` holds the last lines that the worker wrote, oldest first."""

    def __init__(self, message: str, log: tuple[str, ...] = ()):
        super().__init__(message)
        self.log = log


class NotReady(PPError):
    pass


class ProbeFailed(PPError):
    pass


class VerifyFailed(PPError):
    pass


class AuditFailed(PPError):
    pass


class RequestFailed(PPError):
    pass


class Busy(RequestFailed):
    pass
