"""Running servers against the active profile. Changes nothing in a running process."""
