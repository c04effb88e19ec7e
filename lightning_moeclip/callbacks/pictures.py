"""Pictures and tables to whatever loggers a Trainer has. Nothing here is a collective: rank 0 alone comes here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from lightning_moeclip.binding import Trainer

__all__ = ["write_picture", "write_table"]


def write_picture(trainer: Trainer, tag: str, picture: NDArray[np.uint8], *, step: int, folder: str) -> None:
    """Give a picture to each logger that takes pictures; where none does, write a PNG file.

    Args:
        trainer: of the run.
        tag: name of the picture.
        picture: [height, width, 3].
        step: the picture's.
        folder: where the file goes, ``step_000500.png``, under the folder of the first logger or else the Trainer's.
    """
    is_taken = False
    for logger in trainer.loggers:
        if _takes(logger, "log_image"):
            logger.log_image(tag, [picture], step=step)
        elif _takes(_experiment_of(logger), "add_image"):  # TensorBoard's writer
            _experiment_of(logger).add_image(tag, picture, step, dataformats="HWC")
        else:
            continue
        is_taken = True
    if not is_taken:
        from matplotlib.image import imsave

        # Lightning takes a root on another machine, too, such as s3://runs; a folder may have "::" in its name
        root = f"{_root_of(trainer)}/{folder}"
        files, path = url_to_fs(root) if "://" in root else (LocalFileSystem(), root)
        files.makedirs(path, exist_ok=True)
        with files.open(f"{path}/step_{step:06d}.png", "wb") as file:
            imsave(file, picture, format="png")


def write_table(trainer: Trainer, tag: str, rows: Sequence[Sequence[str]], *, step: int) -> None:
    """Give a table of text to each logger that takes text.

    Args:
        trainer: of the run.
        tag: name of the table.
        rows: the head first.
        step: the table's.
    """
    head, *body = [list(row) for row in rows]
    lines = [head, ["---"] * len(head), *body]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for logger in trainer.loggers:
        if _takes(logger, "log_text"):
            logger.log_text(tag, columns=head, data=body, step=step)
        elif _takes(_experiment_of(logger), "add_text"):
            _experiment_of(logger).add_text(tag, markdown, step)


def _experiment_of(logger: Any) -> Any:
    """What a logger writes with; Lightning asks of a logger only ``name``, ``version`` and two methods."""
    return getattr(logger, "experiment", None)


def _takes(receiver: Any, method: str) -> bool:
    return callable(getattr(receiver, method, None))


def _root_of(trainer: Trainer) -> str:
    """Folder or address for files; ``trainer.log_dir`` would broadcast."""
    for logger in trainer.loggers:
        found = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        if found:
            return str(found)
    return str(trainer.default_root_dir)
