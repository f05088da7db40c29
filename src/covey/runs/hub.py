"""Uploads to the Hugging Face hub during training: `push_to_hub`, `hub_strategy` and the other hub options of transformers."""

import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NoReturn

from covey.errors import ConfigError, CoveyError
from covey.files.hub import bounded_hub, limit_silence
from covey.runs import checkpoint, checksums
from covey.types import Event

logger = logging.getLogger(__name__)

CARD = "README.md"
_STAGED = ".upload-"
_NOT_OF_THE_MODEL = frozenset(
    {f"{checkpoint.STATE}.json", f"{checkpoint.STATE}.safetensors", checksums.NAME, "trainer_state.json"}
)
"""Files of a checkpoint that belong neither to model nor tokenizer."""
_REFUSED = frozenset({400, 401, 403, 404, 409})
"""HTTP status codes of the hub for which a retry is useless."""
_PATIENCE_SECONDS = 30.0
"""Seconds that a stopped run waits for an upload at its end."""


class UploadError(CoveyError):
    """Failed upload of `push_to_hub()`; the files are in the output folder."""

    exit_code = 69


class Hub:
    """Hub repository of a run. Uploads run one at a time in background threads, from files that cannot change meanwhile.

    During training a failed upload is a warning and an event `upload_failed`; the run goes on, and later uploads are tried
    as usual. Only the main process may upload.
    """

    def __init__(self, args: Any, output_dir: Path, tell: Callable[[Event], None]) -> None:
        self.args, self.output_dir, self.tell = args, output_dir, tell
        self.repo_id: str | None = None
        self._uploads: list[tuple[str, Future[Any]]] = []
        self._latest: Future[Any] | None = None
        """The upload that was started last: each waits for the one before, so that the newest save is the last commit."""

    @property
    def name(self) -> str:
        """Full name of the repository; until the hub has said who its owner is, the name in the options."""
        return self.repo_id or self.args.hub_model_id or self.output_dir.resolve().name

    @property
    def strategy(self) -> str:
        """Hub strategy: end, every_save, checkpoint or all_checkpoints."""
        return str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))

    @property
    def is_busy(self) -> bool:
        return any(not upload.done() for _, upload in self._uploads)

    def open_early(self) -> None:
        """Create the repository before work is spent. Raises ConfigError if the hub refuses; warns if it does not answer.

        Leftovers of killed uploads are removed.
        """
        for left in self.output_dir.glob(f"{_STAGED}*") if self.output_dir.is_dir() else ():
            shutil.rmtree(left, ignore_errors=True)
        name = self.name
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(
                f"push_to_hub=True, but {name!r} cannot be the name of a repository; set hub_model_id, such as 'me/my-model'."
            ) from error
        try:
            with bounded_hub("https://hub") as is_reachable:
                if is_reachable:
                    self.open()
                    return
            why = "the hub does not answer"
        except Exception as error:
            if _is_refusal(error):
                raise ConfigError(
                    f"push_to_hub=True, but the hub does not take the repository {name!r} ({_message(error)}). Log in with "
                    "`hf auth login` or set hub_token; hub_model_id names a repository that you may write to."
                ) from error
            why = _message(error)
        logger.warning("push_to_hub=True, but %s; training begins, and every upload tries again.", why)

    def open(self, token: str | None = None, private: bool | None = None) -> str:
        """Create the repository if missing. Returns its full name, with the owner's."""
        if self.repo_id is None:
            from huggingface_hub import HfApi

            limit_silence()
            chosen = self.args.hub_private_repo if private is None else private
            made = HfApi().create_repo(self.name, token=token or self.args.hub_token, private=chosen, exist_ok=True)
            self.repo_id = made.repo_id
        return self.repo_id

    def checkpoint_saved(self, path: Path, message: str, card: Callable[[], str]) -> None:
        """Upload a checkpoint by `hub_strategy`: its model, or with two of the strategies the full checkpoint.

        During an upload the next one is skipped unless `hub_always_push`.
        """
        if not self.args.push_to_hub or self.strategy == "end" or (self.is_busy and not self.args.hub_always_push):
            return
        names = [entry.name for entry in path.iterdir() if entry.name not in _NOT_OF_THE_MODEL]
        self.upload(path, names, message, card=card())
        if self.strategy in ("checkpoint", "all_checkpoints"):
            place = "last-checkpoint" if self.strategy == "checkpoint" else path.name
            self.upload(path, [entry.name for entry in path.iterdir()], f"{message}, checkpoint", place=place)

    def upload(
        self,
        folder: Path,
        names: Iterable[str],
        message: str,
        *,
        card: str | None = None,
        place: str = "",
        **overrides: Any,
    ) -> Future[Any]:
        """Start an upload of these files of `folder`, in their current state, and a model card. Returns a future of the commit.

        `overrides`: `token`, `revision` and `private` where they differ from the options.
        """
        staged = self._staged(folder, names, card)
        result: Future[Any] = Future()
        before, self._latest = self._latest, result

        def work() -> None:
            commit, failure = None, None
            if before is not None:
                wait([before])
            try:
                commit = self._commit(staged, message, place, **overrides)
            except BaseException as error:  # noqa: BLE001 - set on the future
                failure = error
            # before the result is set: a waiting caller finds the folder clean
            shutil.rmtree(staged, ignore_errors=True)
            if failure is not None:
                result.set_exception(failure)
            else:
                result.set_result(commit)

        self._uploads.append((message, result))
        threading.Thread(target=work, name="covey-hub", daemon=True).start()
        return result

    def poll(self) -> None:
        """Report failed uploads."""
        done = [entry for entry in self._uploads if entry[1].done()]
        self._uploads = [entry for entry in self._uploads if entry not in done]
        for message, upload in done:
            error = upload.exception()
            if error is not None:
                sentence = f"The upload {message!r} to the hub failed ({_message(error)})."
                logger.warning("%s The run goes on, and everything is in %s.", sentence, self.output_dir)
                self.tell(Event(kind="upload_failed", said=sentence, details={"repository": self.repo_id}))

    def finish(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait for running uploads and report failed ones; a stop signal shortens the wait."""
        wait([upload for _, upload in self._uploads], timeout=5.0)
        if self.is_busy:
            logger.warning("Waiting for an upload to the hub to end.")
        waited = 0.0
        for message, upload in list(self._uploads):
            while not upload.done() and waited < _PATIENCE_SECONDS:
                wait([upload], timeout=0.5)
                waited += 0.5 if is_hurried() else 0.0
            if not upload.done():
                logger.warning("The upload %r to the hub was not done in time and is left behind.", message)
        self.poll()

    def drop(self, upload: Future[Any]) -> None:
        """Forget this upload: its caller reports a failure itself."""
        self._uploads = [entry for entry in self._uploads if entry[1] is not upload]

    def _staged(self, folder: Path, names: Iterable[str], card: str | None) -> Path:
        """A folder of hard links to the files, which keeps files that a later save replaces or deletes."""
        staged = self.output_dir / f"{_STAGED}{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        for name in names:
            source = folder / name
            if source.is_dir():
                shutil.copytree(source, staged / name, copy_function=_linked)
            else:
                _linked(source, staged / name)
        if card is not None:
            (staged / CARD).unlink(missing_ok=True)  # a hard link: writing to it would change the original
            (staged / CARD).write_text(card, encoding="utf-8")
        return staged

    def _commit(
        self,
        staged: Path,
        message: str,
        place: str,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> Any:
        from huggingface_hub import HfApi

        token, revision, api = token or self.args.hub_token, revision or self.args.hub_revision, HfApi()
        limit_silence()
        repo = self.open(token, private)
        if revision is not None:
            api.create_branch(repo, branch=revision, token=token, exist_ok=True)
        return api.upload_folder(
            repo_id=repo,
            folder_path=staged,
            path_in_repo=place or None,
            commit_message=message,
            token=token,
            revision=revision,
        )


def raise_refused(error: BaseException, repository: str, output_dir: Path) -> NoReturn:
    """Raise UploadError for a failed upload, with the command to repeat it later."""
    raise UploadError(
        f"The model was not uploaded to {repository} ({_message(error)}). It is whole in {output_dir}: call push_to_hub() again, or "
        f"`hf upload {repository} {output_dir}`."
    ) from error


def _linked(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _is_refusal(error: BaseException) -> bool:
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, HFValidationError | LocalTokenNotFoundError) or status in _REFUSED


def _message(error: BaseException) -> str:
    """First line of an error, which contains no token."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
