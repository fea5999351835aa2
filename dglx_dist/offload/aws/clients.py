"""Clients of AWS by boto3, whose own chain finds the credentials, and its errors in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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
