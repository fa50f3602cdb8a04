"""Sends requests to the hub through its own client library, so that HF_ENDPOINT, HF_TOKEN, a login and proxies have their usual
effect.

The library's download starts an interrupted file again from the beginning, so files are fetched with its `http_get`, which takes an
offset.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, validate_repo_id
from huggingface_hub.utils.logging import set_verbosity_error

from daemon.cli.client import CommandError
from daemon.cli.pull.plan import Repo, RepoFile
from daemon.errors import EXIT_BUSY, EXIT_DENIED, EXIT_NO_FIT, EXIT_NOT_FOUND, EXIT_USAGE

# the error class of the HTTP client in the installed version of the library
_TransportError: type[Exception] = HfHubHTTPError.__bases__[0]
_MAX_TEXT_BYTES = 64 << 20


class Hub:
    """A client of the Hugging Face hub. All methods raise CommandError, whose message is one line that says what to do."""

    def __init__(self) -> None:
        disable_progress_bars()
        set_verbosity_error()
        self._api = HfApi()
        # Compressed answers can't be resumed at an offset of the file.
        self._headers = build_hf_headers(library_name="hearthd") | {"Accept-Encoding": "identity"}

    @property
    def endpoint(self) -> str:
        return self._api.endpoint

    def repo(self, name: str, revision: str | None) -> Repo:
        """Returns a commit with its files: the current commit of a branch or tag, or the given commit. revision: None for the main
        branch."""
        with self._explained(name, revision):
            validate_repo_id(name)
            info = self._api.model_info(name, revision=revision, files_metadata=True)
        files = {}
        for one in info.siblings or ():
            digest = f"sha256:{one.lfs.sha256}" if one.lfs is not None else f"git:{one.blob_id}"
            files[one.rfilename] = RepoFile(one.rfilename, one.size or 0, digest)
        return Repo(name, info.sha or "", files)

    def text(self, repo: Repo, file: RepoFile) -> bytes:
        """Returns the content of a small file of the repository. Raises CommandError for a file of more than _MAX_TEXT_BYTES."""
        if file.size_bytes > _MAX_TEXT_BYTES:
            raise _error(EXIT_USAGE, "unsupported_model", f"{repo.name}: {file.name} is too long ({file.size_bytes} bytes)")
        buffer = io.BytesIO()
        self.fetch(repo, file, buffer, 0)
        return buffer.getvalue()

    def fetch(self, repo: Repo, file: RepoFile, sink: BinaryIO, begin: int) -> None:
        """Downloads a file of the repository from its byte `begin` on and writes it to `sink`, which is positioned there. If the
        hub sends the whole file instead, the sink is rewound and truncated first."""
        with self._explained(repo.name, repo.commit):
            url = hf_hub_url(repo.name, file.name, revision=repo.commit, endpoint=self.endpoint)
            http_get(url, sink, resume_size=begin, headers=self._headers)

    @contextmanager
    def _explained(self, name: str, revision: str | None) -> Iterator[None]:
        again = "run the same command again, it goes on where it was"
        token = "log in with `hf auth login` or set HF_TOKEN to a token that may read it"
        try:
            yield
        except HFValidationError:
            message = f"{name!r} is no name of a repository; write it as ORG/NAME, as the hub's address does"
            raise _error(EXIT_USAGE, "invalid_request", message) from None
        except GatedRepoError:
            message = f"{name} is gated: accept its terms at {self.endpoint}/{name}, then {token}"
            raise _error(EXIT_DENIED, "gated", message) from None
        except RevisionNotFoundError:
            message = f"{name} has no revision {revision!r}; --revision takes a branch, a tag or a commit"
            raise _error(EXIT_NOT_FOUND, "revision_not_found", message) from None
        except RepositoryNotFoundError:
            message = f"{self.endpoint} has no {name}; correct the name, or set HF_TOKEN if the repository is private"
            raise _error(EXIT_NOT_FOUND, "repo_not_found", message) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                message = f"{self.endpoint} refuses {name} ({status}): {token}"
                raise _error(EXIT_DENIED, "permission_denied", message) from None
            raise _error(EXIT_BUSY, "hub_failed", f"{self.endpoint} answers {status} for {name}; {again}") from None
        except OfflineModeIsEnabled:
            raise _error(EXIT_BUSY, "unreachable", "HF_HUB_OFFLINE is set, so the hub is not asked; unset it") from None
        except _TransportError as error:
            message = f"no connection to {self.endpoint} ({error}); check network, proxy and HF_ENDPOINT, then {again}"
            raise _error(EXIT_BUSY, "unreachable", message) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _error(EXIT_NO_FIT, "no_space", f"{name}: {error.strerror}; make room, then {again}") from None
            if error.errno is not None:
                raise
            # raised by http_get if a body ended early
            raise _error(EXIT_BUSY, "unreachable", f"{self.endpoint} sent too little of {name}; {again}") from None


def _error(exit_code: int, code: str, message: str) -> CommandError:
    return CommandError(exit_code, {"code": code, "message": message, "details": {}})
