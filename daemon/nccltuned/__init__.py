"""The service that keeps a host's active profile published. Not part of this release yet."""
