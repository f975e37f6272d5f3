"""Read the bytes of a text, or a tokenizer by name, from a path or any fsspec URL.

A remote text is cached; any text is checked against `data.sha256`, if that is set. A tokenizer is a
tokenizer.json, GPT-2's two files in a folder, or GPT-2's tokenizer, which is downloaded and cached.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, decode_text, parse_json, reason_of, write_atomic
from mingpt.base.paths import refuse_pipe
from mingpt.base.urls import missing_driver
from mingpt.config import DataConfig
from mingpt.data.json_tokenizer import END_OF_TEXT, parse_tokenizer_json
from mingpt.data.tokenizers import Tokenizer

LOCAL = ("file://", "local://", "memory://")
# Files that `python -m mingpt prepare` reads and training does not.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
KINDS = {".jsonl": "line", ".ndjson": "line", ".parquet": "row"}  # what has a document
# tiktoken pins the same checksums.
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_VOCAB = ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
GPT2_MERGES = ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5")
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
log = logging.getLogger(__name__)


class AbsentFile(UserError):
    """The file does not exist."""


def read_bytes(config: DataConfig) -> bytes:
    """Return the bytes at data.path, cached if remote. UserError if unreadable, or not of data.sha256."""
    return read_cached(config.resolved_path, config.sha256, "data.path", "data.sha256")


def read_cached(path: str, sha256: str | None, setting: str, checksum_setting: str) -> bytes:
    """Return the bytes at a path or URL; a remote file is cached.

    The file is downloaded again only if the cached bytes have another SHA-256 than `sha256` (None accepts
    any). Raises UserError if the bytes cannot be read, or have another SHA-256 even so. The message begins
    with `setting`, the setting that gives the path, and may name `checksum_setting`.
    """
    remote = "://" in path and not path.startswith(LOCAL)
    content = read_cache(path) if remote else None
    if content is not None and has_checksum(content, sha256):
        return content  # otherwise the cached file is outdated or incomplete: download it again
    content = download(path, setting)
    if not has_checksum(content, sha256):
        digest = hashlib.sha256(content).hexdigest()
        raise UserError(f"{setting} {path} has sha256 {digest}, and {checksum_setting} asks for {sha256}")
    if remote:
        write_cache(path, content)
    return content


def read_cache(url: str) -> bytes | None:
    """Return the cached bytes of a URL; None if the cache does not have them or cannot be read."""
    try:
        return cache_path(url).read_bytes()
    except (OSError, RuntimeError) as error:
        log.debug("the text of %s is not in the cache: %s", url, error)
        return None


def write_cache(url: str, content: bytes) -> None:
    """Write the content of a URL to the cache, for the next start. A failure is only logged."""
    try:
        cached = cache_path(url)
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Durable, since without data.sha256 nothing tells whether the cached file is complete.
        write_atomic(cached, content, cached.with_name(f"{cached.name}.{os.getpid()}"), sync="file")
    except (OSError, RuntimeError) as error:
        log.warning(f"{url} is not cached ({error}): the next start downloads it again")


def cache_path(url: str) -> Path:
    """Return the cache file of a URL. Raises RuntimeError without XDG_CACHE_HOME and a home folder."""
    place = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(place) if place else Path.home() / ".cache") / "mingpt"
    digest = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}-{url.partition('?')[0].rsplit('/', 1)[-1][:80]}"


def has_checksum(content: bytes, sha256: str | None) -> bool:
    return sha256 is None or hashlib.sha256(content).hexdigest() == sha256.lower()


def download(path: str, setting: str) -> bytes:
    """Return the bytes at a path or URL, not cached. Raises UserError (AbsentFile if there is no file)."""
    refuse_pipe(path, setting)
    with readable(path, f"{setting} "), fsspec.open(path, "rb") as file:
        return bytes(file.read())


@contextlib.contextmanager
def readable(path: str, begin: str = "") -> Iterator[None]:
    """Raise UserError in place of any other Exception of the block, AbsentFile if the file does not exist.

    The message begins with `begin` and `path`.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise missing_driver(f"{begin}{path}", error) from None
    except DriverError as error:
        reason = failed_request(error) or error
        if isinstance(reason, (FileNotFoundError, NotADirectoryError)):
            raise AbsentFile(f"{begin}{path} does not exist{relative_to(path)}") from None
        raise UserError(f"{begin}{path} cannot be read: {reason_of(reason)}") from None


