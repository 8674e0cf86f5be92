"""One thin file per command; `app` finds them and owns the terminal."""
