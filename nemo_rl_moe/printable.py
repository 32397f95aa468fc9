"""Text of files that others wrote, made safe to show: names, reasons, samples and settings may hold anything."""

from __future__ import annotations

import re

# What a terminal takes for commands, what turns the direction of the text around it, and halves of characters, which
# no encoding can write.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with a replacement character for each that must not be shown; line breaks and tabs stay."""
    return _UNSAFE.sub("\ufffd", text)
