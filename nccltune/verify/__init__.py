"""Check a profile end to end: server arms, load, verdict. Not part of this release yet."""
