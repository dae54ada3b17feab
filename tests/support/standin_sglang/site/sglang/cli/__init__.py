"""Command line of the stand-in."""
