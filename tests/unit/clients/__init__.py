"""Client libraries, unmodified, on this package."""
