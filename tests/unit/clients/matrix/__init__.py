"""Scenarios of users of client libraries at several ZeRO stages (`make campaign NAME=clients`)."""
