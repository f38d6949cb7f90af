"""Where workers run: `base` says what a launcher is, each other file is one kind."""
