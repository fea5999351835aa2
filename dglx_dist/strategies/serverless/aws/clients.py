"""AWS clients made with boto3, explained AWS errors, and how a deployment is described."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final
from urllib.parse import urlsplit

from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.options import option

Client: TypeAlias = Any
"""A boto3 client. boto3 creates its classes at run time, without types."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
MAX_TRIES = 5
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

_FORBIDDEN = (
    *("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "InvalidClientTokenId"),
    *("SignatureDoesNotMatch", "InvalidSignatureException", "ExpiredTokenException", "ExpiredToken"),
)
TAG = "dglx_dist"
"""Tag on resources that dglx created. Other resources are never changed or removed."""
MEMORY_MB = (128, 10_240)
MAX_TIMEOUT_S = 900
EVENT_AGE_S = 60
"""Seconds after which a waiting event is dropped. By then the controller has sent another attempt."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NETWORK = "Network: a function must reach the graph servers"
ARCHITECTURES = ("x86_64", "arm64")
"""Processors as AWS names them."""
_IMAGE = re.compile(r"[\w.-]+(:[0-9]+)?/[\w./-]+(:[\w.-]+|@sha256:[0-9a-f]{64})")


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """An AWS region or endpoint.

    There is no field for credentials, because boto3 finds them as the AWS command line does: in the
    environment, in ``~/.aws``, in a login, or in the machine's role.
    """

    region: str | None = None
    """The region's name, such as "eu-west-1", or None for boto3's default."""
    endpoint_url: str | None = None
    """Address of an AWS-compatible service, or None for AWS itself."""

    def client(self, service: str, *, connections: int = 10, timeout_s: float = READ_TIMEOUT_S) -> Client:
        """Return a thread-safe client for ``service``, such as "lambda".

        ``connections`` limits concurrent calls. Raises ConfigError if boto3 is not installed, or finds no
        region or not the configured profile.
        """
        try:
            from botocore.config import Config

            config = Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=timeout_s,
                retries={"mode": "standard", "total_max_attempts": MAX_TRIES},
                max_pool_connections=connections,
            )
            with explain_errors(f"could not create a client of {service}"):
                return self._session.client(service, endpoint_url=self.endpoint_url, config=config)
        except ImportError as error:
            raise ConfigError(
                f"AWS needs boto3 ({error}); install it: pip install 'dglx_dist[aws]'"
            ) from None

    @cached_property
    def _session(self) -> Client:
        # All clients share the session, so service descriptions and credentials are read once.
        import boto3

        return boto3.Session(region_name=self.region)


def is_amazon(client: Client) -> bool:
    """Return whether ``client`` calls AWS itself. boto3's settings may name another endpoint, too."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith(_AMAZON)


@contextmanager
def explain_errors(purpose: str) -> Iterator[None]:
    """Turn boto3's errors into a ConfigError or PeerError that says ``purpose`` failed and how to fix it."""
    from botocore import exceptions as boto

    try:
        yield
    except DglxError:
        raise
    except (boto.ConnectionError, boto.HTTPClientError) as error:
        raise PeerError(
            f"{purpose}: {error}; check the network, the region and the endpoint's address"
        ) from error
    except (boto.BotoCoreError, boto.ClientError, ValueError) as error:
        raise ConfigError(f"{purpose}: {error}{_find_remedy(error)}") from error


def _find_remedy(error: Exception) -> str:
    """Return what to do about an error from boto3, to append to a message, or ""."""
    from botocore import exceptions as boto

    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound):
        return "; log in with `aws configure` or `aws sso login`"
    if isinstance(error, boto.NoRegionError):
        return "; give --region, or set one with `aws configure`"
    if isinstance(error, boto.WaiterError):
        # The response is the function's configuration, or has it as a part.
        state = error.last_response.get("Configuration", error.last_response)
        reason = state.get("StateReason") or state.get("LastUpdateStatusReason") or "no reason given"
        return f" ({reason}); run the command again, or remove the function and deploy it again"
    if isinstance(error, boto.ClientError) and error.response.get("Error", {}).get("Code") in _FORBIDDEN:
        return "; ask for the permission, or log in as another user"
    return ""


Found: TypeAlias = Mapping[str, Any]
"""AWS's description of a resource, as boto3 returns it."""


def found_or_none(
    purpose: str, missing: type[Exception], call: Callable[..., Found], **arguments: object
) -> Found | None:
    """Return ``call(**arguments)``, or None if it raises ``missing``. Other errors are explained."""
    with explain_errors(purpose):
        try:
            return call(**arguments)
        except missing:
            return None


def _several(help: str, flag: str) -> Any:
    def parse(values: list[str], _flag: str) -> tuple[str, ...]:
        return tuple(values)

    return option(tuple, help, flag=flag, kind=list[str], parse=parse, panel=NETWORK, metavar="ID")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Desired state of one function. Raises ConfigError for values outside the limits of AWS."""

    name: str = option(..., "Name of the function.", metavar="NAME")
    image: str = option(..., "Image in a registry of AWS: HOST/NAME:TAG.", flag="--image", metavar="URI")
    memory_mb: int = option(
        1024, "Memory; AWS gives cores by it: one for 1769 MB.", flag="--memory", metavar="MB"
    )
    timeout_s: int = option(60, "After which AWS ends an invocation.", flag="--timeout", metavar="SECONDS")
    role: str | None = option(None, "Name or ARN of its role. Default: one is made, NAME-role.")
    subnets: tuple[str, ...] = _several("Subnet it runs in; may be given several times.", "--subnet")
    """Subnets that can reach the graph servers, or () for the internet."""
    security_groups: tuple[str, ...] = _several(
        "What it may reach; may be given several times.", "--security-group"
    )
    architecture: str = option("x86_64", "Processor of the function: x86_64 or arm64.")
    place: Place = field(default_factory=Place)

    def __post_init__(self) -> None:
        check_name(self.name)
        if _IMAGE.fullmatch(self.image) is None:
            raise ConfigError(
                f"--image {self.image!r} is no image; build one with `dglx lambda image` and docker, push it "
                "to a registry, and give HOST/NAME:TAG or HOST/NAME@sha256:DIGEST"
            )

        low, high = MEMORY_MB
        if not low <= self.memory_mb <= high:
            raise ConfigError(f"a function of {self.memory_mb} MB; AWS offers {low} to {high}")
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"a time-out of {self.timeout_s} s; AWS offers 1 to {MAX_TIMEOUT_S}")

        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                f"subnets {list(self.subnets)} and security groups {list(self.security_groups)}: a function "
                "in a VPC needs both; give both or neither"
            )

        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r}; give one of {', '.join(ARCHITECTURES)}")


def check_name(name: str) -> None:
    """Raise ConfigError if ``name`` is no valid function name."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not a valid function name; give 1 to 64 letters, digits, - and _")
