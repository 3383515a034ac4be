"""Which clips of a corpus are trained on and which are validated on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from myxtts.config import DataSettings
from myxtts.data.cache import identity
from myxtts.data.corpus import Clip


def held_out(clips: Sequence[Clip], data: DataSettings) -> npt.NDArray[np.bool_]:
    """Which of the clips are validated on: as the corpus says, else by a hash of the text.

    The hash makes the choice the same on every machine and unmoved by other clips, and keeps a sentence that
    several speakers read on one side.
    """
    chosen = np.array([clip.held_out for clip in clips], bool)
    if chosen.any() or data.val_data or data.val_fraction == 0 or not len(clips):
        return chosen
    draw = np.array([identity("held out", clip.text) for clip in clips], np.uint64) / 2.0**64
    chosen = np.asarray(draw < max(data.val_fraction, np.nextafter(draw.min(), 1)))
    if chosen.all():  # few sentences: the last one is trained on
        chosen = np.asarray(draw < draw.max())
    return chosen
