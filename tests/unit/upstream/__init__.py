"""Programs that edit upstream, and what they make."""
