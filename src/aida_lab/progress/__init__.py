"""The progress of runs: bars on a terminal, lines elsewhere; what ``aida watch`` shows."""
