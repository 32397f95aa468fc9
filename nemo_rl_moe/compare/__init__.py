"""Matched comparison of runs: readers, statistics, what differs, and how it is shown. Imports neither torch nor Ray."""
