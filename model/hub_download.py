"""Single files of one repository on the Hugging Face Hub, and its failures in words that say what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from monograph.errors import CheckpointError, HubError, MonographError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OFFLINE = "allow the network (unset HF_HUB_OFFLINE, local_files_only=False), or fetch the model once while it is there"
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


class Repository:
    """Files of one repository at one revision, through the cache of `huggingface_hub`.

    Attributes:
        repo_id: As "org/name".
        revision: Branch, tag or commit; None for the main branch.
    """

    def __init__(self, repo_id: str, revision: str | None, token: str | None, local_files_only: bool) -> None:
        self.repo_id = repo_id
        self.revision = revision
        self._token = token
        self._offline = local_files_only or constants.HF_HUB_OFFLINE

    def fetch(self, name: str) -> Path:
        """Return the local path of a file that must be there. Raises what `absent` says if it is not."""
        path = self._fetch(name, trust_absence=False)
        if path is None:
            raise self.absent(name)
        return path

    def fetch_if_there(self, name: str) -> Path | None:
        """Return the local path of a file, downloading it if need be, or None if there is no such file.

        Offline, "there" means in the cache.

        Raises:
            HubError: The repository cannot be reached, or does not let us in.
        """
        return self._fetch(name, trust_absence=True)

    def _fetch(self, name: str, trust_absence: bool) -> Path | None:
        cached = huggingface_hub.try_to_load_from_cache(self.repo_id, name, revision=self.revision)
        pinned = self.revision is not None and _COMMIT.fullmatch(self.revision) is not None
        if isinstance(cached, str) and (pinned or self._offline):
            return Path(cached)
        # Neither None nor a path stands for a file that this commit was once found not to have.
        if self._offline or (trust_absence and pinned and cached is not None):
            return None
        try:
            return Path(huggingface_hub.hf_hub_download(self.repo_id, name, revision=self.revision, token=self._token))
        except errors.LocalEntryNotFoundError as fault:
            reason = fault.__cause__ or fault
            raise self._error(name, reason) from fault
        except errors.EntryNotFoundError:
            return None
        except MonographError:
            raise
        except Exception as fault:
            # The HTTP libraries under the Hub's raise classes of their own, which differ between versions.
            error = self._error(name, fault)
            if self._secrets() & set(_words(str(fault))):
                raise error from None
            raise error from fault

    def absent(self, what: str, hint: str = "") -> MonographError:
        """Return the error for a file that a model must have and that `fetch_if_there` did not find."""
        if self._offline:
            return HubError(f"{self.repo_id}: {what} is not in the cache {constants.HF_HUB_CACHE}; {_OFFLINE}")
        return CheckpointError(f"{self.repo_id}{self._at()}: expected {what}, got no such file{hint}")

    def file_names(self) -> list[str]:
        """Return the names of all files, or none where they cannot be listed: only for explaining an error."""
        if self._offline:
            return []
        try:
            return huggingface_hub.HfApi(token=self._token).list_repo_files(self.repo_id, revision=self.revision)
        except Exception:
            return []

    def _at(self) -> str:
        return f" at revision {self.revision}" if self.revision is not None else ""

    def _error(self, name: str, fault: BaseException) -> HubError:
        return HubError(f"{self.repo_id}: {self._explain(name, fault)}")

    def _explain(self, name: str, fault: BaseException) -> str:
        page = f"{constants.ENDPOINT}/{self.repo_id}"
        if isinstance(fault, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError: asked first
            return f"access is gated; accept its terms at {page} with your account, then {_LOG_IN}"
        if isinstance(fault, errors.RepositoryNotFoundError):
            return f"no such repository, or a private one; check the name, and if it is private, {_LOG_IN}"
        if isinstance(fault, errors.RevisionNotFoundError):
            return f"no revision {self.revision!r}; see its branches and tags at {page}/tree/main"
        if isinstance(fault, errors.DisabledRepoError):
            return f"access to the repository is disabled by the Hub; see {page}"
        if isinstance(fault, errors.HfHubHTTPError):
            return self._explain_status(name, fault.response.status_code)
        if isinstance(fault, errors.OfflineModeIsEnabled):
            return f"{name} is not in the cache {constants.HF_HUB_CACHE}; {_OFFLINE}"
        if isinstance(fault, errors.HFValidationError):
            return f"not the name of a repository: {self._without_secrets(str(fault))}"
        if isinstance(fault, errors.FileMetadataError):
            return f"{constants.ENDPOINT} does not answer as a Hub does; check HF_ENDPOINT, proxy and firewall"
        if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:
            return (
                f"no room for {name} in the cache {constants.HF_HUB_CACHE}; free some, or set HF_HOME to another disk"
            )
        if isinstance(fault, PermissionError) or (isinstance(fault, OSError) and fault.errno == errno.EROFS):
            return f"the cache {constants.HF_HUB_CACHE} cannot be written ({fault}); set HF_HOME to a folder of yours"
        text = self._without_secrets(" ".join(str(fault).split()))
        return (
            f"{name} could not be fetched from {constants.ENDPOINT} ({type(fault).__name__}: {text}); check the "
            "network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        )

    def _explain_status(self, name: str, status: int) -> str:
        if status == 401:
            return f"{constants.ENDPOINT} does not accept the token; {_LOG_IN} with a token that is valid"
        if status == 403:
            return f"the token may not read {name}; {_LOG_IN} with a token that has access to this repository"
        if status == 429:
            return f"too many requests to {constants.ENDPOINT}; wait a while, or {_LOG_IN} for a higher limit"
        way_out = "try again later, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        return f"{constants.ENDPOINT} answered {name} with HTTP status {status}; {way_out}"

    def _secrets(self) -> set[str]:
        known = {self._token, huggingface_hub.get_token()}
        return {word for secret in known if secret for word in _words(secret)}

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text


def _words(text: str) -> Iterable[str]:
    return re.findall(r"[A-Za-z0-9_-]{6,}", text)
