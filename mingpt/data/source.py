"""The bytes of the text: from a path or any fsspec URL, cached and checked against a checksum."""

import hashlib
import os
from pathlib import Path

import fsspec

from mingpt.config import DataConfig
from mingpt.errors import UserError

LOCAL = ("file://", "local://", "memory://")


def read_bytes(config: DataConfig) -> bytes:
    """The text's bytes. Raises UserError if they cannot be read or have another sha256 than `data.sha256`."""
    remote = "://" in config.path and not config.path.startswith(LOCAL)
    cached = cache_path(config.path)
    if remote and cached.is_file():
        content = cached.read_bytes()
        if has_expected_checksum(content, config):
            return content  # otherwise the cached file is outdated or incomplete: download it again
    content = download(config.path)
    if not has_expected_checksum(content, config):
        digest = hashlib.sha256(content).hexdigest()
        raise UserError(
            f"data.path {config.path} has sha256 {digest}, and data.sha256 asks for {config.sha256}"
        )
    if remote:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(cached)
    return content


def cache_path(url: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mingpt"
    digest = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}-{url.rsplit('/', 1)[-1][:80]}"


def has_expected_checksum(content: bytes, config: DataConfig) -> bool:
    return config.sha256 is None or hashlib.sha256(content).hexdigest() == config.sha256.lower()


def download(path: str) -> bytes:
    """The bytes at a path or URL. Raises UserError, naming the package if its driver is not installed."""
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except ImportError as error:
        raise UserError(f"data.path {path} needs a driver that is not installed: {error}") from None
    except FileNotFoundError:
        hint = "" if "://" in path or os.path.isabs(path) else f" (relative paths start at {Path.cwd()})"
        raise UserError(f"data.path {path} does not exist{hint}") from None
    except Exception as error:  # each driver raises exceptions of its own
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(f"data.path {path} cannot be read: {type(error).__name__}: {reason}") from None
