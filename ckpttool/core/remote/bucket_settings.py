"""Endpoints and credentials of buckets, from the environment and the files of the stores' own tools."""

from __future__ import annotations

import configparser
import contextlib
import importlib
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ...errors import UsageFault
from .store import Patience

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

UPLOADING = 10  # times the patience for a byte: no byte comes back while one part is on its way
METADATA = "http://169.254.169.254"  # where the machines of all three answer, and no other machine does
METADATA_SECONDS = 1.0


class BucketSettings(NamedTuple):
    """How a bucket is reached. Never show one: it holds credentials."""

    config: dict[str, Any]
    is_signed: bool
    credentials: Any = None  # asked by the library for each request, where they expire


def connected(
    scheme: str, name: str, settings: BucketSettings, patience: Patience, *, writes: bool
) -> S3Store | GCSStore | AzureStore:
    """Return the library's store. Raises obstore's errors, or ValueError, for settings that it rejects."""
    from obstore.store import AzureStore, GCSStore, S3Store

    config = dict(settings.config)
    if scheme == "gs" and writes and not settings.is_signed:
        # Without this, and in spite of skip_signature, the library asks the metadata server for a token.
        config = {**config, "skip_signature": False, "bearer_token": "none"}
    arguments: dict[str, Any] = {
        "config": config,
        "client_options": {
            "allow_http": _is_plain(config),
            "connect_timeout": timedelta(seconds=patience.stall),
            "read_timeout": timedelta(seconds=patience.stall * (UPLOADING if writes else 1)),
            "timeout": timedelta(days=1),  # of a whole answer: by default 30 s, however fast it comes
        },
        "retry_config": _retries(patience),
        "credential_provider": settings.credentials,
    }
    stores: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    store: S3Store | GCSStore | AzureStore = stores[scheme](name, **arguments)
    return store


def _is_plain(config: dict[str, Any]) -> bool:
    """Return whether the user has named an endpoint without TLS: only then is one spoken to."""
    named = _set("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    is_emulated = "use_emulator" in config or bool(_set("AZURE_STORAGE_USE_EMULATOR"))
    return is_emulated or (config.get("endpoint") or config.get("base_url") or named).startswith("http://")


def _retries(patience: Patience) -> dict[str, Any]:
    first, longest, all_of_them = (
        timedelta(seconds=each) for each in (patience.first_wait, patience.longest_wait, patience.longest)
    )
    backoff = {"init_backoff": first, "max_backoff": longest, "base": 2}
    return {"max_retries": patience.attempts - 1, "retry_timeout": all_of_them, "backoff": backoff}


def settings_of(scheme: str) -> BucketSettings:
    """Return the settings for all buckets of a scheme: `s3`, `gs` or `az`.

    The library itself reads the variables that its documentation lists, such as AWS_ACCESS_KEY_ID,
    AWS_REGION, GOOGLE_APPLICATION_CREDENTIALS and AZURE_STORAGE_SAS_TOKEN. This adds the settings that it
    does not know. Without credentials, requests are unsigned. Raises UsageFault for settings that can't be
    used.
    """
    return {"s3": _amazon, "gs": _google, "az": _azure}[scheme]()


def _set(*names: str) -> str:
    """Return the first of these variables that is not empty; "" if none."""
    return next((value for value in map(os.environ.get, names) if value), "")


def _amazon() -> BucketSettings:
    profile = _profile()
    endpoint = _set("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") or profile.get("endpoint_url")
    region = _set("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    named = {"endpoint": endpoint, "region": region}
    config: dict[str, Any] = {name: value for name, value in named.items() if value}
    if _set("AWS_SKIP_SIGNATURE").lower() in ("1", "true"):
        return BucketSettings(config, False)
    of_container = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    if _set("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", *of_container):  # the library finds these
        return BucketSettings(config, True)
    if "aws_access_key_id" in profile:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        config |= {name: profile[name] for name in names if name in profile}
        return BucketSettings(config, True)
    if {"sso_session", "sso_start_url", "role_arn", "credential_process"} & profile.keys():
        return BucketSettings(config, True, _boto3())
    if _set("AWS_EC2_METADATA_DISABLED").lower() != "true" and _is_amazon_role():
        return BucketSettings(config, True)
    return BucketSettings({**config, "skip_signature": True}, False)


def _profile() -> dict[str, str]:
    """Return the chosen profile of the files that AWS's tools share; {} where there is none."""
    name = _set("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
    found: dict[str, str] = {}
    for variable, usual, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", f"profile {name}" if name not in ("", "default") else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default"),
    ):
        file = configparser.RawConfigParser(default_section="")  # `default` is a profile like any other
        path = os.path.expanduser(_set(variable) or usual)
        try:
            file.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            raise UsageFault(f"{path}: is no file of AWS profiles") from None  # the error quotes its lines
        if file.has_section(section):
            found |= {key: value or "" for key, value in file.items(section)}
    if name and not found:
        hint = "run: aws configure list-profiles"
        raise UsageFault(f"AWS_PROFILE: there is no profile {name!r}", hint=hint)
    return found


def _boto3() -> Callable[[], Any]:
    """Return a function that asks boto3 for the credentials of a profile without keys of its own."""
    # obstore's own provider over boto3 needs Python 3.11.
    try:
        credentials = importlib.import_module("boto3").Session().get_credentials()
    except ImportError:
        what = "the AWS profile has no keys of its own, but SSO, a role or a process"
        raise UsageFault(what, hint="pip install boto3") from None

    def ask() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()  # renewed by boto3 before they expire
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        }

    return ask


