"""What runs long on purpose: `make campaign` lists it, `make campaign NAME=...` runs one of it."""