def relative_to(path: str) -> str:
    """Return the folder where a relative path starts, in words for an error message; "" for other paths."""
    return "" if "://" in path or os.path.isabs(path) else f" (relative paths start at {Path.cwd()})"


def failed_request(error: Exception) -> BaseException | None:
    """Return what fsspec's HTTP driver raised `error` for: no connection, a timeout or a refusal; else None.

    For these the driver raises FileNotFoundError, too, as for 404 and 410, which really mean an absent file.
    """
    cause = error.__cause__
    is_of_driver = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if is_of_driver and getattr(cause, "status", None) not in (404, 410) else None


def hint_to_prepare(path: str) -> str:
    """Return a hint to run `prepare`, for an error message, if only `prepare` can read the file; else ""."""
    is_for_prepare = suffix_of(path) in KINDS or name_of(path).endswith(COMPRESSED)
    return ": make token shards of it with `python -m mingpt prepare`" if is_for_prepare else ""


def name_of(path: str) -> str:
    """Return a path, or a URL without its query, in lower case."""
    return (path.partition("?")[0] if "://" in path else path).lower()


def suffix_of(path: str) -> str:
    """Return the suffix of a path or URL, before that of a compression: .jsonl for a.jsonl.gz."""
    stem, suffix = os.path.splitext(name_of(path))
    return os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix


def load_named_tokenizer(name: str, setting: str = "data.tokenizer") -> Tokenizer:
    """Read a tokenizer by `read_named_tokenizer`, and parse it. Raises UserError if either fails."""
    return parse_named_tokenizer(read_named_tokenizer(name, setting), name, setting)


def parse_named_tokenizer(content: bytes, name: str, setting: str) -> Tokenizer:
    """Parse a tokenizer.json. Raises UserError if it is unusable; the message gives `setting` and `name`."""
    try:
        return parse_tokenizer_json(content)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{setting} {name} cannot be used: {error}") from None


def read_named_tokenizer(name: str, setting: str = "data.tokenizer") -> bytes:
    """Return the content of a tokenizer.json. `name` is gpt2, or a path or URL of the file or its folder.

    A folder may hold GPT-2's vocab.json and merges.txt, or encoder.json and vocab.bpe, instead: these, and
    the files that are downloaded for gpt2, are joined to a tokenizer.json. Raises UserError, which begins
    with `setting`, for files that cannot be read or used.
    """
    if name == "gpt2":
        vocab, merges = (
            read_cached(f"{GPT2_URL}/{file}", sha256, f"{setting}=gpt2:", "its fixed checksum")
            for file, sha256 in (GPT2_VOCAB, GPT2_MERGES)
        )
        return join_vocabulary(vocab, merges, f"{setting}=gpt2")
    if name.partition("?")[0].endswith(".json"):
        return download(name, setting)
    return read_folder(name.rstrip("/"), setting)


def read_folder(folder: str, setting: str) -> bytes:
    """Return the folder's tokenizer.json, or one made from GPT-2's two files. Raises UserError otherwise."""
    try:
        return download(f"{folder}/tokenizer.json", setting)
    except AbsentFile:
        pass
    for vocab_name, merges_name in PAIRS:
        try:
            vocab = download(f"{folder}/{vocab_name}", setting)
        except AbsentFile:
            continue
        merges = download(f"{folder}/{merges_name}", setting)
        return join_vocabulary(vocab, merges, f"{setting} {folder}")
    raise UserError(
        f"{setting} {folder} is neither gpt2, nor a .json file, nor a folder with tokenizer.json, or "
        f"vocab.json and merges.txt, or encoder.json and vocab.bpe{relative_to(folder)}; `python -m mingpt "
        "prepare --tokenizer bpe` makes a BPE of a text"
    )


def join_vocabulary(vocab: bytes, merges: bytes, source: str) -> bytes:
    """Make a tokenizer.json from GPT-2's two files. Raises UserError, naming `source`, for another form."""
    try:
        tokens = parse_json(vocab)
        ids = sorted(tokens.items(), key=lambda item: item[1])
        lines = decode_text(merges).split("\n")
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{source} has no vocabulary of GPT-2's form: {error}") from None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": name, **flags} for name, token in ids if name in END_OF_TEXT
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(ids),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()
