"""File names that say what is drawn and can never leave the folder."""

from __future__ import annotations

import re
import unicodedata

_LONGEST = 48
_DIGITS = 12


def file_name(prompt: str, seed: int, digest: str) -> str:
    """`red-heart-0-1f2e3d4c5b6a.png`: of a prompt only the letters a to z and digits are left.

    Args:
        prompt: any text.
        seed: of the noise.
        digest: hexadecimal digits that tell other settings apart.

    Raises:
        ValueError: `digest` is no hexadecimal number, or too short.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{_DIGITS},}}", digest):
        raise ValueError(f"a digest has at least {_DIGITS} hexadecimal digits, got {digest!r}")
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_LONGEST].rstrip("-")
    return f"{words or 'picture'}-{int(seed)}-{digest[:_DIGITS]}.png"
