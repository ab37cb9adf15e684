"""Repositories on the Hugging Face hub, of models and of data sets: what is in them, fetched once, each failure worded.

The cache, the endpoint, the token and offline mode are the client's own: HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from vitrail.errors import BundleError, DataError, SaveError, nearest

__all__ = ["Repository", "cached_folder", "client", "fetch", "keep_branch", "listing", "parse"]

NAME = re.compile(
    r"(?P<name>(?![^@]*(?:--|\.\.|\.git$|\.git@))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./+-]*))?",
    re.ASCII,
)
"""What the hub allows as a repository's name. No dots in a row in a revision either: it becomes a path in the cache."""


class Repository(NamedTuple):
    """A repository at a revision."""

    kind: Literal["model", "dataset"]
    given: str
    """As the user gave it, for messages."""
    name: str
    """org/name"""
    revision: str
    """A branch, a tag or a commit."""

    @property
    def title(self) -> str:
        return f"{'model' if self.kind == 'model' else 'data'} {self.given!r}"

    @property
    def error(self) -> type[BundleError] | type[DataError]:
        """What is raised where the user can mend it."""
        return BundleError if self.kind == "model" else DataError

    @property
    def page(self) -> str:
        folder = "" if self.kind == "model" else "datasets/"
        return f"{client().constants.ENDPOINT}/{folder}{self.name}"


def parse(kind: Literal["model", "dataset"], given: str, text: str) -> Repository | None:
    """The repository that `text` names as "org/name" or "org/name@revision"; None where it does not."""
    match = NAME.fullmatch(text)
    return None if match is None else Repository(kind, given, match["name"], match["revision"] or "main")


@functools.cache
def client() -> ModuleType:
    """huggingface_hub, imported at first use: what is on disk does without it."""
    for part in ("constants", "errors"):
        importlib.import_module(f"huggingface_hub.{part}")
    return importlib.import_module("huggingface_hub")


def listing(repository: Repository) -> tuple[str, list[str]] | str:
    """The commit that the revision stands for, and its files; or why the hub cannot be asked.

    Raises what `Repository.error` names where the hub says that there is no such thing, or refuses it.
    """
    hub = client()
    if hub.constants.HF_HUB_OFFLINE:
        return "offline mode is on (HF_HUB_OFFLINE)"
    # Which exceptions a lost connection raises depends on the client's version: it has changed its HTTP library twice.
    try:
        found = hub.HfApi().repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
        )
        return str(found.sha), [file.rfilename for file in found.siblings or ()]
    except Exception as error:
        _raise_if_final(repository, error)
        if isinstance(error, hub.errors.HfHubHTTPError):
            return f"the hub at {hub.constants.ENDPOINT} is out of order ({error.response.status_code})"
        return f"there is no network to the hub at {hub.constants.ENDPOINT} ({_line(error)})"


def fetch(repository: Repository, commit: str, file: str, *, attempts: int = 1) -> Path:
    """The path in the cache of a file, fetched unless it is there. A connection that is lost is taken up again by the
    client, and after that `attempts` times by us. Raises `Repository.error`, or `SaveError` for the disk."""
    hub = client()
    for attempt in range(attempts):
        try:
            return Path(hub.hf_hub_download(repository.name, file, repo_type=repository.kind, revision=commit))
        except Exception as error:  # whichever, as above
            cause = error.__cause__
            if isinstance(error, hub.errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
                error = cause  # it could not ask for the file's size, and says so in general terms
            _raise_if_final(repository, error)
            reason = _line(error)
        if attempt + 1 < attempts:
            time.sleep(2**attempt)
    raise repository.error(
        f"the download of {file} of {repository.title} broke off ({reason}); what has arrived whole is kept in the "
        f"cache {hub.constants.HF_HUB_CACHE}, so try again"
    )


def keep_branch(repository: Repository, commit: str, file: str) -> None:
    """Notes for use offline that the branch stands for `commit`, of which `file` is in the cache.

    The client notes this when it asks for a file by the branch. Call it last, so that a download which breaks off
    leaves the branch at the commit that is whole.
    """
    if commit != repository.revision:
        with contextlib.suppress(Exception):
            client().hf_hub_download(repository.name, file, repo_type=repository.kind, revision=repository.revision)


def cached_folder(repository: Repository, why: str) -> Path:
    """The folder as earlier downloads left it, whole or not; `why` says for messages why the hub is not asked."""
    hub = client()
    try:  # no patterns: which files are needed is for the caller to say, and not all of the repository's are
        return Path(
            hub.snapshot_download(
                repository.name,
                repo_type=repository.kind,
                revision=repository.revision,
                local_files_only=True,
                allow_patterns=[],
            )
        )
    except hub.errors.LocalEntryNotFoundError:
        place = "neither a file or folder here nor" if repository.kind == "model" else "not"
        raise repository.error(
            f"{repository.title} is {place} in the cache {hub.constants.HF_HUB_CACHE}, and {why}"
        ) from None
    except OSError as error:
        raise repository.error(f"{repository.title} cannot be read from the cache ({error}), and {why}") from None


def _raise_if_final(repository: Repository, error: Exception) -> None:
    """For what the hub says against the request, or this machine's disk; not where it could not be asked or is ill."""
    hub = client()
    title = repository.title
    # Only the system's own errors have a number: those of the HTTP libraries, which are of the same class, have none.
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        raise SaveError(f"{title} cannot be kept in {hub.constants.HF_HUB_CACHE}: {error}") from None
    if not isinstance(error, hub.errors.HfHubHTTPError):
        return
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = error.response.status_code
    if isinstance(error, hub.errors.GatedRepoError):
        text = f"{title} is gated: ask for access at {repository.page}, then {log_in}"
    elif isinstance(error, hub.errors.RepositoryNotFoundError):
        place = "neither a file or folder here nor a repository" if repository.kind == "model" else "not a data set"
        text = f"{title} is {place} at {hub.constants.ENDPOINT}; if it is a private one, {log_in}"
    elif isinstance(error, hub.errors.RevisionNotFoundError):
        what = repository._replace(given=repository.name).title
        text = f"{what} has no revision {repository.revision!r}{_revisions(repository)}"
    elif status in (401, 403):
        text = f"access to {title} is refused ({_line(error)}): see {repository.page}, and {log_in}"
    elif status in (408, 429) or status >= 500:
        return
    else:
        text = f"the hub refuses {title} ({_line(error)})"
    raise repository.error(text) from None


def _revisions(repository: Repository) -> str:
    """The end of the message about one that does not exist."""
    with contextlib.suppress(Exception):  # there is a message to give, with or without it
        refs = client().HfApi().list_repo_refs(repository.name, repo_type=repository.kind)
        return "; " + nearest(repository.revision, [ref.name for ref in (*refs.branches, *refs.tags)])
    return ""


def _line(error: Exception) -> str:
    """The client's messages run over several lines, and some of requests over hundreds of characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
