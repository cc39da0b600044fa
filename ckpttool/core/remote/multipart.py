"""Uploads to S3 in numbered parts, which several processes may send, on any number of machines.

obstore, which does all else, uploads in one process alone and tells no upload's id; so this asks boto3, the
library of Amazon's own (extra `parts`). Facts: an object has at most 10,000 parts, all but the last of 5 MiB
or more; a part that is sent again takes the place of the first (Amazon S3 User Guide, "Multipart upload").
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import FileError, Unreadable, already_exists
from .bucket_settings import UPLOADING, BucketSettings
from .buckets import MOST_PARTS, PART, Bucket, refused
from .store import TRAFFIC, Patience

EXISTS = ("PreconditionFailed", "ConditionalRequestConflict")
LEAST = 1 << 20  # parts are a multiple of this


class UploadGone(Unreadable, kind="upload-gone"):
    """An upload was completed by another process, or aborted."""


class SentPart(NamedTuple):
    """A part that has arrived."""

    etag: str
    size: int


def part_size(nbytes: int) -> int:
    """Return in how large parts an object of so many bytes is sent."""
    return max(PART, -(-nbytes // MOST_PARTS // LEAST) * LEAST)


class Multipart:
    """The uploads of one bucket. Calls may come from several threads; their errors name the object."""

    def __init__(self, bucket: Bucket) -> None:
        """Ask nothing yet. Raises ModuleNotFoundError where boto3 is not installed."""
        self._bucket, self._client = bucket, _client(bucket.settings, bucket.patience)

    def begin(self, key: str) -> str:
        """Begin an upload; return its id."""
        with self._named(key):
            begun: str = self._client.create_multipart_upload(**self._at(key))["UploadId"]
        return begun

    def send(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Send a part, whose MD5 the server compares; return its ETag."""
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        how = {"UploadId": upload, "PartNumber": number, "Body": data, "ContentMD5": digest}
        with self._named(key):
            etag: str = self._client.upload_part(**self._at(key), **how)["ETag"]
        return etag

    def sent(self, key: str, upload: str) -> dict[int, SentPart]:
        """Return the parts that have arrived, by number."""
        found: dict[int, SentPart] = {}
        with self._named(key):
            for page in self._client.get_paginator("list_parts").paginate(**self._at(key), UploadId=upload):
                TRAFFIC.count()
                found |= {each["PartNumber"]: SentPart(each["ETag"], each["Size"]) for each in page["Parts"]}
        return found

    def complete(self, key: str, upload: str, etags: Mapping[int, str], *, replace: bool) -> None:
        """Make the parts an object. Raises OutputExists where one is there and `replace` is not set."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
        how: dict[str, Any] = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        with self._named(key):
            self._client.complete_multipart_upload(
                **self._at(key), **how, **({} if replace else {"IfNoneMatch": "*"})
            )

    def abort(self, key: str, upload: str) -> None:
        """Give an upload up, and all its parts, unless it is gone already."""
        with contextlib.suppress(UploadGone), self._named(key):
            self._client.abort_multipart_upload(**self._at(key), UploadId=upload)

    def _at(self, key: str) -> dict[str, str]:
        TRAFFIC.count()
        return {"Bucket": self._bucket.name, "Key": key}

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Turn boto3's errors in the block into those of the object."""
        from botocore.exceptions import BotoCoreError, ClientError

        shown = self._bucket.shown(key)
        try:
            yield
        except ClientError as error:
            failure = _translated(error, shown, is_signed=self._bucket.settings.is_signed)
        except BotoCoreError as error:
            failure = Unreadable(shown, _words(error), hint="is the endpoint or the bucket spelled right?")
        else:
            return
        raise failure


def _translated(error: Any, shown: str, *, is_signed: bool) -> FileError | Exception:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchUpload":
        return UploadGone(shown, "its unfinished upload is gone")
    if code in EXISTS:
        return already_exists(shown)
    return refused(shown, "s3", is_signed, status, code) or Unreadable(shown, f"the server answers {code}")


def _words(error: Exception) -> str:
    kinds = {"EndpointConnectionError": "no connection", "NoCredentialsError": "no credentials were found"}
    return kinds.get(type(error).__name__) or type(error).__name__


def _client(settings: BucketSettings, patience: Patience) -> Any:
    """Return boto3's client for what obstore's settings say."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    config = settings.config
    keys = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    given = {name: config[name] for name in keys if name in config}
    endpoint = config.get("endpoint")
    how = Config(
        signature_version=None if settings.is_signed else UNSIGNED,
        retries={"total_max_attempts": patience.attempts, "mode": "standard"},
        connect_timeout=patience.stall,
        read_timeout=patience.stall * UPLOADING,
        request_checksum_calculation="when_required",  # what speaks like S3 may know MD5 alone
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    region = config.get("region") or "us-east-1"
    return boto3.Session().client("s3", endpoint_url=endpoint, region_name=region, config=how, **given)
