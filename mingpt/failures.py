"""Failures of a run, told in one sentence."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from mingpt.distributed import DistributedContext
from mingpt.errors import ExpectedError, NonRetryableError
from mingpt.report import mark_ended
from mingpt.run_folder import RunFolder

log = logging.getLogger(__name__)


def raise_if_repeated(context: DistributedContext, folder: RunFolder) -> None:
    """Raises NonRetryableError on all ranks if generation after generation has failed to begin.

    Also says who did not come to the last rendezvous. An evaluation alone writes nothing.
    """
    if context.rendezvous and context.rendezvous.missing_workers:
        log.warning("%s", context.rendezvous.missing_workers)
    if context.repeated_failure:
        if folder.is_kept:
            mark_ended(folder.path, "failed", f"failed: {context.repeated_failure}")
        raise NonRetryableError(context.repeated_failure)


@contextlib.contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Raises ExpectedError where memory does not suffice."""
    try:
        yield
    except RuntimeError as error:
        messages = ("can't allocate memory", "not enough memory")
        if isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in messages):
            raise ExpectedError(
                "out of memory: lower trainer.micro_batch_size, the batch stays the same; "
                "or train a smaller model"
            ) from error
        raise


def not_finite(step: int, where: Sequence[str], first_window: int, last_window: int) -> str:
    """The sentence on a loss, of these micro-batches, or a gradient that is not finite."""
    what = f"loss of {'; '.join(where)}" if where else f"gradient of windows {first_window} to {last_window}"
    return f"step {step}: the {what} is not finite; its update is dropped and the last snapshot is kept"
