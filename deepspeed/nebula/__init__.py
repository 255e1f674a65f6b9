"""Azure Nebula checkpoints, which are refused. This release holds their configuration only."""
