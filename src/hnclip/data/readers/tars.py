"""What lies in a tar file, and where: headers are read, contents are not."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from hnclip.core import Problem
from hnclip.data.pictures import TarImage

_COMPRESSED = {b"\x1f\x8b": "gunzip -k", b"BZh": "bunzip2 -k", b"\xfd7zXZ": "unxz -k", b"(\xb5/\xfd": "unzstd"}


@dataclass(frozen=True)
class TarIndex:
    """The files in a tar, in their order, and what is wrong with it. A name that comes twice is the later file."""

    path: Path
    files: dict[str, tuple[int, int]]
    """Offset and size of each file by its name, without a leading `./`."""
    problems: tuple[Problem, ...] = ()

    def image(self, name: str) -> TarImage:
        return TarImage(self.path, name, *self.files[name])


def index_tar(path: Path) -> TarIndex:
    """Index an uncompressed tar. One that is damaged or ends early keeps what comes before, with a problem."""
    with path.open("rb") as file:
        start = file.read(8)
        for magic, command in _COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(
                    f"{path} is compressed, and pictures inside cannot be read in place: run `{command} {path}` and "
                    "use the .tar that it writes"
                )
        total = file.seek(0, 2)
        file.seek(0)
        try:
            tar = tarfile.TarFile(fileobj=file)
        except tarfile.TarError as error:
            raise ValueError(f"{path} is no tar file: {error}") from error
        files: dict[str, tuple[int, int]] = {}
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # they add up; only the place is of use
                if member.offset_data + member.size > total:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                # Links have no content of their own, sparse files not in one piece.
                if member.isreg() and not member.issparse():
                    files[member.name.removeprefix("./")] = (member.offset_data, member.size)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes anything but a header for the end
                raise tarfile.ReadError("bad header")
        except tarfile.TarError as error:
            detail = f"the tar file is damaged or incomplete ({error}); {len(files)} files before that are used"
            return TarIndex(path, files, (Problem("unreadable row", str(path), detail),))
    return TarIndex(path, files)
