# SPDX-License-Identifier: Apache-2.0
"""Where the files of a table are: a local directory, or a bucket. Whole files only, and put-if-absent for the log.

Of two processes that put a file of one name at the same time exactly one succeeds. On a local disk a file is written
under a name of its own, synced, and linked to its name: a link fails where the name is taken. In a bucket the put is
conditional. Reading never sees half a file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tensorpool.errors import Closed, ConfigError

if TYPE_CHECKING:
    from obstore import ReadableFile
    from obstore.store import S3Store

SUPPORTED: Final = "a path, file://… or s3://bucket/path"

_SCHEME: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/{1,2}(?P<rest>.*)")  # a Path has one slash left
UPLOADS: Final = 4  # at once
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LogStore(Protocol):
    """Files by their names relative to a root, with "/" between folders."""

    @property
    def uri(self) -> str:
        """The root, as Delta readers take it."""

    def read(self, name: str) -> bytes | None:
        """A whole file; None where there is none."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file whole, for good and durably, or not at all. False where there is one of this name."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file whole, over one that is there."""

    def names(self, folder: str, after: str = "") -> list[str]:
        """The names in a folder, without it, that sort behind `after`."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no mistake."""

    def place(self, files: Mapping[str, Path], *, is_durable: bool = True) -> None:
        """Put local files under these names, over what an interrupted try left there; the local ones stay.

        Raises FileNotFoundError where a local file is not there.
        """

    def open(self, name: str) -> Any:
        """What a Parquet reader takes. Raises FileNotFoundError."""

    def size(self, name: str) -> int | None:
        """Of a file in bytes; None where there is none."""

    def walk(self, folder: str) -> Iterator[tuple[str, float]]:
        """Every file in a folder and below it, with the time of its last change, in seconds."""

    def folders(self, prefix: str) -> list[str]:
        """The folders at the root whose names begin with a prefix."""

    def child(self, folder: str) -> LogStore:
        """The store of a folder."""


def open_store(place: str | Path) -> LogStore:
    """The store of a table. Raises ConfigError for a kind of place that is not supported."""
    match = _SCHEME.fullmatch(str(place))
    if match is None:
        return LocalStore(Path(place))
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme == "file":
        return LocalStore(Path("/" + rest.lstrip("/")))
    if scheme in ("s3", "s3a"):
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError("lake", str(place), "s3://bucket/path")
        return BucketStore(bucket, prefix.strip("/"))
    raise ConfigError("lake", str(place), SUPPORTED)


class LocalStore:
    """A directory. Needs a file system with hard links."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root.absolute()

    @property
    def uri(self) -> str:
        return str(self.root)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return write_once(self.root / name, data)

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        draft = _write_draft(path, data)
        try:
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def names(self, folder: str, after: str = "") -> list[str]:
        try:
            found = os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if name > after)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def place(self, files: Mapping[str, Path], *, is_durable: bool = True) -> None:
        for name, source in files.items():
            _link(source, self.root / name)
        if is_durable:
            parents = {(self.root / name).parent for name in files}
            for folder in parents | {parent.parent for parent in parents}:
                sync_directory(folder)

    def open(self, name: str) -> Any:
        path = self.root / name
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def walk(self, folder: str) -> Iterator[tuple[str, float]]:
        for place, _, names in os.walk(self.root / folder):
            for name in names:
                path = Path(place) / name
                with contextlib.suppress(FileNotFoundError):
                    yield str(path.relative_to(self.root)), path.stat().st_ctime  # a link is a change

    def folders(self, prefix: str) -> list[str]:
        return [name for name in os.listdir(self.root) if name.startswith(prefix)]

    def child(self, folder: str) -> LogStore:
        return LocalStore(self.root / folder)


class BucketStore:
    """A bucket of S3, or of what speaks its protocol and puts conditionally.

    Endpoint, region and keys come from the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ALLOW_HTTP.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.uri: Final = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._bucket, self._prefix = bucket, prefix
        self._client: Final = _client(bucket, prefix)

    @property
    def _store(self) -> S3Store:
        _check_process()
        return self._client

    def read(self, name: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def put_if_absent(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self.read(name) == data  # a retry inside the client may meet its own first try
        return True

    def put(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, name, data)

    def names(self, folder: str, after: str = "") -> list[str]:
        import obstore

        offset = f"{folder}/{after}" if after else None
        found: list[str] = []
        for page in obstore.list(self._store, f"{folder}/", offset=offset):
            found += [item["path"].removeprefix(f"{folder}/") for item in page]
        return sorted(name for name in found if "/" not in name)

    def remove(self, names: Iterable[str]) -> None:
        import obstore

        paths = list(names)
        if paths:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, paths)

    def place(self, files: Mapping[str, Path], *, is_durable: bool = True) -> None:
        import obstore

        def upload(name: str, source: Path) -> None:
            with source.open("rb") as file:
                obstore.put(self._store, name, file)

        with ThreadPoolExecutor(UPLOADS, "tensorpool-upload") as threads:
            for done in [threads.submit(upload, name, source) for name, source in files.items()]:
                done.result()

    def open(self, name: str) -> Any:
        import obstore

        return _Remote(obstore.open_reader(self._store, name))

    def size(self, name: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    def walk(self, folder: str) -> Iterator[tuple[str, float]]:
        import obstore

        for page in obstore.list(self._store, f"{folder}/" if folder else None):
            for item in page:
                yield item["path"], item["last_modified"].timestamp()

    def folders(self, prefix: str) -> list[str]:
        import obstore

        found = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return [name.rstrip("/") for name in found if name.startswith(prefix)]

    def child(self, folder: str) -> LogStore:
        return BucketStore(self._bucket, f"{self._prefix}/{folder}".strip("/"))


class _Remote(io.RawIOBase):
    """A file in a bucket, as Python's own files are."""

    def __init__(self, file: ReadableFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        return bytes(self._file.read(None if size < 0 else size))


def _client(bucket: str, prefix: str) -> S3Store:
    from obstore.store import S3Store

    _check_process()
    options: dict[str, Any] = {"prefix": prefix} if prefix else {}
    return S3Store(bucket, **options)


_buckets_used_by: int | None = None  # the process whose threads do the requests


def _check_process() -> None:
    """obstore's threads are not in a forked child, which would wait for them without end."""
    global _buckets_used_by
    _buckets_used_by = _buckets_used_by or os.getpid()
    if _buckets_used_by != os.getpid():
        raise Closed(
            f"process {_buckets_used_by} used a bucket and then forked this one, in which the library for buckets does "
            "not work: start processes by multiprocessing's 'forkserver' or 'spawn'"
        )


def write_once(path: Path, data: bytes) -> bool:
    """Write a file whole and for good, or not at all; False where it is there already.

    Raises ConfigError on a file system without hard links.
    """
    draft = _write_draft(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise ConfigError("lake", str(path.parent), f"a file system with hard links ({error})") from None
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def _link(source: Path, target: Path) -> None:
    """Give a file a second name. What is there from an earlier try is the same file, or of no worth."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        if not os.path.samefile(source, target):
            draft = target.with_name(f".{uuid.uuid4().hex}")
            os.link(source, draft)
            os.replace(draft, target)


def sync_directory(folder: Path) -> None:
    """Make names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_draft(path: Path, data: bytes) -> Path:
    """The bytes, synced, under a name of its own."""
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft
