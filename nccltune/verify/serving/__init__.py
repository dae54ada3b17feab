"""One boot of one arm: a server started, watched, looked at and ended."""
