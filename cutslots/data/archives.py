"""Files in tar and zip archives, read without unpacking them to disk."""

from __future__ import annotations

import contextlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

ARCHIVE_EXTENSIONS = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_MEMBER_BYTES = 2**24  # of a file in an archive


def list_archive(path: Path) -> Iterator[str]:
    """Yield the names of the files in a tar or zip."""
    with _archive_errors(path):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                yield from (info.filename for info in archive.infolist() if not info.is_dir())
        else:
            with tarfile.open(path, "r:*") as tar:
                yield from (member.name for member in tar if member.isfile())
                assert tar.fileobj is not None
                tar.fileobj.seek(tar.offset)  # tarfile stops silently at a damaged header or at the end of the file
                if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise EOFError


def read_archive(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each wanted file, in the order of the archive."""
    with _archive_errors(path):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if not info.is_dir() and wanted(info.filename):
                        _check_size(f"{path}, {info.filename}", info.file_size)
                        yield info.filename, archive.read(info)
        else:
            with tarfile.open(path, "r|*") as tar:
                for member in tar:
                    if member.isfile() and wanted(member.name):
                        _check_size(f"{path}, {member.name}", member.size)
                        file = tar.extractfile(member)
                        assert file is not None
                        data = file.read()
                        if len(data) != member.size:
                            raise EOFError
                        yield member.name, data


def _check_size(name: str, size: int) -> None:
    if size > MAX_MEMBER_BYTES:
        raise ValueError(f"{name} has {size:,} bytes; expected at most {MAX_MEMBER_BYTES:,}")


@contextlib.contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    """Re-raise errors of the archive modules as ValueErrors that name the archive."""
    try:
        yield
    except EOFError:
        raise ValueError(f"{path} ends early; expected a complete archive") from None
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        OSError,
        RuntimeError,  # encrypted, or an unknown compression
        UnicodeDecodeError,
    ) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise ValueError(f"{path} cannot be read as an archive: {reason}") from None
