"""Uploads in parts that are not completed: S3 keeps, and charges for, their parts until they are aborted.

One that fails is aborted at once. One whose process was killed is aborted when the folder is next prepared or
pruned and five minutes have passed, or when the same step is written again. A lifecycle rule of the bucket
(AbortIncompleteMultipartUpload) does the same for runs that never start again.
"""

import datetime
import logging
from typing import Any

from fsspec.spec import AbstractBufferedFile

log = logging.getLogger(__name__)


def discard(file: Any, path: str) -> None:
    """Abort the upload of a file that is open for writing, so that nothing appears."""
    try:
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # closing it, even when it is collected, would complete the upload
            file.discard()
        else:
            file.close()
    except Exception as error:  # each driver raises exceptions of its own
        log.warning("the upload of %s could not be aborted (%s: %s)", path, type(error).__name__, error)


def abort_unfinished_uploads(files: Any, prefix: str, older_than_s: float | None) -> None:
    """Abort uploads to S3 of objects whose paths begin with `prefix` and that began so long ago, or any.

    A failure is a line: whoever may write objects may not be allowed to list uploads.
    """
    if not hasattr(files, "call_s3"):
        return
    try:
        for bucket, key, upload in unfinished_uploads(files, prefix, older_than_s):
            files.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
            log.info("an upload of %s/%s that was not completed is aborted", bucket, key)
    except Exception as error:  # each driver raises exceptions of its own
        reason = f"{type(error).__name__}: {error}"
        log.info("unfinished uploads to %s* cannot be looked for (%s)", prefix, reason)


def unfinished_uploads(files: Any, prefix: str, older_than_s: float | None) -> list[tuple[str, str, str]]:
    """(bucket, key, id) of each. Raises what the driver raises."""
    bucket, key_prefix, _ = files.split_path(prefix)
    latest = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    if older_than_s is not None:
        latest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=older_than_s)
    found: list[tuple[str, str, str]] = []
    marker: dict[str, str] = {}
    is_complete = False
    while not is_complete:
        listed = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key_prefix, **marker)
        found += [
            (bucket, upload["Key"], upload["UploadId"])
            for upload in listed.get("Uploads", [])
            if upload["Initiated"] <= latest
        ]
        is_complete = not listed.get("IsTruncated")
        if not is_complete:
            marker = {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}
    return found
