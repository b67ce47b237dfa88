"""S3 settings for obstore, under fsspec's names and from the standard places.

s3fs gets region, endpoint and credentials from botocore; obstore looks in only some of botocore's
places. So botocore resolves them for both, and a URL means the same through either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from streamkern.basics.errors import ConfigError, StorageAccessError
from streamkern.basics.optional import on_demand
from streamkern.filesystem.engines import NO_CREDENTIALS
from streamkern.filesystem.objects import STALL_S

# Settings that obstore supports too; with any other one s3fs is used.
_KNOWN = {"key", "secret", "token", "endpoint_url", "region", "anon", "profile", "client_kwargs"}
_KNOWN_CLIENT = {"endpoint_url", "region_name"}
_LONGEST_REQUEST = timedelta(hours=1)  # the limit is on each piece instead
# botocore renews credentials if it can; they are requested again this often.
_CREDENTIALS_FOR = timedelta(minutes=5)


def not_understood(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the fsspec options that obstore does not support."""
    client = options.get("client_kwargs") or {}
    return [*sorted(set(options) - _KNOWN), *sorted(set(client) - _KNOWN_CLIENT)]


def open_buckets(url: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return obstore's stores for reading and for writing below an s3:// URL.

    Raises
    ------
    StorageAccessError
        There are no credentials, and anonymous access was not requested.
    """
    refused = on_demand("botocore.exceptions").BotoCoreError
    client = options.get("client_kwargs") or {}
    wanted = options.get("endpoint_url") or client.get("endpoint_url")
    region = options.get("region") or client.get("region_name")
    session = on_demand("botocore.session").Session(profile=options.get("profile"))
    if options.get("key") and options.get("secret"):
        session.set_credentials(options["key"], options["secret"], options.get("token"))
    anonymous = bool(options.get("anon"))
    try:
        region = region or session.get_config_variable("region") or os.environ.get("AWS_REGION")
        region = region or "us-east-1"
        endpoint = _endpoint(options.get("profile"), wanted, region, _places())
        credentials = None if anonymous else session.get_credentials()
    except (refused, ValueError) as error:
        raise ConfigError(
            f"the S3 settings cannot be used ({error}); correct the storage options, the "
            "environment or the configuration file of AWS"
        ) from None
    if credentials is None and not anonymous:
        raise StorageAccessError(NO_CREDENTIALS)
    settings: dict[str, Any] = {"region": region, "skip_signature": anonymous}
    if not str(urlsplit(endpoint).hostname).endswith(".amazonaws.com"):
        settings["endpoint"] = endpoint
    if not anonymous:
        settings["credential_provider"] = _provider(credentials)
    parts = urlsplit(url)

    def store(**limits: Any) -> Any:
        insecure = endpoint.startswith("http://")
        limits |= {"allow_http": insecure, "connect_timeout": timedelta(seconds=STALL_S)}
        options: Any = {"timeout": _LONGEST_REQUEST, **limits}
        return on_demand("obstore.store").S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options=options,
            retry_config={"max_retries": 0},
            **settings,
        )

    return store(read_timeout=timedelta(seconds=STALL_S)), store()


def _places() -> tuple[tuple[str, str], ...]:
    """Return the environment variables by which botocore finds S3; no credentials."""
    names = (n for n in os.environ if n.startswith("AWS_") and "KEY" not in n and "TOKEN" not in n)
    return tuple((name, os.environ[name]) for name in sorted(names))


@lru_cache(maxsize=16)
def _endpoint(
    profile: str | None, wanted: str | None, region: str, places: tuple[tuple[str, str], ...]
) -> str:
    """Return the endpoint of S3. botocore needs 0.1 s to make a client, which alone resolves it."""
    session = on_demand("botocore.session").Session(profile=profile)
    client = session.create_client("s3", region_name=region, endpoint_url=wanted)
    endpoint: str = client.meta.endpoint_url
    client.close()
    return endpoint


def _provider(credentials: Any) -> Any:
    def current() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renewed by botocore if it can
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    return current
