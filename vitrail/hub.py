"""Repositories of models and data sets on the Hugging Face hub: their files, downloads, and messages for failures.

The client's environment variables set the cache, the endpoint, the token and offline mode: HF_HOME, HF_ENDPOINT,
HF_TOKEN and HF_HUB_OFFLINE.
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
from vitrail.files import sha256

NAME = re.compile(
    r"(?P<name>(?![^@]*(?:--|\.\.|\.git$|\.git@))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./+-]*))?",
    re.ASCII,
)
"""Names that the hub allows, with an optional revision. A revision with two dots in a row is refused, because it would
become a path in the cache."""


class Repository(NamedTuple):
    """A repository at a revision."""

    kind: Literal["model", "dataset"]
    given: str
    """The name as the user spelled it, for messages."""
    name: str
    """The name on the hub, as org/name."""
    revision: str
    """A branch, a tag or a commit."""

    @property
    def title(self) -> str:
        return f"{'model' if self.kind == 'model' else 'data'} {self.given!r}"

    @property
    def error(self) -> type[BundleError] | type[DataError]:
        """The class of the errors that the user can correct: `BundleError` for a model, `DataError` for a data set."""
        return BundleError if self.kind == "model" else DataError

    @property
    def page(self) -> str:
        return f"{client().constants.ENDPOINT}/{'' if self.kind == 'model' else 'datasets/'}{self.name}"


def parse(kind: Literal["model", "dataset"], given: str, text: str) -> Repository | None:
    """Return the repository that `text` names as "org/name" or "org/name@revision". For any other text, return None."""
    match = NAME.fullmatch(text)
    return None if match is None else Repository(kind, given, match["name"], match["revision"] or "main")


@functools.cache
def client() -> ModuleType:
    """Return the module huggingface_hub. The module is imported at the first use, so that models on disk load without
    it."""
    for part in ("constants", "errors"):
        importlib.import_module(f"huggingface_hub.{part}")
    return importlib.import_module("huggingface_hub")


def listing(repository: Repository) -> tuple[str, list[str]] | str:
    """Return the commit of the revision and the names of its files. If the hub cannot be reached, return the reason
    instead.

    Raise `Repository.error` if the hub does not have the repository or the revision, or refuses access.
    """
    hub = client()
    if hub.constants.HF_HUB_OFFLINE:
        return "offline mode is on (HF_HUB_OFFLINE)"
    # Exceptions of a lost connection depend on the client's version, which has changed its HTTP library twice.
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
            return f"the hub at {hub.constants.ENDPOINT} answers with an error ({error.response.status_code})"
        return f"the hub at {hub.constants.ENDPOINT} cannot be reached ({_line(error)})"


def fetch(repository: Repository, commit: str, file: str, *, attempts: int = 1) -> Path:
    """Download a file unless it is in the cache, and return its path there.

    The client resumes a download after a lost connection. If the client gives up, the download is tried again, up to
    `attempts` times in all. A downloaded file that does not have the SHA-256 that the hub states is deleted.

    Raise `Repository.error`, or `SaveError` if the cache cannot be written.
    """
    hub = client()
    known = hub.try_to_load_from_cache(repository.name, file, repo_type=repository.kind, revision=commit)
    for attempt in range(attempts):
        try:
            path = Path(hub.hf_hub_download(repository.name, file, repo_type=repository.kind, revision=commit))
            stored = path.resolve()  # a large file in the cache is called by its SHA-256
            needs_check = not isinstance(known, str) and stored.parent.name == "blobs" and len(stored.name) == 64
            if not needs_check or sha256(stored) == stored.name:
                return path
            stored.unlink()
            reason = "its SHA-256 is not the one that the hub states"
        except Exception as error:  # any exception, as in `listing`
            cause = error.__cause__
            if isinstance(error, hub.errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
                error = cause  # the cause has the reason why the client could not ask for the file's size
            _raise_if_final(repository, error)
            reason = _line(error)
        if attempt + 1 < attempts:
            time.sleep(2**attempt)
    raise repository.error(
        f"{file} of {repository.title} could not be downloaded: {reason}. Run the command again; finished files are "
        f"kept in {hub.constants.HF_HUB_CACHE}."
    )


def keep_branch(repository: Repository, commit: str, file: str) -> None:
    """Record in the cache that the branch points to `commit`, so that the branch can be used offline.

    `file` is a file of this commit in the cache. The client records the branch when a file is requested by the branch's
    name. Call this function after all files of the commit are downloaded, so that the branch never points to an
    incomplete commit.
    """
    if commit != repository.revision:
        with contextlib.suppress(Exception):
            client().hf_hub_download(repository.name, file, repo_type=repository.kind, revision=repository.revision)


def cached_folder(repository: Repository, why: str) -> Path:
    """Return the cached folder of a repository, which can be incomplete. Raise `Repository.error` if there is no such
    folder.

    `why` is the reason why the hub cannot be used, for the error message.
    """
    hub = client()
    try:  # no patterns, because the caller knows which of the repository's files are needed
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


def from_cache(repository: Repository, why: str) -> str:
    """Return the note that a repository was read from the cache. `why` is the reason why the hub cannot be used."""
    return f"{repository.title} was read from the cache, which can lack files or have older ones, because {why}"


def _raise_if_final(repository: Repository, error: Exception) -> None:
    """Raise an error for the user if the hub refuses the request or the disk fails.

    If the hub could not be reached or had an internal error, return, because another attempt or the cache may help.
    """
    hub = client()
    title = repository.title
    # Errors of the HTTP libraries have the same class as those of the operating system, but no error number.
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        raise SaveError(f"{title} cannot be written to the cache {hub.constants.HF_HUB_CACHE}: {error}") from None
    if not isinstance(error, hub.errors.HfHubHTTPError):
        return
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = error.response.status_code
    if isinstance(error, hub.errors.GatedRepoError):
        text = f"{title} is gated: ask for access at {repository.page}, then {log_in}"
    elif isinstance(error, hub.errors.RepositoryNotFoundError):
        place = "neither a file or folder here nor a repository" if repository.kind == "model" else "not a data set"
        text = f"{title} is {place} at {hub.constants.ENDPOINT}; if it is private, {log_in}"
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
    """Return the end of the message about a revision that does not exist, with similar names."""
    with contextlib.suppress(Exception):  # without this end, the message is still useful
        refs = client().HfApi().list_repo_refs(repository.name, repo_type=repository.kind)
        return "; " + nearest(repository.revision, [ref.name for ref in (*refs.branches, *refs.tags)])
    return ""


def _line(error: Exception) -> str:
    """Return the client's message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
