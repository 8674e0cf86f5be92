"""Files of Hugging Face repositories: names and revisions are asked of the hub, bytes are read by ranges.

Everything about the hub (its address, the token, being offline) is ``huggingface_hub``'s: it reads HF_ENDPOINT,
HF_TOKEN and the stored login. A branch is turned into a commit first, so that all ranges come from one state of
the repository.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator.errors import DownloadError, InputError
from orchestrator.models.locations import HubLocation


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file at one commit; ``headers`` carry the token where there is one."""

    repository: str
    file: str
    commit: str
    url: str
    siblings: Mapping[str, str]  # name of a file in the same folder -> address
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def find_on_hub(location: HubLocation) -> HubFile:
    """Find the file, or the first part, that a location means, at the commit that its revision is now.

    Raise :class:`DownloadError` where repository, revision or file do not exist or may not be read, and
    :class:`InputError` for a pattern that several models fit.
    """
    try:
        import huggingface_hub  # takes half a second, which no other command should pay
    except ImportError as error:
        raise DownloadError(
            f"{location}: the Python package huggingface_hub is missing", hint="pip install huggingface_hub"
        ) from error
    with _in_words(location):
        info = huggingface_hub.HfApi().model_info(location.repository, revision=location.revision)
        token = huggingface_hub.get_token()
    commit, names = info.sha or "", sorted(sibling.rfilename for sibling in info.siblings or ())
    file = _choose(location, names)
    folder = file.rpartition("/")[0]

    def address(name: str) -> str:
        return huggingface_hub.hf_hub_url(location.repository, name, revision=commit)

    return HubFile(
        location.repository,
        file,
        commit,
        address(file),
        {name.rpartition("/")[2]: address(name) for name in names if name.rpartition("/")[0] == folder},
        {"Authorization": f"Bearer {token}"} if token else {},
    )


def _choose(location: HubLocation, names: list[str]) -> str:
    if location.file in names:
        return location.file
    fitting = [name for name in names if fnmatch.fnmatchcase(name, location.file) and name.endswith(".gguf")]
    # Of a model in parts only the first is opened; the others are found from it.
    first = [name for name in fitting if "-of-" not in name or "-00001-of-" in name]
    if len(first) == 1:
        return first[0]
    if not first:
        ggufs = [name for name in names if name.endswith(".gguf")]
        hint = (
            f"it has {', '.join(ggufs[:8])}{' ...' if len(ggufs) > 8 else ''}" if ggufs else "it has no GGUF at all"
        )
        raise DownloadError(f"{location.repository} has no file {location.file}", hint=hint)
    raise InputError(f"{location.file} fits several models in {location.repository}", hint=f"{', '.join(first[:8])}")


@contextmanager
def _in_words(location: HubLocation) -> Iterator[None]:
    from huggingface_hub import errors

    repository = location.repository
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated: its terms must be accepted first",
            hint=f"accept them at https://huggingface.co/{repository} and set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"{repository} has no revision {location.revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"there is no repository {repository}, or it is private", hint="check the name, or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise InputError(f"{location} is no usable address: {error}") from error
    except (errors.OfflineModeIsEnabled, OSError) as error:  # HTTP and connection errors derive from OSError
        raise DownloadError(f"{repository}: the hub cannot be asked: {_first_line(error)}") from error
    except Exception as error:  # the client's own transport errors share no base with ours across its versions
        if type(error).__module__.partition(".")[0] not in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}:
            raise
        raise DownloadError(f"{repository}: the hub cannot be asked: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
