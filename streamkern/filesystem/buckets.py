"""Open buckets of S3, Google Cloud and Azure by obstore, with the names of fsspec's options.

s3fs gets region, endpoint and credentials from botocore, which has more sources for them than
obstore. Botocore therefore resolves them for both, so that a URL means the same with both. For the
two other clouds obstore finds the credentials itself, in the environment and in the metadata
services of their machines.
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

S3, GOOGLE, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss")
# Settings that obstore supports too; with any other one s3fs is used.
_S3_OPTIONS = {
    "key", "secret", "token", "endpoint_url", "region", "anon", "profile", "client_kwargs",
}  # fmt: skip
_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
# Names of options in gcsfs and adlfs, and the names in obstore.
_GOOGLE_OPTIONS = {
    "token": "service_account", "anon": "skip_signature", "endpoint_url": "base_url",
}  # fmt: skip
_AZURE_OPTIONS = {
    **{name: name for name in ("account_name", "account_key", "client_id", "client_secret")},
    "tenant_id": "tenant_id", "sas_token": "sas_key", "anon": "skip_signature",
}  # fmt: skip
_REQUEST_TIMEOUT = timedelta(hours=1)  # long: `STALL_S` limits the wait for each piece
# botocore renews credentials if it can; they are requested again this often.
_CREDENTIALS_LIFETIME = timedelta(minutes=5)


def unsupported_options(scheme: str, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the fsspec options that obstore does not support."""
    if scheme in S3:
        client_options = options.get("client_kwargs") or {}
        return [*sorted(set(options) - _S3_OPTIONS), *sorted(set(client_options) - _CLIENT_OPTIONS)]
    supported = _GOOGLE_OPTIONS if scheme in GOOGLE else _AZURE_OPTIONS
    return sorted(set(options) - set(supported))


def open_buckets(url: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return obstore's stores for reading and for writing below a URL of S3, Google or Azure.

    Raises
    ------
    StorageAccessError
        If there are no credentials for S3, and anonymous access was not requested.
    """
    parts = urlsplit(url)
    if parts.scheme in S3:
        store_class, settings = "S3Store", _s3_settings(options)
    else:
        is_google = parts.scheme in GOOGLE
        store_class = "GCSStore" if is_google else "AzureStore"
        names = _GOOGLE_OPTIONS if is_google else _AZURE_OPTIONS
        settings = {names[name]: value for name, value in options.items()}
        if settings.get("service_account") == "anon":  # gcsfs's word for anonymous access
            settings["skip_signature"] = bool(settings.pop("service_account"))
    endpoint = settings.get("endpoint") or settings.get("base_url")

    def open_store(**limits: Any) -> Any:
        limits |= {
            "timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=STALL_S),
            "allow_http": str(endpoint).startswith("http://"),
        }  # fmt: skip
        try:
            return getattr(on_demand("obstore.store"), store_class)(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options=limits,
                retry_config={"max_retries": 0},  # `Objects` retries, counts and reports
                **settings,
            )
        except on_demand("obstore.exceptions").BaseError as error:
            raise ValueError(str(error).partition("\n")[0]) from None

    return open_store(read_timeout=timedelta(seconds=STALL_S)), open_store()


def _s3_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return obstore's settings for S3, with botocore's endpoint, region and credentials.

    Raises
    ------
    StorageAccessError
        If there are no credentials, and anonymous access was not requested.
    """
    botocore_error = on_demand("botocore.exceptions").BotoCoreError
    client = options.get("client_kwargs") or {}
    endpoint_url = options.get("endpoint_url") or client.get("endpoint_url")
    region = options.get("region") or client.get("region_name")
    session = on_demand("botocore.session").Session(profile=options.get("profile"))
    if options.get("key") and options.get("secret"):
        session.set_credentials(options["key"], options["secret"], options.get("token"))
    is_anonymous = bool(options.get("anon"))
    try:
        region = region or session.get_config_variable("region") or os.environ.get("AWS_REGION")
        region = region or "us-east-1"
        endpoint = _endpoint(options.get("profile"), endpoint_url, region, _botocore_environment())
        credentials = None if is_anonymous else session.get_credentials()
    except (botocore_error, ValueError) as error:
        raise ConfigError(
            f"the S3 settings cannot be used ({error})",
            "correct the storage options, the environment or the configuration file of AWS",
        ) from None
    if credentials is None and not is_anonymous:
        raise StorageAccessError(NO_CREDENTIALS)
    settings: dict[str, Any] = {"region": region, "skip_signature": is_anonymous}
    if not str(urlsplit(endpoint).hostname).endswith(".amazonaws.com"):
        settings["endpoint"] = endpoint
    if not is_anonymous:
        settings["credential_provider"] = _credential_provider(credentials)
    return settings


def _botocore_environment() -> tuple[tuple[str, str], ...]:
    """Return the environment variables by which botocore finds S3; no credentials."""
    names = (n for n in os.environ if n.startswith("AWS_") and "KEY" not in n and "TOKEN" not in n)
    return tuple((name, os.environ[name]) for name in sorted(names))


@lru_cache(maxsize=16)
def _endpoint(
    profile: str | None,
    endpoint_url: str | None,
    region: str,
    environment: tuple[tuple[str, str], ...],
) -> str:
    """Return the endpoint of S3, which only a client of botocore resolves; it is slow to make.

    environment : `_botocore_environment`, of which the cached endpoint is a function
    """
    session = on_demand("botocore.session").Session(profile=profile)
    client = session.create_client("s3", region_name=region, endpoint_url=endpoint_url)
    endpoint: str = client.meta.endpoint_url
    client.close()
    return endpoint


def _credential_provider(credentials: Any) -> Any:
    """Return a function that obstore calls for the current credentials, which botocore renews."""

    def current_credentials() -> dict[str, Any]:
        current = credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFETIME,
        }

    return current_credentials
