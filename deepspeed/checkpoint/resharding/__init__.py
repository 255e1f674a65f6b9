"""Resharding: what ranks of one number saved, made into what ranks of another number need."""