def _is_amazon_role() -> bool:
    """Return whether this is a machine of Amazon's with a role."""
    place = _set("AWS_METADATA_ENDPOINT") or METADATA
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _answer(place, "PUT", "/latest/api/token", lifetime)
    roles = "/latest/meta-data/iam/security-credentials/"
    return bool(token and _answer(place, "GET", roles, {"X-aws-ec2-metadata-token": token}))


def _answer(place: str, method: str, path: str, headers: dict[str, str]) -> str:
    """Return the answer of the machine's metadata server; "" where there is none, or it refuses."""
    # The library would wait for minutes on a machine that has none.
    server = urlsplit(place)
    connection = HTTPConnection(server.hostname or "", server.port or 80, timeout=METADATA_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException, ValueError):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        if response.status == 200:
            return response.read(1 << 16).decode("latin-1").strip()
    return ""


def _google() -> BucketSettings:
    if emulator := _set("STORAGE_EMULATOR_HOST"):
        address = emulator if "://" in emulator else f"http://{emulator}"
        return BucketSettings({"base_url": address, "skip_signature": True}, False)
    if _set("GOOGLE_SKIP_SIGNATURE").lower() in ("1", "true"):
        return BucketSettings({}, False)
    named = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
    if _set(*named, "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN"):
        return BucketSettings({}, True)
    folder = _set("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    login = os.path.join(folder, "application_default_credentials.json")
    if os.path.isfile(login):
        return BucketSettings({"application_credentials": login}, True)
    account = "/computeMetadata/v1/instance/service-accounts/default/email"
    if _answer(METADATA, "GET", account, {"Metadata-Flavor": "Google"}):
        return BucketSettings({}, True)
    return BucketSettings({"skip_signature": True}, False)


def _azure() -> BucketSettings:
    named = {"account_name": _set("AZURE_STORAGE_ACCOUNT"), "account_key": _set("AZURE_STORAGE_KEY")}
    config: dict[str, Any] = {name: value for name, value in named.items() if value}
    config |= _connection(_set("AZURE_STORAGE_CONNECTION_STRING"))
    if not ("account_name" in config or _set("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR")):
        raise UsageFault("no storage account of Azure's is named", hint=HINTS["az"])
    found_by_library = (
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
        *("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN", "AZURE_CLIENT_SECRET"),
        *("AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_USE_AZURE_CLI"),
        *("AZURE_STORAGE_USE_EMULATOR", "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT"),
    )
    if {"account_key", "sas_key"} & config.keys() or _set(*found_by_library):
        return BucketSettings(config, True)
    if _answer(METADATA, "GET", "/metadata/instance?api-version=2021-02-01", {"Metadata": "true"}):
        return BucketSettings(config, True)
    return BucketSettings({**config, "skip_signature": True}, False)


def _connection(text: str) -> dict[str, Any]:
    """Return the settings in a connection string of Azure: `AccountName=…;AccountKey=…;BlobEndpoint=…`."""
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    if parts.get("UseDevelopmentStorage") == "true":
        return {"use_emulator": True}
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    config = {ours: parts[theirs] for theirs, ours in names.items() if theirs in parts}
    if "endpoint" not in config and "account_name" in config and "EndpointSuffix" in parts:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        config["endpoint"] = f"{protocol}://{config['account_name']}.blob.{parts['EndpointSuffix']}"
    return config


# Hints where a store refuses access, with or without credentials.
HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
