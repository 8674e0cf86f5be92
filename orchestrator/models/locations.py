"""Where a model lies: a file of this machine, an address on an HTTP server, a file in a Hugging Face repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from orchestrator.errors import InputError

_HUGGING_FACE: Final = "hf://"
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION: Final = re.compile(r"[\w./-]+")
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class HttpLocation:
    """A file on an HTTP(S) server."""

    url: str

    @property
    def name(self) -> str:
        """The file's own name: the last step of the path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def sibling(self, name: str) -> str:
        """Return the address of a file beside this one."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}"))


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A file of a Hugging Face repository; ``file`` may be a pattern, ``revision`` a branch, a tag or a commit."""

    repository: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{_HUGGING_FACE}{self.repository}/{self.file}" + (f"@{self.revision}" if self.revision else "")


Location = Path | HttpLocation | HubLocation


def parse_location(text: str) -> Location:
    """Read ``https://...``, ``hf://OWNER/REPOSITORY/FILE[@REVISION]`` or a path.

    Raise :class:`InputError` for an address that cannot be one. ``hf://OWNER/REPOSITORY@REVISION/FILE``, as other
    programs write it, is understood too.
    """
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in {"http", "https"}:
        location = HttpLocation(text)
        try:
            host = urlsplit(text).hostname
        except ValueError as error:
            raise InputError(f"{text} is no usable address: {error}") from error
        if not host or not _is_plain(location.name):
            raise InputError(f"{text} names no file on a server")
        return location
    if scheme == "hf":
        return _hub(text)
    if scheme:
        raise InputError(f"{text}: {scheme}:// is not supported", hint="use http(s)://, hf:// or a path")
    return Path(text)


def part_names(name: str, count: int) -> list[str] | None:
    """Return the names of all parts of a model of which ``name`` is the first, or nothing where it is not."""
    match = _PART.fullmatch(name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        return None
    return [f"{match[1]}-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]


def _hub(text: str) -> HubLocation:
    repository, _, file = _split(text[len(_HUGGING_FACE) :])
    revision: str | None = None
    if "@" in repository:
        repository, _, revision = repository.partition("@")
    elif "@" in file:
        file, _, revision = file.rpartition("@")
    if not _REPOSITORY.fullmatch(repository) or not file or not _is_plain(file.rpartition("/")[2]):
        raise InputError(f"{text} names no file", hint="write it like hf://OWNER/REPOSITORY/FILE.gguf@REVISION")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise InputError(f"{text}: {revision!r} is no revision")
    return HubLocation(repository, file, revision)


def _split(rest: str) -> tuple[str, str, str]:
    owner, _, rest = rest.partition("/")
    repository, slash, file = rest.partition("/")
    return f"{owner}/{repository}", slash, file


def _is_plain(name: str) -> bool:
    """Tell whether a name can stand for a file in one of our folders."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name and len(name) < 200
