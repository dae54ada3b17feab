"""The service that watches over the active profile of a host."""
