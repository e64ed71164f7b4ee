"""A list of pictures and the folder that they go to; what is there already is not drawn again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachekit.files import write_atomically
from cachekit.run.images import decode
from cachekit.run.settings import Picture, Settings

Advance = Callable[[str, int], None]
"""Called with what comes next and the number of pictures finished since the last call."""


@dataclass(frozen=True)
class Job:
    """What is drawn and where it goes.

    Attributes:
        settings: what all pictures share.
        pictures: each of them.
        folder: exists.
    """

    settings: Settings
    pictures: tuple[Picture, ...]
    folder: Path

    def path(self, picture: Picture) -> Path:
        """Where a picture goes."""
        return self.folder / picture.name

    def is_there(self, picture: Picture) -> bool:
        """True when it was drawn with the same settings."""
        found = decode(self.path(picture))
        return found is not None and found[0] == picture.settings

    def missing(self) -> Job:
        """The same job without what is there."""
        return self.only([picture for picture in self.pictures if not self.is_there(picture)])

    def only(self, pictures: Sequence[Picture]) -> Job:
        """The same job with other pictures."""
        return Job(self.settings, tuple(pictures), self.folder)

    def keep(self, picture: Picture, data: bytes) -> Path:
        """Write a picture, whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        return write_atomically(self.path(picture), data)

    def work(self) -> list[dict[str, Any]]:
        """What the pictures that are there took."""
        found = (decode(self.path(picture)) for picture in self.pictures)
        return [each[1] for each in found if each is not None]

    def to_json(self) -> str:
        """For another process on this machine."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What :meth:`to_json` gave."""
        data = json.loads(text)
        pictures = tuple(Picture(**picture) for picture in data["pictures"])
        return cls(Settings(**data["settings"]), pictures, Path(data["folder"]))


def draw_here(job: Job, device: str, advance: Advance) -> None:
    """Draw everything in this process.

    Raises:
        RunError: the settings cannot be used.
        OSError: the folder cannot be written.
    """
    from cachekit.run.painter import Painter

    if not job.pictures:
        return
    advance("loading", 0)
    painter = Painter(job.settings, device)
    for picture in job.pictures:
        advance(picture.prompt, 0)
        job.keep(picture, painter.paint(picture))
        advance(picture.prompt, 1)
