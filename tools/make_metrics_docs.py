#!/usr/bin/env python3
"""Writes docs/metrics.md from the table of metrics. With --check it compares, and exits with 1 if it is not current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from nemo_rl_moe.tracking.definitions import markdown  # noqa: E402

TARGET = REPOSITORY / "docs/metrics.md"


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    text = markdown()
    if parser.parse_args().check:
        current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print("docs/metrics.md is current" if current else "docs/metrics.md is not current: run `make docs`")
        return 0 if current else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
