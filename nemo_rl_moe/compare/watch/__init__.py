"""A live view of one run in the terminal. Needs the textual package, in `app` only."""
