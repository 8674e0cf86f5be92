"""The only reader of environment variables and settings files, and the place that decides where files live.

Folders follow one rule, tried in this order, and the first that can be written wins:

1. the environment variable (``LINKCPP_DATA``, ``LINKCPP_CACHE``): it was asked for, so failing is an error;
2. the platform's folder of the user (on Linux ``~/.local/share/linkcpp`` and ``~/.cache/linkcpp``);
3. ``/var/tmp/linkcpp-UID/data`` or ``/cache``, else the same below the temporary folder, private to the user.

Step 3 is what a daemon gets that was started with an empty environment and has no home folder. Nothing here
looks at the current folder unless a variable holds a relative path.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import platformdirs

from orchestrator.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomlkit reads the same files and is a dependency anyway
    import tomlkit as tomllib

APPLICATION: Final = "linkcpp"
DEFAULT_CACHE_LIMIT: Final = 10_000_000_000

_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)


def setting(name: str) -> str | None:
    """Return an environment variable, or ``None`` where it is unset or blank."""
    value = os.environ.get(name, "").strip()
    return value or None


def api_key() -> str | None:
    """Return the key to send to servers that ask for one: ``LINKCPP_API_KEY``."""
    return setting("LINKCPP_API_KEY")


def data_dir() -> Path:
    """Return the folder for what must be kept (models, gate results), creating it; ``LINKCPP_DATA`` overrides."""
    return _folder("LINKCPP_DATA", "data", _user_folder("user_data_dir"))


def cache_dir() -> Path:
    """Return the folder for what can be made again (hashes, downloads), creating it; ``LINKCPP_CACHE`` overrides."""
    return _folder("LINKCPP_CACHE", "cache", _user_folder("user_cache_dir"))


def models_dir() -> Path:
    """Return the folder of model files inside :func:`data_dir`, creating it."""
    folder = data_dir() / "models"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}") from error
    return folder


def cache_limit() -> int:
    """Return how many bytes downloaded pieces may take in the cache: ``LINKCPP_CACHE_LIMIT``, else 10 GB; 0: none.

    The variable is a number of bytes or one with a unit, like ``500MB`` or ``20 GiB``.
    """
    asked = setting("LINKCPP_CACHE_LIMIT")
    return DEFAULT_CACHE_LIMIT if asked is None else parse_size(asked, what="LINKCPP_CACHE_LIMIT")


def parse_size(text: str, *, what: str = "size") -> int:
    """Read a number of bytes with an optional unit (kB, MB, GB, TB or KiB to TiB); raise :class:`ConfigError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{what} {text!r} is no size", hint="write it like 500MB or 20GiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def load_toml(path: Path) -> Mapping[str, object]:
    """Read a TOML file; raise :class:`ConfigError` where it is unreadable or no TOML."""
    try:
        document: Mapping[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # both parsers' errors and UnicodeDecodeError derive from it
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return document


def _user_folder(kind: str) -> Path | None:
    """Return the platform's folder, or nothing where the user has no home (a bare uid in a container)."""
    try:
        folder = Path(str(getattr(platformdirs, kind)(APPLICATION, appauthor=False)))
    except (RuntimeError, KeyError, OSError):
        return None
    return folder if folder.is_absolute() else None


def _fallbacks(kind: str) -> Iterator[Path]:
    user = getattr(os, "getuid", lambda: "user")()
    bases = [Path("/var/tmp")]
    with contextlib.suppress(OSError):  # gettempdir fails where no candidate at all is writable
        bases.append(Path(tempfile.gettempdir()))
    for base in bases:
        yield base / f"{APPLICATION}-{user}" / kind


def _folder(variable: str, kind: str, preferred: Path | None) -> Path:
    asked = setting(variable)
    if asked is not None:
        try:
            folder = Path(asked).absolute()
        except OSError as error:  # the current folder was deleted
            raise ConfigError(f"{variable}={asked!r} is relative and there is no current folder") from error
        problem = _prepare(folder)
        if problem:
            raise ConfigError(
                f"{variable}={asked!r} cannot be used: {problem}", hint="name a folder you can write to"
            )
        return folder
    problems = []
    if preferred is not None:
        problem = _prepare(preferred)
        if problem is None:
            return preferred
        problems.append(f"{preferred}: {problem}")
    for folder in _fallbacks(kind):
        # The shared temporary folders are writable by everybody: somebody else may have made ours before us.
        problem = _prepare(folder.parent, private=True) or _prepare(folder)
        if problem is None:
            return folder
        problems.append(f"{folder}: {problem}")
    raise ConfigError(f"no folder for {kind} can be written ({'; '.join(problems)})", hint=f"set {variable}")


def _prepare(folder: Path, *, private: bool = False) -> str | None:
    """Create a folder and check that it can be used; return what is wrong, or nothing."""
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        status = folder.lstat() if private else folder.stat()
    except OSError as error:
        return error.strerror or type(error).__name__
    if private and hasattr(os, "getuid") and (status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode)):
        return "it belongs to somebody else"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it is not writable"
    return None
