"""Clients of AWS by boto3, whose own chain finds the credentials, and its errors in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final
from urllib.parse import urlsplit

from dglx_dist.errors import ConfigError, DglxError, PeerError

Client: TypeAlias = Any
"""A client of boto3, which makes its classes while it runs; they have no types."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
MAX_TRIES = 5
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

_FORBIDDEN = (
    *("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "InvalidClientTokenId"),
    *("SignatureDoesNotMatch", "InvalidSignatureException", "ExpiredTokenException", "ExpiredToken"),
)


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in AWS.

    There is no field for credentials: boto3 finds them where the AWS command line does, in the environment,
    ``~/.aws``, a login, or the role of the machine.
    """

    region: str | None = None
    """Such as "eu-west-1"; None: as boto3 finds it."""
    endpoint_url: str | None = None
    """Something that speaks the interface of AWS at another address; None: AWS itself."""

    def client(self, service: str, *, connections: int = 10, timeout_s: float = READ_TIMEOUT_S) -> Client:
        """Return a client of ``service``, such as "lambda"; any thread may use it.

        Args:
            connections: Calls that may be under way at the same time.
            timeout_s: How long each answer may take.

        Raises:
            ConfigError: boto3 is not installed, knows no region, or not the profile that it is told to take.
        """
        try:
            from botocore.config import Config

            config = Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=timeout_s,
                retries={"mode": "standard", "total_max_attempts": MAX_TRIES},
                max_pool_connections=connections,
            )
            with explained(f"no client of {service} could be made"):
                return self._session.client(service, endpoint_url=self.endpoint_url, config=config)
        except ImportError as error:
            raise ConfigError(
                f"AWS needs boto3 ({error}); install it: pip install 'dglx_dist[aws]'"
            ) from None

    @cached_property
    def _session(self) -> Client:
        """Shared by all clients: it reads the descriptions of services and the credentials once."""
        import boto3

        return boto3.Session(region_name=self.region)


def is_amazon(client: Client) -> bool:
    """Whether ``client`` speaks to AWS itself: boto3's own settings, too, may name something else."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith(_AMAZON)


def code_of(error: Exception) -> str:
    """Return the code of what AWS answered; "" where it answered nothing."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_forbidden(error: Exception) -> bool:
    """Whether AWS does not know who asks, or does not let them."""
    return code_of(error) in _FORBIDDEN


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what boto3 raises into an error that says ``what`` failed and what to do about it.

    Raises:
        ConfigError: credentials, region or permission are missing, or AWS refuses the request.
        PeerError: AWS cannot be reached.
    """
    from botocore import exceptions as boto

    try:
        yield
    except DglxError:
        raise  # It is in words already.
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
        raise ConfigError(f"{what}: {error}; log in with `aws configure` or `aws sso login`") from error
    except boto.NoRegionError as error:
        raise ConfigError(
            f"{what}: no region is known; give --region, or set one by `aws configure`"
        ) from error
    except (boto.ConnectionError, boto.HTTPClientError) as error:
        raise PeerError(
            f"{what}: {error}; look at the network, the region, and the endpoint's address"
        ) from error
    except boto.ClientError as error:
        if is_forbidden(error):
            raise ConfigError(
                f"{what}: {error}; ask for the permission, or log in as somebody else"
            ) from error
        raise ConfigError(f"{what}: {error}") from error
    except (boto.BotoCoreError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


HANDLER = "dglx_dist.serverless.aws.function.handler"
TAG = "dglx_dist"
"""Marks what was made here: nothing else is changed or removed."""
MAX_DIRECT_BYTES = 50 * 1024 * 1024
"""A larger package goes by S3."""
MEMORY_MB, MAX_TIMEOUT_S = (128, 10_240), 900
EVENT_AGE_S = 60
"""An event that waits longer for a worker is dropped: by then another was sent in its place."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUNTIME = re.compile(r"python3\.[0-9]{1,2}")
ARCHITECTURES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""AWS's name of a processor to that of compiled files."""


@final
@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One function.

    Raises:
        ConfigError: a field is out of the bounds of AWS, or there is no package.
    """

    name: str
    package: Path
    """The zip that ``dglx lambda package`` wrote."""
    role: str | None = None
    """Name or ARN of the role as which it runs; None: a role NAME-role is made."""
    memory_mb: int = 192
    """AWS gives cores by the memory: one for 1769 MB."""
    timeout_s: int = 60
    subnets: tuple[str, ...] = ()
    """Subnets from which the graph servers can be reached; none: the internet."""
    security_groups: tuple[str, ...] = ()
    bucket: str | None = None
    """S3 bucket for a package above 50 MB."""
    runtime: str | None = None
    """Such as "python3.12"; None: that of the package."""
    architecture: str = "x86_64"
    place: Place = field(default_factory=Place)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.package.is_file():
            raise ConfigError(f"there is no package {self.package}; write it with `dglx lambda package`")
        low, high = MEMORY_MB
        if not low <= self.memory_mb <= high:
            raise ConfigError(f"a function of {self.memory_mb} MB; AWS offers {low} to {high}")
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"a time-out of {self.timeout_s} s; AWS offers 1 to {MAX_TIMEOUT_S}")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                f"subnets {list(self.subnets)} and security groups {list(self.security_groups)}: a function "
                "in a VPC needs both, any other none"
            )
        if self.runtime is not None and _RUNTIME.fullmatch(self.runtime) is None:
            raise ConfigError(f"runtime {self.runtime!r} runs no Python; give one like python3.12")
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r}; give one of {', '.join(ARCHITECTURES)}")
        if self.bucket is None and self.package.stat().st_size > MAX_DIRECT_BYTES:
            size = self.package.stat().st_size / 1024**2
            raise ConfigError(
                f"{self.package} has {size:.1f} MB and AWS takes {MAX_DIRECT_BYTES >> 20} directly; give an "
                "S3 bucket with --bucket"
            )


def check_name(name: str) -> None:
    """Raise ConfigError unless a function can be called ``name``."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"no function can be called {name!r}; give 1 to 64 letters, digits, - and _")
