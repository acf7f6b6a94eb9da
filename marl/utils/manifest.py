"""A folder's manifest: every file's size and sha256, written last, so that damage shows before anything is read."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

from marl.utils.plain_files import is_plain, opener

MANIFEST = "manifest.json"
FORMAT = 1
PIECE = 1 << 20
"""Bytes that are read and hashed at a time."""


class Damaged(ValueError):
    """A folder that is not what was sealed; the message says in which way."""


def seal(folder: Path, facts: Mapping[str, Any], moves: Callable[[], None] = lambda: None) -> None:
    """Bring every file to the disk, then write the manifest: facts about the folder, and its files. ``moves`` is called as the work
    gets on."""
    files = {str(path.relative_to(folder)): _synced(path, moves) for path in files_in(folder)}
    content = {"format": FORMAT, **facts, "files": files}
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(inner)
    write(folder, content)


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest whole or not at all; a half lies beside the folder, whose files stay those that were sealed."""
    text = json.dumps({**content, "sha256": _own_digest(content)}, indent=1)
    replace_text(folder / MANIFEST, text, half=folder.parent / f".{MANIFEST}.tmp")
    sync_folder(folder)


def files_in(folder: Path) -> list[Path]:
    """All files but the manifest; a link is none, and is found missing."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in paths if path != folder / MANIFEST)


def _synced(path: Path, moves: Callable[[], None]) -> dict[str, Any]:
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        return {"sha256": _sha256(file, moves), "size": file.tell()}


def _sha256(file: FileIO, moves: Callable[[], None] = lambda: None) -> str:
    """As ``hashlib.file_digest``, whose pieces of 256 KiB acquire the GIL so often that a step in another thread slows down."""
    digest, piece = hashlib.sha256(), bytearray(PIECE)
    while size := file.readinto(piece):
        digest.update(memoryview(piece)[:size])
        moves()
    return digest.hexdigest()


def _own_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def facts_of(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises Damaged where there is none, or another one than was written."""
    try:
        with open(folder / MANIFEST, encoding="utf-8", opener=opener) as file:
            content = json.load(file)
        own = content.pop("sha256")
    except FileNotFoundError:
        raise Damaged(
            f"it holds no {MANIFEST}: incomplete, or saved by an earlier version of marl; resume with that version, or begin "
            "a new run from its weights (model.path=…/<policy>/actor/huggingface)"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"its {MANIFEST} cannot be read ({type(error).__name__})") from None
    if _own_digest(content) != own:
        raise Damaged(f"its {MANIFEST} is not as it was written")
    if content["format"] != FORMAT:
        raise Damaged(f"its format is {content['format']}, and this version of marl reads {FORMAT}")
    return content


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files are all as they were sealed. Raises Damaged, naming the first that is not."""
    content = facts_of(folder)
    for name, wrong in _differences(folder, content["files"]):
        raise Damaged(f"{name} {wrong}")
    return content


def _differences(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    found = {str(path.relative_to(folder)): path for path in files_in(folder)}
    odd = (path for path in folder.rglob("*") if not is_plain(path))
    yield from ((str(path.relative_to(folder)), "is a link, or no file") for path in odd)
    yield from ((name, "is missing") for name in sorted(set(files) - set(found)))
    yield from ((name, f"is not in its {MANIFEST}: move it elsewhere") for name in sorted(set(found) - set(files)))
    for name, wanted in files.items():
        stat = found[name].stat()
        if stat.st_size != wanted["size"]:
            yield name, f"has {stat.st_size} bytes, and {wanted['size']} were written"
        elif _digest(found[name], stat.st_size, stat.st_mtime_ns, stat.st_ino) != wanted["sha256"]:
            yield name, "has another sha256 than was written"


@lru_cache(4096)  # a run reads its checkpoint's files before it starts, and again when it resumes
def _digest(path: Path, *_unchanged: int) -> str:
    with open(path, "rb", buffering=0) as file:
        return _sha256(file)


def replace_text(path: Path, text: str, half: Path | None = None) -> None:
    """Write a file whole or not at all. ``half``: its name until then, by default one beside it."""
    temporary = half or path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk, where there is such a file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: a rename is lost with the power until then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
