"""Check a profile end to end: server arms, load, verdict."""
